"""What a node may answer to each command, and what it may say unasked."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol import logins
from clusterctl.agent.protocol.commands import AGENT_STREAMS, WINDOW_BYTES, Command
from clusterctl.agent.protocol.files import SAMPLES_FILE
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.shapes import (
    MisfitError,
    flag,
    loose,
    many,
    maybe,
    number_text,
    real,
    record,
    row,
    table,
    text,
    whole,
)
from clusterctl.agent.protocol.worker_status import COUNT, INSIDE, PID
from clusterctl.door.journal import ATTEMPT, BYTES, EPOCH, RANK, REMAINING, SEQ

if TYPE_CHECKING:
    from clusterctl.agent.protocol.process_types import RankEvidence
    from clusterctl.agent.protocol.shapes import Shape

MOST_DEVICES = 1024
"""GPUs of a node, as many as a cluster file may name."""
MOST_MESSAGE = 1 << 20
"""Bytes of a message that is no answer to one of `LARGE`."""
LARGE = frozenset(
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
_WORD, _NAME, _PATH, _WORDS = text(200), text(1024), text(8192), text(16384)
_PORT = whole(0, 65535)
_DIGEST = text(128)
_VERSION = row(real(), BYTES)

_HELLO = record(
    {},
    {
        "protocol": whole(0, 1 << 20),
        **dict.fromkeys(("version", "python_version", "boot_id", "pid_ns", "net_ns", "machine", "kernel"), _WORD),
        **dict.fromkeys(("hostname", "user"), _NAME),
        **dict.fromkeys(("python", "home", "shell", "state_root"), maybe(_PATH)),
        "uid": whole(0, 1 << 32),
        **dict.fromkeys(("mono", "wall"), real()),
        "cores": whole(1, 1 << 20),
        "memory": BYTES,
        "gpus": maybe(
            record(
                {},
                {
                    "count": maybe(whole(0, MOST_DEVICES)),
                    "indices": many(whole(0, MOST_DEVICES - 1), MOST_DEVICES),
                    "vendor": maybe(_WORD),
                },
            )
        ),
        "addresses": many(record({"interface": text(64), "address": text(128)}, {"up": flag, "loopback": flag}), 4096),
        "reached_at": maybe(text(128)),
        "rdma": flag,
        "logind": maybe(record({}, {"linger": flag, "kill_user_processes": flag})),
        "home_is_network": flag,
        "login": table(text(64), text(logins.MOST_CHARACTERS), len(logins.VARIABLES)),
    },
)
_WORKER = record(
    {"rank": RANK, "pid": PID, "start_time": COUNT, "alive": flag},
    {"local_rank": RANK},
)
_STATUS = record(
    {
        "supervisor": flag,
        "epoch": maybe(EPOCH),
        "attempt": ATTEMPT,
        "state": _WORD,
        "workers": many(_WORKER, 4096),
        "remaining": REMAINING,
    },
    {"seq": SEQ},
)
_RUN = record(
    {"run": _NAME, "live": flag},
    {
        "node": _NAME,
        "name": _NAME,
        "supervisor": flag,
        "state": _WORD,
        "epoch": maybe(EPOCH),
        "attempt": ATTEMPT,
        "workdir": maybe(_PATH),
        "grace": maybe(real(0.0)),
        "gpus": maybe(many(whole(0, MOST_DEVICES - 1), MOST_DEVICES)),
        **dict.fromkeys(("started", "finished"), maybe(real())),
        "remaining": REMAINING,
    },
)
_PROCESS = {
    "pid": maybe(PID),
    "state": maybe(text(8)),
    "wchan": maybe(_NAME),
    "name": maybe(_NAME),
    "cpu": maybe(real()),
    "command": maybe(text(1 << 20)),
}
_RECORDED = record(
    {**dict.fromkeys(("group", "op", "sizes", "dtypes"), _NAME), "number": COUNT, "done": flag, "p2p": flag}
)
_SOCKET = record(
    {
        **dict.fromkeys(("address", "peer"), text(64)),
        **dict.fromkeys(("port", "peer_port"), _PORT),
        "state": text(32),
        **dict.fromkeys(("unacked", "unread", "lost"), COUNT),
        "awaited": flag,
    }
)
_EVIDENCE = record(
    {
        "rank": RANK,
        "pid": maybe(PID),
        "state": maybe(text(8)),
        "wchan": maybe(_NAME),
        "source": _NAME,
        "why": many(_WORDS, 256),
        "stacks": text(16 << 20),
        "main_thread": maybe(COUNT),
        "inside": maybe(INSIDE),
        "children": many(record({"pid": PID, "state": maybe(text(8)), "wchan": maybe(_NAME)}, _PROCESS), 4096),
        "tail": many(text(1 << 20), 4096),
    },
    {
        **_PROCESS,
        "threads": COUNT,
        "error": _WORDS,
        "recorded": maybe(many(_RECORDED, 128)),
        "sockets": many(_SOCKET, 128),
    },
)
_GROUP = record(
    {"status": _WORD},
    {"reason": maybe(text(65536)), "data": maybe(loose(12, 100_000, 1 << 20)), "ms": maybe(real())},
)
_ROUTE = record({"source": maybe(text(128)), "interface": maybe(text(64))})
_CHECKPOINT = record({"path": _PATH, "mtime": real()}, {"size": BYTES})
_CHECKPOINT_FILE = record({"name": _PATH, "mtime": real(), "size": BYTES, "sha256": _DIGEST})
_NOTHING = record({})

RESULTS: dict[Command, Shape] = {
    Command.HELLO: _HELLO,
    Command.ROUTES: record({"routes": table(text(256), maybe(_ROUTE), 65536)}),
    Command.PROBE: record(
        {"groups": table(_WORD, _GROUP, 256)}, {"time": real(), "stuck": many(loose(2, 16, 4096), 256)}
    ),
    Command.LISTEN: record({"port": _PORT}),
    Command.UNLISTEN: _NOTHING,
    Command.CONNECT: record(
        {"ok": maybe(flag)},
        {
            "ms": maybe(real()),
            "error": maybe(_WORDS),
            "source": maybe(text(128)),
            **dict.fromkeys(("payload", "sent", "received"), maybe(BYTES)),
            "still": maybe(real()),
        },
    ),
    Command.MANIFEST: record(
        {"need": many(whole(0, 1 << 32), 1 << 22)},
        {"going": whole(), "gone": many(_PATH, 100), "user": maybe(_NAME)},
    ),
    Command.COPY: record({"need": many(whole(0, 1 << 32), 1 << 22), "folder": _PATH, "name": maybe(_PATH)}),
    Command.RECEIVE: record({}, {"written": whole(), "hash": maybe(_DIGEST)}),
    Command.FETCH: record({"files": many(row(_PATH, BYTES, whole(0, 1 << 16)), 1 << 20)}),
    Command.CHECKPOINTS: record(
        {"found": many(_CHECKPOINT, 5000)},
        {"versions": many(_VERSION, 1 << 20), "network": flag, "files": many(_CHECKPOINT_FILE, 1 << 17)},
    ),
    Command.CODE: record({}, {"hash": maybe(_DIGEST), "files": table(_PATH, _DIGEST, 1 << 18)}),
    Command.PREPARE: record({"ports": many(_PORT, 1024)}, {"run_dir": _PATH, "python": maybe(_PATH)}),
    Command.START: _NOTHING,
    Command.STOP: _NOTHING,
    Command.FINISH: _NOTHING,
    Command.FOLLOW: _NOTHING,
    Command.READ: record({"offset": BYTES, "size": BYTES, "data": text(16 << 20)}, {"first_valid": maybe(BYTES)}),
    Command.STATUS: _STATUS,
    Command.RUNS: record({"runs": many(_RUN, 100_000)}),
    Command.EVIDENCE: record({"ranks": table(number_text(), _EVIDENCE, 4096)}),
    Command.CLEAN: record({"bytes": BYTES}),
    Command.EXEC: record({"exit_code": maybe(whole(0, 255)), "signal": maybe(whole(0, 127))}, {"timed_out": flag}),
    Command.TERMINAL: record({"exit_code": maybe(whole(0, 255)), "signal": maybe(whole(0, 127))}),
    Command.TUNNEL: _NOTHING,
    Command.BYE: _NOTHING,
}
_ERROR = record({"kind": _WORD, "message": text(1 << 20)}, {"hint": maybe(text(1 << 20))})
_MOST_WORDS = 8192

BEAT_ANSWER = record({"beat": whole(), "wall": real(), "mono": real(), "boot": _WORD})
EVENT_PUSH = record({"run": _NAME, "event": record({})})
STREAM_PUSH = record({"run": _NAME, "file": text(64), "stream": whole(AGENT_STREAMS, (AGENT_STREAMS << 1) - 1)})
WHOLE_PUSH = record({"run": _NAME, "before": whole(0, 1 << 31)})
TAKEN_PUSH = record({"stream": whole(1, AGENT_STREAMS - 1), "bytes": whole(1, WINDOW_BYTES)})
PREAMBLE = record({"python": _PATH, "version": text(64)})
_FILE = re.compile(r"attempt-(0|[1-9][0-9]{0,6})/rank-(0|[1-9][0-9]{0,6})\.(?:log|idx)")


def result(command: Command, value: Any) -> dict[str, Any]:
    """Return an answer that fits its command.

    Raises:
        FrameError: It does not.
    """
    try:
        RESULTS[command](value)
    except MisfitError as error:
        raise FrameError(f"its answer to `{command.value}`: {error}") from None
    answer: dict[str, Any] = value
    return answer


def evidence_of_rank(value: Any) -> RankEvidence:
    """Return evidence of a rank, as it was kept, that fits.

    Raises:
        FrameError: It does not.
    """
    try:
        _EVIDENCE(value)
    except MisfitError as error:
        raise FrameError(f"evidence of a rank: {error}") from None
    evidence: RankEvidence = value
    return evidence


def refusal(command: Command, value: Any) -> dict[str, Any]:
    """Return why a node did not do what it was asked, its words cut to what a person reads.

    Raises:
        FrameError: It is no refusal.
    """
    try:
        _ERROR(value)
    except MisfitError as error:
        raise FrameError(f"its refusal of `{command.value}`: {error}") from None
    hint = value.get("hint")
    return {**value, "message": value["message"][:_MOST_WORDS], "hint": hint and hint[:_MOST_WORDS]}


@functools.lru_cache(maxsize=4096)
def place_of(file: str) -> tuple[int, int] | None:
    """Return attempt and rank of the file of a stream; `None` for the samples.

    Raises:
        FrameError: A run has no such file.
    """
    if file == SAMPLES_FILE:
        return None
    match = _FILE.fullmatch(file)
    if match is None:
        raise FrameError(f"it names a file that no run has: {file[:80]!a}")
    return int(match[1]), int(match[2])
