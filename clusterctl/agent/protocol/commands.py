"""What travels between the controller and the agent on a node, and what a node writes down. Values: no I/O, no clock.

Frames: a header of 5 bytes (length of the body, kind), then the body. A message is one JSON object; data is a stream
number, an offset and raw bytes. Requests carry the controller's epoch; each gets exactly one reply with its id.
Strict with kinds, tolerant with fields: unknown fields of a peer are ignored, so both sides can gain some.

The names of the files of a run are here too, because a replica on the head has the node's own names.
"""

from __future__ import annotations

import json
import struct
from enum import Enum

from clusterctl.agent.protocol.values import value

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, Callable, Union

    from clusterctl.agent.protocol.events import (
        GPU_MEMORY,
        PORT_TAKEN,
        Adopted,
        Alarm,
        Dropped,
        Event,
        Exited,
        Finished,
        Follow,
        Prepare,
        Prepared,
        Stamp,
        Start,
        Started,
        Stop,
        Stopping,
        StopReason,
        Swept,
        WorkerStart,
        decode_event,
        decode_record,
        encode_event,
        from_wire,
        to_wire,
    )

    Frame = Union[dict[str, Any], "Data"]

__all__ = [
    "AGENT_STREAMS",
    "BEAT_SECONDS",
    "CHUNK_BYTES",
    "CREDIT_BYTES",
    "GPU_MEMORY",
    "IDLE_SECONDS",
    "INDEX_ENDING",
    "INDEX_RECORD",
    "JOURNAL_FILE",
    "MAX_FRAME",
    "MOST_VALUES",
    "PORT_TAKEN",
    "PROTOCOL",
    "SAMPLES_FILE",
    "SAMPLES_KEPT",
    "UNANSWERED",
    "Adopted",
    "Alarm",
    "Command",
    "Data",
    "Decoder",
    "Dropped",
    "ErrorKind",
    "Event",
    "Exited",
    "Finished",
    "Follow",
    "FrameError",
    "Prepare",
    "Prepared",
    "Stamp",
    "Start",
    "Started",
    "Stop",
    "StopReason",
    "Stopping",
    "Swept",
    "TooLargeError",
    "WorkerStart",
    "attempt_and_rank",
    "attempt_of",
    "beat",
    "beat_answer",
    "decode_event",
    "decode_record",
    "encode_data",
    "encode_event",
    "encode_message",
    "first_kept",
    "from_wire",
    "index_file",
    "output_file",
    "refusal",
    "reply",
    "request",
    "to_wire",
]

PROTOCOL = 1
BEAT_SECONDS = 5.0
IDLE_SECONDS = 60.0
CREDIT_BYTES = 512 * 1024
MAX_FRAME = 16 * 1024 * 1024
MOST_VALUES = 1 << 21
"""Values that one message may hold: each costs many times its bytes in memory."""
CHUNK_BYTES = 64 * 1024

JOURNAL_FILE = "journal.jsonl"
SAMPLES_FILE = "samples.jsonl"
SAMPLES_KEPT = 64 * 1024 * 1024
"""Bytes of its samples that a node keeps at most (see `first_kept`)."""
INDEX_ENDING = ".idx"
INDEX_RECORD = struct.Struct("<Qd")
"""One record of a time index: the size of the output file (bytes), and the wall clock (seconds) when it was seen."""

_HEADER = struct.Struct(">IB")
_DATA = struct.Struct(">IQ")
_MESSAGE_KIND = 0
_DATA_KIND = 1


def output_file(attempt: int, rank: int) -> str:
    """Where a worker's stdout and stderr lie, relative to the run directory of its node."""
    return f"attempt-{attempt}/rank-{rank}.log"


def index_file(attempt: int, rank: int) -> str:
    """Where the time index of that output lies: `INDEX_RECORD` after `INDEX_RECORD`."""
    return f"attempt-{attempt}/rank-{rank}{INDEX_ENDING}"


def attempt_and_rank(name: str, form: Callable[[int, int], str] = output_file) -> tuple[int, int] | None:
    """Return which attempt and rank a file is of whose name has that form, or `None` for any other file."""
    folder, _, file = name.partition("/")
    numbers = folder[len("attempt-") :], file[len("rank-") :].partition(".")[0]
    if not all(number.isdigit() for number in numbers):
        return None
    attempt, rank = map(int, numbers)
    return (attempt, rank) if name == form(attempt, rank) else None


def attempt_of(name: str) -> int:
    """Return the attempt in whose folder a file of a run lies, -1 where it is of none."""
    number = name.partition("/")[0][len("attempt-") :]
    return int(number) if name.startswith("attempt-") and number.isdigit() else -1


def first_kept(size: int, most: int) -> int:
    """Return the first byte that is kept of a file of `size` bytes whose front gives way: always the last `most / 2`.

    It follows from the size alone, so that whoever reads the file knows without being told what is gone.
    """
    half = most // 2
    return max(0, size // half - 1) * half


# --- frames


@value(frozen=True)
class Data:
    """Raw bytes of a stream, which begin at `offset`."""

    stream: int
    offset: int
    payload: bytes


class FrameError(ValueError):
    """The peer sent something that is not a frame of ours."""


class TooLargeError(ValueError):
    """There is more to say than a frame holds. The peer would take it for something that is not a frame of ours."""


def encode_message(message: dict[str, Any]) -> bytes:
    """Return the frame of one JSON message.

    Raises:
        TooLargeError: Its body would be over `MAX_FRAME`.
    """
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")
    if len(body) > MAX_FRAME:
        raise TooLargeError(f"the message has {len(body) / 2**20:.1f} MiB and may have at most {MAX_FRAME >> 20} MiB")
    return _HEADER.pack(len(body), _MESSAGE_KIND) + body


def encode_data(stream: int, offset: int, payload: bytes) -> bytes:
    """Return the frame of some bytes of a stream."""
    return _HEADER.pack(_DATA.size + len(payload), _DATA_KIND) + _DATA.pack(stream, offset) + payload


class Decoder:
    """Cuts a byte stream into frames, however it was split on its way.

    Args:
        largest: Tells how many bytes a message may have now; what a frame holds where it is not given.

    Attributes:
        size: Bytes of the body of the frame that was given last.
    """

    def __init__(self, largest: Callable[[], int] | None = None) -> None:
        self._buffer = bytearray()
        self._largest = largest
        self.size = 0

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take in `data`; yield each frame that is complete now.

        Raises:
            FrameError: The stream is not ours (noise after the preamble), or a frame is larger than it may be.
        """
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer, position)
            if kind not in (_MESSAGE_KIND, _DATA_KIND) or length > MAX_FRAME:
                raise FrameError(f"not a frame: {bytes(self._buffer[position : position + 80])!r}")
            if self._largest is not None and kind == _MESSAGE_KIND and length > self._largest():
                raise FrameError(f"a message of {length} bytes, and {self._largest()} are the most now")
            end = position + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(memoryview(self._buffer)[position + _HEADER.size : end])
            position = end
            self.size = length
            yield _decode(kind, body)
        del self._buffer[:position]


def _decode(kind: int, body: bytes) -> Frame:
    if kind == _DATA_KIND:
        if len(body) < _DATA.size:
            raise FrameError(f"data without a stream: {body!r}")
        stream, offset = _DATA.unpack_from(body)
        return Data(stream, offset, body[_DATA.size :])
    if len(body) > MOST_VALUES and sum(body.count(mark) for mark in (b",", b"[", b"{")) > MOST_VALUES:
        raise FrameError(f"a message with over {MOST_VALUES} values")
    try:
        message = json.loads(body.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a message: {body[:80]!r}") from error
    if not isinstance(message, dict):
        raise FrameError(f"not a message: {body[:80]!r}")
    return message


# --- requests


class Command(str, Enum):
    """Everything that a controller may ask a node for. The arguments are named beside each."""

    HELLO = "hello"  # {} -> facts about machine and user that planning needs
    ROUTES = "routes"  # {targets: [address]} -> {routes: {address: {source, interface} | null}}
    PROBE = "probe"  # {python, prologue, env, cwd, request} -> health facts
    LISTEN = "listen"  # {port, nonce, seconds, payload: bytes to send back, enough: peers} -> {port}
    UNLISTEN = "unlisten"  # {nonce} -> {}: the port of that LISTEN is free again
    CONNECT = "connect"  # {address, port, nonce, timeout, payload} -> {ok, ms, error, source}, of a payload also
    #   {payload, sent: taken by the peer's kernel, received, still: seconds since anything moved}
    MANIFEST = "manifest"  # {workdir, run, stream, size} then `size` bytes of `listing` -> {need: [number in it]}
    RECEIVE = "receive"  # {manifest: its stream, stream} then data of what it needed -> {written, hash}
    FETCH = "fetch"  # {workdir, pattern, stream} -> data of each file, then {files: [[path, size, mode]]}
    CHECKPOINTS = "checkpoints"  # {workdir, pattern} -> {found: [{path, mtime}]}, complete ones only
    CODE = "code"  # {workdir} -> {hash | null}: over what syncs brought, as it is now; null where none did
    #   {workdir, unsynced: true} -> {files: {path: hash}}: source files that nobody synced
    PREPARE = "prepare"  # Prepare -> {ports: [int], run_dir, python}
    START = "start"  # Start -> {}
    STOP = "stop"  # Stop -> {}
    FINISH = "finish"  # {run, node, state, exit_code} -> {}
    FOLLOW = "follow"  # Follow -> {}; then pushes of kind event, and data of streams announced by kind stream
    CREDIT = "credit"  # {bytes} no reply: so many more log bytes may be sent
    REPLICATED = "replicated"  # {run, node, offsets: {file: bytes}} no reply: these are safe on the head
    READ = "read"  # {run, node, file, offset, length} -> {offset, size, first_valid, data: base64}
    STATUS = "status"  # {run, node} -> {supervisor: bool, epoch, attempt, workers: [{rank, pid, start_time, alive}]}
    RUNS = "runs"  # {} -> {runs: [{run, node, live, workdir, gpus, started, finished}]}
    EVIDENCE = "evidence"  # {run, node, name, ranks: [int] | null, deadline} -> {ranks: [...]}
    CLEAN = "clean"  # {run, node} -> {bytes}; refused while anything of the run lives
    # {argv | command, env, cwd, timeout, stream} -> data (stdout: stream, stderr: stream + 1), {exit_code, signal}
    EXEC = "exec"
    CANCEL = "cancel"  # {id} no reply of its own: ends a running exec
    BYE = "bye"  # {} -> {}; the agent exits


# What travels without being asked for, or without an answer:
#
# controller -> agent
#   {"beat": n}                              every BEAT_SECONDS; carries no id, no command, no epoch
# agent -> controller
#   {"beat": n, "wall": s, "mono": s, "boot": id}    at once, from the reading loop: the answer; with the times
#                                            at which n left and came back, it bounds the offset of the node's clocks
#   {"push": "event", "run": r, "node": d, "event": {…}}   one line of the journal (as `encode_event` wrote it)
#   {"push": "stream", "stream": n, "run": r, "node": d, "file": f}   Data of stream n is that file's; `offset`
#                                            of a Data frame is the offset in the file
# Streams that the agent announces have numbers >= AGENT_STREAMS; those below belong to the controller (EXEC, FETCH,
# MANIFEST, RECEIVE). Only what FOLLOW sends is on credit; the files of a FETCH are sent one after the other in the
# stream of its request, in the order of its answer, and the offsets run through. The answer of EXEC and FETCH comes
# after their last Data. Data of a MANIFEST or a RECEIVE follows its request at once, with offsets that run through,
# and its answer comes after that.

AGENT_STREAMS = 1 << 31


def beat(number: int) -> dict[str, Any]:
    """Return a sign of life of the controller."""
    return {"beat": number}


def beat_answer(number: int, wall: float, mono: float, boot: str) -> dict[str, Any]:
    """Return the agent's answer to a beat: its wall and monotonic clocks (seconds) and its boot id."""
    return {"beat": number, "wall": wall, "mono": mono, "boot": boot}


UNANSWERED = frozenset({Command.CREDIT, Command.REPLICATED, Command.CANCEL})


class ErrorKind(str, Enum):
    """Why a node did not do what it was asked."""

    BAD_REQUEST = "bad_request"
    STALE_EPOCH = "stale_epoch"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    FAILED = "failed"


def request(identity: int, command: Command, arguments: dict[str, Any], epoch: int | None) -> dict[str, Any]:
    """Return a request; `epoch` is `None` only before a run has one."""
    return {"id": identity, "cmd": command.value, "args": arguments, "epoch": epoch}


def reply(identity: int, result: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to the request of that id."""
    return {"id": identity, "result": result}


def refusal(identity: int, kind: ErrorKind, message: str, hint: str | None = None) -> dict[str, Any]:
    """Return the answer to a request that was not carried out."""
    return {"id": identity, "error": {"kind": kind.value, "message": message, "hint": hint}}


# --- what a run asks and tells


def __getattr__(name: str) -> object:
    """Gives what lies in `clusterctl.agent.protocol.events` (PEP 562): an agent that has to do with no run can do without."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from clusterctl.agent.protocol import events

    found: object = getattr(events, name)
    globals()[name] = found
    return found
