"""What killed a rank, by its last words: the class of the cause, and what to type next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.why.places import is_own, short
from clusterctl.why.verdict import Class

if TYPE_CHECKING:
    from clusterctl.why.case import End

_MOST_SAID = 160
_FRAME = re.compile(
    r'^\s*(?:\[?rank\d+\]?:?\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M
)


def class_of(end: End) -> Class:
    """Return the class of what ended a rank by itself."""
    if end.oom:
        return Class.OUT_OF_MEMORY
    if end.well:
        return Class.EXITED_EARLY
    if end.secondary and end.cls in (None, Class.UNKNOWN):
        return Class.PEER_LOST
    return end.cls or Class.UNKNOWN


def is_certain(end: End) -> bool:
    """Return whether it is known why a rank ended; lines of its output before that may speak of anything."""
    return bool(end.oom or end.signal or end.is_recognised)


def where(end: End) -> tuple[str | None, str | None]:
    """Return the innermost line of the user's code in the traceback of a rank, and the function there."""
    frames = list(_FRAME.finditer(end.traceback or ""))
    own = [frame for frame in frames if is_own(frame["file"])] or frames
    if not own:
        return None, None
    return f"{short(own[-1]['file'])}:{own[-1]['line']}", own[-1]["function"]


def said(end: End) -> str:
    """Return in words how a rank ended."""
    if end.oom:
        return end.message
    if end.signal is not None:
        return f"ended by {end.signal}" + (f": {end.message}" if end.message and end.signal not in end.message else "")
    if end.exit_code is None:
        return "it ended, and nobody saw how"
    if end.well:
        return "it ended with 0 while others went on"
    if end.failed_inside:
        return f"{cut(end.message)}, although its command ended with 0"
    return cut(end.message) or f"exit {end.exit_code} without a word"


def cut(text: str) -> str:
    """Return what a rank said, no longer than a line of a verdict has room for."""
    return text if len(text) <= _MOST_SAID else text[: _MOST_SAID - 1] + "…"


def advice(cls: Class, run: str, rank: int | None, node: str | None) -> tuple[str, ...]:
    """Return what to type next."""
    logs = f"clusterctl logs {run} --rank {rank}" if rank is not None else f"clusterctl logs {run}"
    at = f" --node {node}" if node is not None else ""
    match cls:
        case Class.OUT_OF_MEMORY:
            return (logs, f"clusterctl exec{at} -- free -h")
        case Class.DISK_FULL:
            return (f"clusterctl exec{at} -- df -h", "clusterctl clean")
        case Class.NO_INPUT:
            return ("answer it beforehand, by an option in `job.args` or a variable in `env`", logs)
        case Class.SHARED_MEMORY:
            return (f"clusterctl exec{at} -- df -h /dev/shm", logs)
        case Class.COMMAND_NOT_FOUND:
            return (f"clusterctl exec{at} --in-job --shell 'echo $PATH'", logs)
        case Class.KILLED:
            return (f"clusterctl exec{at} --shell 'dmesg | tail'", logs)
        case Class.MISSING_MODULE:
            return (f"clusterctl health{at} version.python", logs)
        case Class.MISSING_FILE | Class.NO_PERMISSION:
            return (logs, f"clusterctl exec{at} -- ls -la")
        case Class.GPU | Class.UNHEALTHY | Class.NODE_LOST:
            return (f"clusterctl health{at}",)
        case Class.PORT_TAKEN:
            return (f"clusterctl exec{at} -- ss -ltnp",)
        case _:
            return (logs,)
