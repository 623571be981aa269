"""The commands of a controller to a node, and the messages of requests, answers, errors and heartbeats. Pure.

A request contains an id and the epoch of the controller, and gets one answer with the same id. `command_payload_types`
has the arguments and the answer of each command; docs/protocol.md describes streams and pushes. A peer ignores unknown
fields, so either side may add fields.
"""

from __future__ import annotations

from enum import Enum

from clusterctl.agent.protocol.frames import FrameTooLargeError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.protocol.frames import Message


PROTOCOL_VERSION = 1


class Command(str, Enum):
    """The commands of a controller to a node."""

    HELLO = "hello"
    ROUTES = "routes"
    PROBE = "probe"
    LISTEN = "listen"
    UNLISTEN = "unlisten"
    CONNECT = "connect"
    ANSWERS = "answers"
    MANIFEST = "manifest"
    RECEIVE = "receive"
    COPY = "copy"
    CAST = "cast"
    CONTENTS = "contents"
    FETCH = "fetch"
    CHECKPOINTS = "checkpoints"
    CODE = "code"
    ENVIRONMENT = "environment"
    QUEUE = "queue"
    RESERVE = "reserve"
    PREPARE = "prepare"
    START = "start"
    STOP = "stop"
    FINISH = "finish"
    FOLLOW = "follow"
    CREDIT = "credit"
    REPLICATED = "replicated"
    READ = "read"
    STATUS = "status"
    RUNS = "runs"
    EVIDENCE = "evidence"
    PROFILE = "profile"
    CLEAN = "clean"
    EXEC = "exec"
    CANCEL = "cancel"
    SHELL_SCRIPT = "shell_script"
    BYE = "bye"


# The agent allocates stream numbers from FIRST_AGENT_STREAM on (files of FOLLOW). The controller allocates lower
# numbers.

FIRST_AGENT_STREAM = 1 << 31


def make_heartbeat(number: int) -> Message:
    """Return a heartbeat of the controller."""
    return {"beat": number}


def make_heartbeat_answer(number: int, wall: float, mono: float, boot: str) -> Message:
    """Return the agent's answer to a heartbeat: the node's wall and monotonic clocks (seconds) and its boot id."""
    return {"beat": number, "wall": wall, "mono": mono, "boot": boot}


COMMANDS_WITHOUT_ANSWER = frozenset({Command.CREDIT, Command.REPLICATED, Command.CANCEL})


class ErrorKind(str, Enum):
    """The reason why a node did not execute a request."""

    BAD_REQUEST = "bad_request"
    STALE_EPOCH = "stale_epoch"
    NOT_FOUND = "not_found"
    REFUSED = "refused"
    FAILED = "failed"


def make_request(identity: int, command: Command, arguments: Mapping[str, object], epoch: int | None) -> Message:
    """Return a request. `epoch` is `None` only if the run has no epoch yet."""
    return {"id": identity, "cmd": command.value, "args": arguments, "epoch": epoch}


def make_answer(identity: int, result: Mapping[str, object]) -> Message:
    """Return the answer to a request."""
    return {"id": identity, "result": result}


class RequestError(Exception):
    """The node does not execute the request, or the request failed.

    Attributes:
        kind: The kind of the error.
        hint: A remedy for the user, or `None`.
    """

    def __init__(self, kind: ErrorKind, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint

    def make_answer(self, identity: int) -> Message:
        """Return the message that answers the request with this error."""
        return {"id": identity, "error": {"kind": self.kind.value, "message": str(self), "hint": self.hint}}


def make_refused_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error for a valid request that the node must not execute now."""
    return RequestError(ErrorKind.REFUSED, message, hint)


def make_failed_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error for a request that the node has executed without success."""
    return RequestError(ErrorKind.FAILED, message, hint)


def convert_to_request_error(error: Exception) -> RequestError:
    """Return the request error for any exception. All processes of the agent use the same text for an exception."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, FrameTooLargeError):
        return make_failed_error(f"the answer cannot be sent: {error}", "request less data at once")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return make_failed_error(f"{where}{error.strerror or error}")
    # Each handler parses its own arguments, so these errors are usually caused by the request and not by the agent.
    if isinstance(error, (KeyError, TypeError, ValueError)):
        lacking = "missing " if isinstance(error, KeyError) else ""
        return RequestError(ErrorKind.BAD_REQUEST, f"{lacking}{error}")
    return make_failed_error(f"the agent failed: {error!r}")


EXPECTED_ERRORS = (RequestError, OSError, KeyError, TypeError, ValueError)
"""The exceptions whose traceback the agent does not print."""


NETWORK_INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""The variables that choose the network interface of a rank, one per library."""

CACHE_VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH")
"""The variables that choose where libraries keep compiled code."""

ENVIRONMENTS_FOLDER = ".local/share/clusterctl/environments"
"""The folder of environments on a node, below the home."""

DOWNLOAD_VARIABLES = ("HF_HOME", "HF_HUB_CACHE")
"""The variables that choose where libraries of Hugging Face keep downloads."""

LOGIN_VARIABLES = (
    *CACHE_VARIABLES,
    *DOWNLOAD_VARIABLES,
    *NETWORK_INTERFACE_VARIABLES,
    *("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_FR_BUFFER_SIZE"),
    *("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
    *("KERAS_BACKEND", "TF_CONFIG", "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT"),
    *("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    *("KERAS_DISTRIBUTION_JOB_ADDRESSES", "KERAS_DISTRIBUTION_NUM_PROCESSES", "KERAS_DISTRIBUTION_PROCESS_ID"),
)

MAX_LOGIN_VALUE_CHARS = 1024
"""The maximum length of the value of a login variable in `HelloAnswer`. A cut value still differs from the value that
clusterctl would set.
"""
