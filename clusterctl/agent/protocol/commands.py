"""What a controller may ask a node for, and the messages in which it does so. Values: no I/O, no clock.

Requests carry the controller's epoch; each gets exactly one reply with its id. Strict with kinds, tolerant with fields:
unknown fields of a peer are ignored, so both sides can gain some.
"""

from __future__ import annotations

from enum import Enum

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.frames import Message


PROTOCOL_VERSION = 1
HEARTBEAT_INTERVAL_S = 5.0
IDLE_TIMEOUT_S = 60.0


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
    #   {look: true} changes nothing -> {need, going: to be removed, gone: [first paths], user: a live run there}
    RECEIVE = "receive"  # {manifest: its stream, stream} then data of what it needed -> {written, hash}
    COPY = "copy"  # {folder, target, inside, stream, size} then a `listing` -> {need, folder}; RECEIVE takes the files
    FETCH = "fetch"  # {workdir, pattern, links, of, stream} -> data of each file, then {files: [[path, size, mode]]}
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
    # {argv, env, cwd, prologue, beside, term, rows, columns, stream}: both ways -> {exit_code, signal}
    TERMINAL = "terminal"
    RESIZE = "resize"  # {stream, rows, columns} no reply: the size of that terminal
    TUNNEL = "tunnel"  # {host, port, stream}: what is connected there -> {}, then both ways
    TAKEN = "taken"  # {stream, bytes} no reply: so many more may be sent in it
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
#   {"push": "complete", "run": r, "node": d, "before": a}   all data of attempts before that one was sent
#   {"push": "taken", "stream": n, "bytes": k}   so many more may be sent in that stream
#   {"push": "stale", "run": r, "node": d}   another controller holds the run now
# Streams that the agent announces have numbers >= AGENT_STREAMS; those below belong to the controller (EXEC, FETCH,
# MANIFEST, COPY, RECEIVE, TERMINAL, TUNNEL). Only FOLLOW sends on credit; the files of a FETCH are sent one after
# the other in the stream of its request, in the order of its answer, and the offsets run through. The answer of EXEC
# and FETCH comes after their last Data. Data of a MANIFEST or a RECEIVE follows its request at once, with offsets that
# run through, and its answer comes after that. In the stream of a TERMINAL or a TUNNEL bytes go both ways, on each side
# at most WINDOW_BYTES more than the other has taken; Data without bytes is the end of what that side sends.

FIRST_AGENT_STREAM = 1 << 31


def make_heartbeat(number: int) -> Message:
    """Return a sign of life of the controller."""
    return {"beat": number}


def make_heartbeat_answer(number: int, wall: float, mono: float, boot: str) -> Message:
    """Return the agent's answer to a beat: its wall and monotonic clocks (seconds) and its boot id."""
    return {"beat": number, "wall": wall, "mono": mono, "boot": boot}


WINDOW_BYTES = 256 * 1024
"""Bytes of a stream that goes both ways which may be under way, or wait where they go, on either side."""

COMMANDS_WITHOUT_ANSWER = frozenset({Command.CREDIT, Command.REPLICATED, Command.CANCEL, Command.RESIZE, Command.TAKEN})


class ErrorKind(str, Enum):
    """Why a node did not do what it was asked."""

    BAD_REQUEST = "bad_request"
    STALE_EPOCH = "stale_epoch"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    FAILED = "failed"


def make_request(identity: int, command: Command, arguments: Mapping[str, object], epoch: int | None) -> Message:
    """Return a request; `epoch` is `None` only before a run has one."""
    return {"id": identity, "cmd": command.value, "args": arguments, "epoch": epoch}


def make_answer(identity: int, result: Mapping[str, object]) -> Message:
    """Return the answer to the request of that id."""
    return {"id": identity, "result": result}


def make_error_answer(identity: int, kind: ErrorKind, message: str, hint: str | None = None) -> Message:
    """Return the answer to a request that was not carried out."""
    return {"id": identity, "error": {"kind": kind.value, "message": message, "hint": hint}}


NETWORK_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Which network a rank uses, by library."""

LOGIN_VARIABLES = (
    *NETWORK_INTERFACE_VARIABLES,
    *("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE"),
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("KERAS_BACKEND", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"),
    *("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
)

MAX_LOGIN_VALUE_CHARS = 1024
"""Of a value; a longer one is cut off, which still tells it from ours."""
