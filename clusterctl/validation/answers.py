"""Types and bounds of the answers to commands, and of the messages that a node sends on its own."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import commands
from clusterctl.agent.protocol.commands import FIRST_AGENT_STREAM, Command
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.run_files import SAMPLES_FILE
from clusterctl.agent.protocol.validators import (
    ValidationError,
    any_json,
    boolean,
    digits,
    integer,
    list_of,
    mapping_of,
    number,
    object_of,
    optional,
    string,
    tuple_of,
)
from clusterctl.agent.protocol.worker_status import COUNT, PID, validate_status_sample
from clusterctl.validation.journal import ATTEMPT, BYTES, EPOCH, RANK, REMAINING, SEQ

if TYPE_CHECKING:
    from clusterctl.agent.protocol.process_types import RankEvidence
    from clusterctl.agent.protocol.validators import Validator

MAX_DEVICES = 1024
"""GPUs of a node: as many as a cluster file may name."""
MAX_MESSAGE_BYTES = 1 << 20
"""Maximum of each message, except for the answers to `LARGE_ANSWER_COMMANDS`."""
LARGE_ANSWER_COMMANDS = frozenset(
    {
        Command.EVIDENCE,
        Command.PROBE,
        Command.READ,
        Command.FETCH,
        Command.MANIFEST,
        Command.COPY,
        Command.CHECKPOINTS,
        Command.CODE,
        Command.RUNS,
    }
)
"""Commands whose answer may fill a frame."""
_WORD, _NAME, _PATH, _WORDS = string(200), string(1024), string(8192), string(16384)
_PORT = integer(0, 65535)
_DIGEST = string(128)
_VERSION = tuple_of(number(), BYTES)

_HELLO = object_of(
    {},
    {
        "protocol": integer(0, 1 << 20),
        **dict.fromkeys(("version", "python_version", "boot_id", "pid_ns", "net_ns", "machine", "kernel"), _WORD),
        **dict.fromkeys(("hostname", "user"), _NAME),
        **dict.fromkeys(("python", "home", "shell", "state_root"), optional(_PATH)),
        "uid": integer(0, 1 << 32),
        **dict.fromkeys(("mono", "wall"), number()),
        "cores": integer(1, 1 << 20),
        "memory": BYTES,
        "gpus": optional(
            object_of(
                {},
                {
                    "count": optional(integer(0, MAX_DEVICES)),
                    "indices": list_of(integer(0, MAX_DEVICES - 1), MAX_DEVICES),
                    "vendor": optional(_WORD),
                },
            )
        ),
        "addresses": list_of(
            object_of({"interface": string(64), "address": string(128)}, {"up": boolean, "loopback": boolean}), 4096
        ),
        "reached_at": optional(string(128)),
        "rdma": boolean,
        "logind": optional(object_of({}, {"linger": boolean, "kill_user_processes": boolean})),
        "home_is_network": boolean,
        "login": mapping_of(string(64), string(commands.MAX_LOGIN_VALUE_CHARS), len(commands.LOGIN_VARIABLES)),
    },
)
_WORKER = object_of(
    {"rank": RANK, "pid": PID, "start_time": COUNT, "alive": boolean},
    {"local_rank": RANK},
)
_STATUS = object_of(
    {
        "supervisor": boolean,
        "epoch": optional(EPOCH),
        "attempt": ATTEMPT,
        "state": _WORD,
        "workers": list_of(_WORKER, 4096),
        "remaining": REMAINING,
    },
    {"seq": SEQ},
)
_RUN = object_of(
    {"run": _NAME, "live": boolean},
    {
        "node": _NAME,
        "name": _NAME,
        "supervisor": boolean,
        "state": _WORD,
        "epoch": optional(EPOCH),
        "attempt": ATTEMPT,
        "workdir": optional(_PATH),
        "grace": optional(number(0.0)),
        "gpus": optional(list_of(integer(0, MAX_DEVICES - 1), MAX_DEVICES)),
        **dict.fromkeys(("started", "finished"), optional(number())),
        "remaining": REMAINING,
    },
)
_PROCESS = {
    "pid": optional(PID),
    "state": optional(string(8)),
    "wchan": optional(_NAME),
    "name": optional(_NAME),
    "cpu": optional(number()),
    "command": optional(string(1 << 20)),
}
_COLLECTIVE = object_of(
    {**dict.fromkeys(("group", "op", "sizes", "dtypes"), _NAME), "number": COUNT, "done": boolean, "p2p": boolean}
)
_SOCKET = object_of(
    {
        **dict.fromkeys(("address", "peer"), string(64)),
        **dict.fromkeys(("port", "peer_port"), _PORT),
        "state": string(32),
        **dict.fromkeys(("unacked", "unread", "lost"), COUNT),
        "awaited": boolean,
    }
)
_EVIDENCE = object_of(
    {
        "rank": RANK,
        "pid": optional(PID),
        "state": optional(string(8)),
        "wchan": optional(_NAME),
        "source": _NAME,
        "why": list_of(_WORDS, 256),
        "stacks": string(16 << 20),
        "main_thread": optional(COUNT),
        "inside": optional(validate_status_sample),
        "children": list_of(
            object_of({"pid": PID, "state": optional(string(8)), "wchan": optional(_NAME)}, _PROCESS), 4096
        ),
        "tail": list_of(string(1 << 20), 4096),
    },
    {
        **_PROCESS,
        "threads": COUNT,
        "error": _WORDS,
        "recorded": optional(list_of(_COLLECTIVE, 128)),
        "sockets": list_of(_SOCKET, 128),
    },
)
_PROBE_GROUP = object_of(
    {"status": _WORD},
    {"reason": optional(string(65536)), "data": optional(any_json(12, 100_000, 1 << 20)), "ms": optional(number())},
)
_ROUTE = object_of({"source": optional(string(128)), "interface": optional(string(64))})
_CHECKPOINT = object_of({"path": _PATH, "mtime": number()}, {"size": BYTES})
_CHECKPOINT_FILE = object_of({"name": _PATH, "mtime": number(), "size": BYTES, "sha256": _DIGEST})
_EMPTY = object_of({})

ANSWER_SHAPES: dict[Command, Validator] = {
    Command.HELLO: _HELLO,
    Command.ROUTES: object_of({"routes": mapping_of(string(256), optional(_ROUTE), 65536)}),
    Command.PROBE: object_of(
        {"groups": mapping_of(_WORD, _PROBE_GROUP, 256)},
        {"time": number(), "stuck": list_of(any_json(2, 16, 4096), 256)},
    ),
    Command.LISTEN: object_of({"port": _PORT}),
    Command.UNLISTEN: _EMPTY,
    Command.CONNECT: object_of(
        {"ok": optional(boolean)},
        {
            "ms": optional(number()),
            "error": optional(_WORDS),
            "source": optional(string(128)),
            **dict.fromkeys(("payload", "sent", "received"), optional(BYTES)),
            "still": optional(number()),
        },
    ),
    Command.MANIFEST: object_of(
        {"need": list_of(integer(0, 1 << 32), 1 << 22)},
        {"going": integer(), "gone": list_of(_PATH, 100), "user": optional(_NAME)},
    ),
    Command.COPY: object_of({"need": list_of(integer(0, 1 << 32), 1 << 22), "folder": _PATH, "name": optional(_PATH)}),
    Command.RECEIVE: object_of({}, {"written": integer(), "hash": optional(_DIGEST)}),
    Command.FETCH: object_of({"files": list_of(tuple_of(_PATH, BYTES, integer(0, 1 << 16)), 1 << 20)}),
    Command.CHECKPOINTS: object_of(
        {"found": list_of(_CHECKPOINT, 5000)},
        {"versions": list_of(_VERSION, 1 << 20), "network": boolean, "files": list_of(_CHECKPOINT_FILE, 1 << 17)},
    ),
    Command.CODE: object_of({}, {"hash": optional(_DIGEST), "files": mapping_of(_PATH, _DIGEST, 1 << 18)}),
    Command.PREPARE: object_of({"ports": list_of(_PORT, 1024)}, {"run_dir": _PATH, "python": optional(_PATH)}),
    Command.START: _EMPTY,
    Command.STOP: _EMPTY,
    Command.FINISH: _EMPTY,
    Command.FOLLOW: _EMPTY,
    Command.READ: object_of(
        {"offset": BYTES, "size": BYTES, "data": string(16 << 20)}, {"first_valid": optional(BYTES)}
    ),
    Command.STATUS: _STATUS,
    Command.RUNS: object_of({"runs": list_of(_RUN, 100_000)}),
    Command.EVIDENCE: object_of({"ranks": mapping_of(digits(), _EVIDENCE, 4096)}),
    Command.CLEAN: object_of({"bytes": BYTES}),
    Command.EXEC: object_of(
        {"exit_code": optional(integer(0, 255)), "signal": optional(integer(0, 127))}, {"timed_out": boolean}
    ),
    Command.SHELL_SCRIPT: object_of({"path": string(4096)}),
    Command.BYE: _EMPTY,
}
_ERROR = object_of({"kind": _WORD, "message": string(1 << 20)}, {"hint": optional(string(1 << 20))})
_MAX_MESSAGE_CHARS = 8192

HEARTBEAT_ANSWER = object_of({"beat": integer(), "wall": number(), "mono": number(), "boot": _WORD})
EVENT_PUSH = object_of({"run": _NAME, "event": object_of({})})
STREAM_PUSH = object_of(
    {"run": _NAME, "file": string(64), "stream": integer(FIRST_AGENT_STREAM, (FIRST_AGENT_STREAM << 1) - 1)}
)
ATTEMPTS_REPLICATED_PUSH = object_of({"run": _NAME, "before": integer(0, 1 << 31)})
PREAMBLE = object_of({"python": _PATH, "version": string(64)})
_STREAM_FILE = re.compile(r"attempt-(0|[1-9][0-9]{0,6})/rank-(0|[1-9][0-9]{0,6})\.(?:log|idx)")


def validate_answer(command: Command, value: Any) -> dict[str, Any]:
    """Return the result of a command, if it fits.

    Raises:
        FrameError: The result does not fit.
    """
    try:
        ANSWER_SHAPES[command](value)
    except ValidationError as error:
        raise FrameError(f"its answer to `{command.value}`: {error}") from None
    answer: dict[str, Any] = value
    return answer


def validate_rank_evidence(value: Any) -> RankEvidence:
    """Return stored evidence of a rank, if it fits.

    Raises:
        FrameError: The evidence does not fit.
    """
    try:
        _EVIDENCE(value)
    except ValidationError as error:
        raise FrameError(f"evidence of a rank: {error}") from None
    evidence: RankEvidence = value
    return evidence


def validate_error_answer(command: Command, value: Any) -> dict[str, Any]:
    """Return the error with which a node refused a command; the texts are cut to a readable length.

    Raises:
        FrameError: The value is not such an error.
    """
    try:
        _ERROR(value)
    except ValidationError as error:
        raise FrameError(f"its refusal of `{command.value}`: {error}") from None
    hint = value.get("hint")
    return {**value, "message": value["message"][:_MAX_MESSAGE_CHARS], "hint": hint and hint[:_MAX_MESSAGE_CHARS]}


@functools.lru_cache(maxsize=4096)
def parse_stream_file(file: str) -> tuple[int, int] | None:
    """Return attempt and rank from the file name of a stream; `None` for the file of samples.

    Raises:
        FrameError: A run has no file of this name.
    """
    if file == SAMPLES_FILE:
        return None
    match = _STREAM_FILE.fullmatch(file)
    if match is None:
        raise FrameError(f"it names a file that no run has: {file[:80]!a}")
    return int(match[1]), int(match[2])
