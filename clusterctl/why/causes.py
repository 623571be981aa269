"""What killed a rank, by its last words: the class of the cause, and what to type next."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.why.places import is_own, short
from clusterctl.why.verdict import Class

if TYPE_CHECKING:
    from clusterctl.why.case import End

_RAISED = r"(?:^|\]: ?|\bCaught )(?:\w+\.)*"
"""What stands before the name of an exception that was raised, and not before one that is only spoken of."""
# The order decides: a text that says why goes before the name of the exception that carried it.
_WORDS = (
    (Class.MISMATCH, r"Received data size doesn't match expected size|Detected mismatch between collectives on ranks"),
    (Class.NOT_STARTED, r"^the prologue failed with status \d+"),
    (Class.OUT_OF_MEMORY, r"CUDA out of memory|CUBLAS_STATUS_ALLOC_FAILED|std::bad_alloc"),
    (Class.OUT_OF_MEMORY, rf"{_RAISED}(?:OutOfMemory|Memory|_ArrayMemory)Error\b"),
    (Class.OUT_OF_MEMORY, r"Cannot allocate memory|DefaultCPUAllocator: can't allocate|RESOURCE_EXHAUSTED"),
    (Class.DISK_FULL, r"No space left on device|Disk quota exceeded|\[Errno (?:28|122)\]"),
    (
        Class.GPU,
        r"uncorrectable ECC|CUDA error: (?:an illegal|unspecified|misaligned|device)|Xid |GPU is lost|cudaErrorECC",
    ),
    (Class.PORT_TAKEN, r"Address already in use|EADDRINUSE|\[Errno 98\]"),
    (
        Class.MISSING_MODULE,
        rf"{_RAISED}(?:ModuleNotFound|Import)Error\b|No module named|cannot open shared object file",
    ),
    (Class.NO_PERMISSION, rf"{_RAISED}PermissionError\b|Permission denied|\[Errno 13\]|Read-only file system"),
    (Class.MISSING_FILE, rf"{_RAISED}FileNotFoundError\b|No such file or directory|can't open file"),
    (
        Class.WRONG_ARGUMENT,
        r"^usage: .*|error: (?:unrecognized arguments|the following arguments are required|argument )",
    ),
    (Class.PEER_LOST, r"DistNetworkError|DistStoreError|ncclRemoteError|ncclSystemError|NCCL error"),
)
_CHAINED = "The above exception was the direct cause of the following exception:"
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
    found = _by_words(_last_words(end)) or _by_words(_first_of_chain(end))
    if end.signal is not None and found not in (Class.OUT_OF_MEMORY, Class.GPU, Class.MISMATCH):
        return Class.SIGNAL
    if found is None and end.secondary:
        return Class.PEER_LOST
    if found is None and (end.exit_code is None or not (end.message or end.traceback)):
        return Class.UNKNOWN
    return found or Class.EXCEPTION


def told(end: End) -> bool:
    """Return whether a rank itself says why it ended; lines of its output before that may speak of anything."""
    return bool(end.oom or end.signal or end.traceback or end.message)


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


def _by_words(text: str) -> Class | None:
    return next((cls for cls, pattern in _WORDS if re.search(pattern, text, re.MULTILINE)), None)


def _first_of_chain(end: End) -> str:
    """Return what the exception said of which the last one was made (`raise ... from`); "" where there is none."""
    first, chained, _ = (end.traceback or "").partition(_CHAINED)
    return next(reversed(first.strip().splitlines()), "").strip() if chained else ""


def _last_words(end: End) -> str:
    """Return what decides: the message, and the last lines where there is no traceback."""
    lines = [line for line in end.tail.splitlines() if line.strip()]
    return end.message if end.traceback else "\n".join([end.message, *lines[-8:]])
