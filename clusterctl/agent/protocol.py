"""What travels between the controller and the agent on a node, and what a node writes down. Values: no I/O, no clock.

Frames: a header of 5 bytes (length of the body, kind), then the body. A message is one JSON object; data is a stream
number, an offset and raw bytes. Requests carry the controller's epoch; each gets exactly one reply with its id.
Strict with kinds, tolerant with fields: unknown fields of a peer are ignored, so both sides can gain some.

The names of the files of a run are here too, because a replica on the head has the node's own names.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Union

if TYPE_CHECKING:
    from collections.abc import Iterator

PROTOCOL = 1
BEAT_SECONDS = 5.0
IDLE_SECONDS = 60.0
CREDIT_BYTES = 512 * 1024
MAX_FRAME = 16 * 1024 * 1024
CHUNK_BYTES = 64 * 1024

JOURNAL_FILE = "journal.jsonl"
SAMPLES_FILE = "samples.jsonl"
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
    return f"attempt-{attempt}/rank-{rank}.idx"


# --- frames


@dataclass(frozen=True)
class Data:
    """Raw bytes of a stream, which begin at `offset`."""

    stream: int
    offset: int
    payload: bytes


Frame = Union[dict[str, Any], Data]


class FrameError(ValueError):
    """The peer sent something that is not a frame of ours."""


def encode_message(message: dict[str, Any]) -> bytes:
    """Return the frame of one JSON message."""
    body = json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogateescape")
    return _HEADER.pack(len(body), _MESSAGE_KIND) + body


def encode_data(stream: int, offset: int, payload: bytes) -> bytes:
    """Return the frame of some bytes of a stream."""
    return _HEADER.pack(_DATA.size + len(payload), _DATA_KIND) + _DATA.pack(stream, offset) + payload


class Decoder:
    """Cuts a byte stream into frames, however it was split on its way."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take in `data`; yield each frame that is complete now.

        Raises:
            FrameError: The stream is not ours (noise after the preamble) or a frame is over `MAX_FRAME`.
        """
        self._buffer += data
        position = 0
        while len(self._buffer) - position >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer, position)
            if kind not in (_MESSAGE_KIND, _DATA_KIND) or length > MAX_FRAME:
                raise FrameError(f"not a frame: {bytes(self._buffer[position : position + 80])!r}")
            end = position + _HEADER.size + length
            if end > len(self._buffer):
                break
            body = bytes(memoryview(self._buffer)[position + _HEADER.size : end])
            position = end
            yield _decode(kind, body)
        del self._buffer[:position]


def _decode(kind: int, body: bytes) -> Frame:
    if kind == _DATA_KIND:
        stream, offset = _DATA.unpack_from(body)
        return Data(stream, offset, body[_DATA.size :])
    try:
        message = json.loads(body.decode("utf-8", "surrogateescape"))
    except ValueError as error:
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
    LISTEN = "listen"  # {port, nonce, seconds} -> {port}
    UNLISTEN = "unlisten"  # {nonce} -> {}: the port of that LISTEN is free again
    CONNECT = "connect"  # {address, port, nonce, timeout} -> {ok, ms, error}
    MANIFEST = "manifest"  # {workdir, files: {path: [size, mode, sha256]}, run} -> {need: [path]}
    RECEIVE = "receive"  # {workdir, files: [[path, size, mode, sha256]], stream} then data -> {written, hash}
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
# RECEIVE). Only what FOLLOW sends is on credit; the files of a FETCH are sent one after the other in the stream of its
# request, in the order of its answer, and the offsets run through. The answer of EXEC and FETCH comes after their last
# Data. Data of a RECEIVE follows its request at once, with offsets that run through, and its answer comes after that.

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


T = TypeVar("T")


def from_wire(cls: type[T], value: dict[str, Any]) -> T:
    """Return a dataclass of flat fields from a peer's object; fields we do not know are left out.

    Raises:
        FrameError: A field that must be there is not.
    """
    known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{k: v for k, v in value.items() if k in known})
    except TypeError as error:
        raise FrameError(f"{cls.__name__}: {error}") from error


def to_wire(value: Any) -> dict[str, Any]:
    """Return a dataclass as the object that `from_wire` reads."""
    return asdict(value)


@dataclass(frozen=True)
class Prepare:
    """Make one node ready for one attempt. Repeating it for the same attempt answers the same.

    Attributes:
        ports: TCP ports to hold until the attempt's end; 0 for any free one.
        gpus: Device indices that the run claims on this node; empty for none.
        ranks: Ranks whose output files get reserved space.
        reserve: Bytes reserved beyond the end of each output file.
        max_size: Bytes after which the oldest replicated output is punched out; `None` for never.
        grace: Seconds between SIGTERM and SIGKILL when the node stops by itself.
        stop_after: Seconds without a controller's frame after which the node stops the run; `None` for never.
        workdir: Folder of the code, already there; made if it is missing.
        python: What the user named, or `None`; the answer names the interpreter to use.
        python_hint: A path to try first where the user named none (the head's own interpreter).
        sample_seconds: Interval of activity samples.
        health_seconds: Interval of GPU and host samples; 0 turns them off.
    """

    run: str
    node: str
    attempt: int
    workdir: str
    name: str = ""
    ports: list[int] = field(default_factory=list)
    gpus: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    reserve: int = 64 * 1024 * 1024
    max_size: int | None = None
    grace: float = 10.0
    stop_after: float | None = None
    python: str | None = None
    python_hint: str | None = None
    sample_seconds: float = 2.0
    health_seconds: float = 15.0
    watch: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerStart:
    """One worker of an attempt. `argv` is executed as it is, after `prologue` (run by bash) where there is one.

    Attributes:
        hosts: Where `argv` is not a worker but a launcher: the ranks that it starts, by local rank.
        hosted: What such a launcher starts as each of them; put behind `argv`.
    """

    rank: int
    local_rank: int
    argv: list[str]
    env: dict[str, str]
    prologue: str | None = None
    hosts: list[int] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """Start the workers of a prepared attempt; all of the node at once.

    Attributes:
        workers: Wire form of `WorkerStart`.
        secrets: Merged over each worker's environment; kept on a tmpfs (0600) only while `keep_secrets`.
        keep_secrets: A later attempt may need them again.
        inject: Put our `sitecustomize` first on PYTHONPATH.
    """

    run: str
    node: str
    attempt: int
    workers: list[dict[str, Any]]
    secrets: dict[str, str] = field(default_factory=dict)
    keep_secrets: bool = False
    inject: bool = True


@dataclass(frozen=True)
class Stop:
    """Stop the attempt: SIGTERM and SIGCONT to every group, `grace` seconds, SIGKILL, sweep until empty twice.

    Repeating it may shorten the grace, never lengthen it. `reason` is one of `StopReason`.
    """

    run: str
    node: str
    grace: float
    reason: str


@dataclass(frozen=True)
class Follow:
    """Send the journal after `seq`, and each file of the run from its cursor (bytes; 0 where none is named)."""

    run: str
    node: str
    seq: int
    cursors: dict[str, int] = field(default_factory=dict)
    credit: int = CREDIT_BYTES


class StopReason(str, Enum):
    """Who or what asked for the end of an attempt."""

    PEER_FAILED = "peer_failed"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    TIME_LIMIT = "time_limit"
    FENCE = "fence"
    NODE_LOST = "node_lost"
    START_FAILED = "start_failed"
    RESTART = "restart"
    FINISHED = "finished"
    UNHEALTHY = "unhealthy"


# --- journal


@dataclass(frozen=True)
class Stamp:
    """When and where an event was written.

    Attributes:
        seq: Rises by one in each journal, over restarts of the supervisor too.
        wall: Wall clock of the node, seconds.
        mono: Monotonic clock of the node, seconds; comparable only within one boot.
        boot: Boot id of the node.
    """

    seq: int
    wall: float
    mono: float
    boot: str


@dataclass(frozen=True)
class Prepared:
    """The node is ready for the attempt."""

    KIND: ClassVar[str] = "prepared"
    attempt: int
    ports: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Started:
    """A worker's process is there. `start_time` is in clock ticks since boot (`/proc/PID/stat`, field 22)."""

    KIND: ClassVar[str] = "started"
    attempt: int
    rank: int
    local_rank: int
    pid: int
    start_time: int


@dataclass(frozen=True)
class Exited:
    """A worker is gone.

    Attributes:
        exit_code: Its exit status, or `None` after a signal or where nobody was left to see it.
        signal: Number of the signal that ended it, or `None`.
        stopped: We asked for it; it did not fail by itself.
        earliest: Monotonic clock of the node before which it was still seen alive.
        latest: Monotonic clock when it was seen gone.
        oom: How we know that the kernel killed it for memory: `cgroup`, `kernel log`, `probably`, or `None`.
        error: What it wrote to `TORCHELASTIC_ERROR_FILE`, `{message, traceback}`, or `None`.
        tail: The end of its output (at most 8 KiB), given when it did not end well and was not stopped.
    """

    KIND: ClassVar[str] = "exited"
    attempt: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    stopped: bool = False
    earliest: float = 0.0
    latest: float = 0.0
    oom: str | None = None
    error: dict[str, Any] | None = None
    tail: str = ""


@dataclass(frozen=True)
class Stopping:
    """SIGTERM has gone out to everything of the attempt on this node.

    Attributes:
        reason: A `StopReason`.
        leaving: Ranks whose process was ending by itself already, though nobody had been told yet.
    """

    KIND: ClassVar[str] = "stopping"
    attempt: int
    reason: str
    grace: float
    leaving: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Swept:
    """Nothing of the attempt is left, or `remaining`: `[{pid, start_time, command, why}]`. `killed` counts strays."""

    KIND: ClassVar[str] = "swept"
    attempt: int
    killed: int = 0
    remaining: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Finished:
    """The run is over on this node; nothing follows."""

    KIND: ClassVar[str] = "finished"
    state: str
    exit_code: int


@dataclass(frozen=True)
class Adopted:
    """A new supervisor goes on where the last one died. `attempt` is -1 before the first."""

    KIND: ClassVar[str] = "adopted"
    attempt: int
    pid: int


@dataclass(frozen=True)
class Dropped:
    """Output before `first_valid` (bytes) is gone from the node; `lost` bytes of it were never replicated."""

    KIND: ClassVar[str] = "dropped"
    attempt: int
    rank: int
    first_valid: int
    lost: int
    why: str


GPU_MEMORY = "gpu_memory"
"""Code of the alarm that memory of a GPU is not free after the attempt that used it."""


@dataclass(frozen=True)
class Alarm:
    """Something a person should know: a health change, a full disk, a sampler that died. Shown once in the log view."""

    KIND: ClassVar[str] = "alarm"
    attempt: int
    code: str
    message: str
    severity: str = "warn"
    gpu: int | None = None
    rank: int | None = None


Event = Union[Prepared, Started, Exited, Stopping, Swept, Finished, Adopted, Dropped, Alarm]
_EVENTS: dict[str, type[Any]] = {
    c.KIND: c for c in (Prepared, Started, Exited, Stopping, Swept, Finished, Adopted, Dropped, Alarm)
}


def encode_event(stamp: Stamp, event: Event) -> str:
    """Return the line of the journal, without its end."""
    record = {**asdict(stamp), "kind": event.KIND, **asdict(event)}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True)


def decode_event(line: str | bytes) -> tuple[Stamp, Event] | None:
    """Return what a line of a journal says, or `None` for a kind that only a newer agent knows.

    Raises:
        FrameError: The line is torn or not ours.
    """
    try:
        record = json.loads(line)
    except ValueError as error:
        raise FrameError(f"not an event: {line[:80]!r}") from error
    return decode_record(record)


def decode_record(record: Any) -> tuple[Stamp, Event] | None:
    """Return what the object of a line of a journal says (see `decode_event`)."""
    if not isinstance(record, dict) or "kind" not in record:
        raise FrameError(f"not an event: {str(record)[:80]!r}")
    cls = _EVENTS.get(record["kind"])
    return None if cls is None else (from_wire(Stamp, record), from_wire(cls, record))
