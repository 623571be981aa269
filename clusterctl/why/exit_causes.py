"""What killed a rank, by its last words: the class of the cause, and what to type next.

How the ends of ranks are said.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.config.worker_variables import OWNED_NAMES, find_launcher, find_substitute
from clusterctl.formatting import fold_ranks
from clusterctl.why import headline_patterns
from clusterctl.why.headline import find_last_words
from clusterctl.why.stack_position import is_user_code, short_path
from clusterctl.why.verdict import Class, Culprit, Waiting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.why.evidence import Rank, RankExit


_MAX_TEXT = 160
_OUT_OF_MEMORY = "a kernel that lacked memory has `oom-kill` or `Out of memory: Killed process` in its log of that time"
_GPU_MEMORY = re.compile(r"\b(?:CUDA|HIP|ROCm|CUBLAS\w*)\b|\bGPU \d", re.I)
_MISSING_VARIABLE = re.compile(
    r"KeyError: ['\"](\w+)['\"]|[Ee]nvironment variable ['\"`]?(\w+)['\"`]? (?:expected|not found|is not set)"
    r"|\b(\w+): unbound variable"
)
_BUS_ERROR = "/dev/shm was full, or a file that was mapped into memory was cut short or is gone"
_TRACEBACK_FRAME = re.compile(
    r'^(?:> )?\s*(?:\[?rank\d+\]?:?\s*)?File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)$', re.M
)


def classify_exit(end: RankExit) -> Class:
    """Return the class of what ended a rank by itself."""
    if end.oom:
        return Class.OUT_OF_MEMORY
    if end.well:
        return Class.EXITED_EARLY
    if end.secondary and end.cls in (None, Class.UNKNOWN):
        return Class.PEER_LOST
    return end.cls or Class.UNKNOWN


def is_certain_cause(end: RankExit) -> bool:
    """Return whether it is known why a rank ended; lines of its output before that may speak of anything."""
    return bool(end.oom or (end.signal and end.signal != "SIGBUS") or end.is_recognised)


def innermost_user_line(traceback: str | None) -> tuple[str | None, str | None]:
    """Return the innermost line of the user's code in a traceback, and the function there."""
    frames = list(_TRACEBACK_FRAME.finditer(traceback or ""))
    own = [frame for frame in frames if is_user_code(frame["file"])] or frames
    if not own:
        return None, None
    return f"{short_path(own[-1]['file'])}:{own[-1]['line']}", own[-1]["function"]


def describe_exit(end: RankExit) -> str:
    """Return in words how a rank ended."""
    if end.oom:
        return end.message
    if end.signal is not None:
        return f"ended by {end.signal}" + (f": {end.message}" if end.message and end.signal not in end.message else "")
    if end.exit_code is None:
        return "it ended, and nobody saw how"
    if end.well:
        last = find_last_words(end.tail)
        words = f"; its last words: {shorten(last)}" if last else ""
        if end.message:
            words = f", and its last output is a traceback: {shorten(end.message)}"
        return f"it ended with 0 while others went on{words}"
    if end.failed_inside:
        return f"{shorten(end.message)}, although its command ended with 0"
    return shorten(end.message) or f"exit {end.exit_code} without a word"


def find_advice(end: RankExit) -> str:
    """Return what the words of an end do not say, and a person should know; empty where there is nothing."""
    if classify_exit(end) is Class.SHARED_MEMORY and not headline_patterns.SHARED_MEMORY.search(end.message):
        return _BUS_ERROR
    found = _MISSING_VARIABLE.search(end.message)
    name = next(filter(None, found.groups()), "") if found is not None else ""
    launcher = find_launcher(name)
    if name in OWNED_NAMES:
        return (
            f"clusterctl sets `{name}` for every worker: `job.command`, `job.prologue`, `sudo` or a container "
            "has replaced or removed it"
        )
    if launcher is None:
        return ""
    own = find_substitute(name)
    remedy = f"read `{own}` instead" if own is not None else "set it in `env`"
    return f"`{name}` is a variable of {launcher.name}, and nobody sets it here: {remedy}"


def shorten(text: str) -> str:
    """Return what a rank said, no longer than a line of a verdict has room for."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def next_command(cls: Class, run: str, rank: int | None, node: str | None, message: str = "") -> tuple[str, ...]:
    """Return what to type next; `message` is what the rank said."""
    logs = f"clusterctl logs {run} --rank {rank}" if rank is not None else f"clusterctl logs {run}"
    at = f" --node {node}" if node is not None else ""
    match cls:
        case Class.OUT_OF_MEMORY if _GPU_MEMORY.search(message):
            return (f"clusterctl exec{at} -- {_gpu_tool(message)}", _MORE_GPU_MEMORY, logs)
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
            return (
                f"clusterctl exec{at} --shell 'dmesg -T | grep -iE \"oom|out of memory\" | tail'",
                _OUT_OF_MEMORY,
                logs,
            )
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


_MORE_GPU_MEMORY = (
    "if nobody else uses the GPU: a smaller batch, or `env: {PYTORCH_CUDA_ALLOC_CONF: expandable_segments:True}` "
    "where much is reserved and not allocated"
)


def _gpu_tool(message: str) -> str:
    return "rocm-smi" if re.search(r"\bHIP\b|ROCm", message) else "nvidia-smi"


MAX_NAMED_RANKS = 8
_DIGITS = re.compile(r"0x[0-9a-f]+|\d+")


def describe_ranks(ranks: Sequence[Rank]) -> str:
    """Return ranks for a sentence, with the node where it is one."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    on = f" on {nodes[0]}" if len(nodes) == 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks([rank.rank for rank in ranks])}{on}"


def make_culprits(named: Sequence[tuple[Rank, RankExit]]) -> tuple[Culprit, ...]:
    """Return ranks as those that began it, each with its line and its words."""
    found = []
    for rank, end in sorted(named, key=lambda each: each[0].rank)[:MAX_NAMED_RANKS]:
        line, function = innermost_user_line(end.traceback)
        found.append(Culprit(rank=rank.rank, node=rank.node, where=line, op=function, evidence=describe_exit(end)))
    return tuple(found)


def list_peer_victims(ranks: Sequence[Rank]) -> tuple[Waiting, ...]:
    """Return ranks as those that ended because of others."""
    if not ranks:
        return ()
    return (Waiting(ranks=fold_ranks([rank.rank for rank in ranks]), where=None, op="lost a peer"),)


def normalize_message(message: str) -> str:
    """Return a message without what differs between ranks that fail alike: numbers and addresses."""
    return _DIGITS.sub("#", message)
