"""Parses the stack dumps of ranks and groups ranks with equal stacks. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.stall_folders import FAULTHANDLER_SOURCES
from clusterctl.formatting import fold_ranks
from clusterctl.why.evidence_types import StackFrame

# The format of faulthandler: `File "x.py", line 3 in f`. Python 3.14 adds thread names in brackets.
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x(?P<id>[0-9a-fA-F]+)(?: \[.*\])? \(most recent call first\)"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_SHIM_PATH = "/_clusterctl_shim/"
# Even with the same stack, a rank in one of these process states is not grouped with running or sleeping ranks.
_SPECIAL_STATES = "TtDZX"


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """The stack of one thread, most recent call first.

    Attributes:
        ident: Identity of the thread. Dumps of faulthandler have the identity of pthread, dumps by py-spy the kernel's.
        is_main: Whether the thread is the main thread.
        holds_gil: Whether the thread holds the GIL; `None` if the dump does not show this.
    """

    ident: int
    is_main: bool
    frames: tuple[StackFrame, ...]
    holds_gil: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """The stacks of one rank. If only `/proc` could be read, `source` is `proc` and `threads` is `None`."""

    rank: int
    source: str
    state: str | None
    wchan: str | None
    threads: tuple[ThreadStack, ...] | None

    @property
    def main_thread_frames(self) -> tuple[StackFrame, ...] | None:
        """Frames of the main thread, most recent call first; `None` if unknown."""
        return next((thread.frames for thread in self.threads or () if thread.is_main), None)


def parse_faulthandler_dump(text: str, main_thread: int | None = None) -> tuple[ThreadStack, ...]:
    """Return the threads in the last dump of faulthandler, without the shim's thread and without calls of the shim.

    Args:
        text: The dump. Lines of another format are skipped.
        main_thread: Identity of the main thread, if the worker reported it. Otherwise the main thread is the thread
            that received the signal, or else the oldest thread, which faulthandler lists last.
    """
    blocks: list[tuple[int, bool, list[StackFrame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            ident = int(head["id"], 16)
            if any(current for _, current, _ in blocks) and any(other == ident for other, _, _ in blocks):
                blocks = []
            blocks.append((ident, head["current"].startswith("Current"), []))
        elif blocks and (frame := _parse_frame(line)) is not None:
            blocks[-1][2].append(frame)
    idents = [ident for ident, _, _ in blocks]
    main = main_thread
    if main not in idents:
        main = next((ident for ident, is_current, _ in blocks if is_current), idents[-1] if idents else None)
    return tuple(
        ThreadStack(
            ident=ident, is_main=ident == main, frames=tuple(frame for frame in frames if _SHIM_PATH not in frame.file)
        )
        for ident, _, frames in blocks
        # The thread of the shim begins in the shim. Other threads may be in a call that the shim has wrapped.
        if not frames or _SHIM_PATH not in frames[-1].file
    )


@lru_cache(maxsize=4096)
def _parse_frame(line: str) -> StackFrame | None:
    """Return the call in a line of a dump; cached, because thousands of ranks may have the same stack."""
    frame = _FRAME.match(line)
    if frame is None:
        return None
    return StackFrame(frame["function"], frame["file"], int(frame["line"]) if frame["line"].isdigit() else 0)


def parse_py_spy_dump(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads in the output of `py-spy dump --json`; empty if the output has another format."""
    threads: list[ThreadStack] = []
    try:
        for thread in json.loads(text):
            ident = thread.get("os_thread_id") or thread["thread_id"]
            frames = (StackFrame(one["name"], one["filename"], int(one["line"] or 0)) for one in thread["frames"])
            main = thread.get("thread_name") == "MainThread" or ident == thread["pid"]
            threads.append(ThreadStack(int(ident), main, tuple(frames), holds_gil=bool(thread["owns_gil"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(threads)


def parse_rank_stacks(ranks: Mapping[str, RankEvidence]) -> tuple[RankStack, ...]:
    """Return the stacks in the evidence of the ranks, in the order of the ranks.

    Args:
        ranks: The evidence of each rank, of one node or of all nodes.
    """
    stacks: list[RankStack] = []
    for rank in sorted(ranks, key=int):
        evidence = ranks[rank]
        source, text = str(evidence.get("source", "proc")), str(evidence.get("stacks", ""))
        threads: tuple[ThreadStack, ...] = ()
        if source in FAULTHANDLER_SOURCES:
            threads = parse_faulthandler_dump(text, evidence.get("main_thread"))
        elif source == "py-spy":
            threads = parse_py_spy_dump(text)
        shown, state, wchan = source if threads else "proc", evidence.get("state"), evidence.get("wchan")
        stacks.append(RankStack(rank=int(rank), source=shown, state=state, wchan=wchan, threads=threads or None))
    return tuple(stacks)


def fold_stacks(stacks: Iterable[RankStack]) -> list[dict[str, Any]]:
    """Group ranks with equal stacks of the main thread. The group of the lowest rank comes first.

    Returns:
        `[{ranks: "0-4,6", source, state, wchan, frames: [{function, file, line}] or null}]`, the most recent call
        first. If the ranks of a group differ in state or wait channel, all values are listed: `R,S`.
    """
    groups: dict[object, list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda each: each.rank):
        special = stack.state if stack.state and stack.state in _SPECIAL_STATES else None
        # Equal stacks of the two sources of faulthandler are one group.
        source = FAULTHANDLER_SOURCES if stack.source in FAULTHANDLER_SOURCES else stack.source
        # Without frames, only wait channel and state distinguish ranks.
        place: object = (stack.wchan, stack.state) if stack.main_thread_frames is None else stack.main_thread_frames
        groups.setdefault((source, special, place), []).append(stack)
    return [_format_entry(members) for members in groups.values()]


def _format_entry(members: Sequence[RankStack]) -> dict[str, Any]:
    frames = members[0].main_thread_frames
    return {
        "ranks": fold_ranks(member.rank for member in members),
        "source": members[0].source,
        "state": _join_values(member.state for member in members),
        "wchan": _join_values(member.wchan for member in members),
        "frames": None
        if frames is None
        else [{"function": frame.function, "file": frame.file, "line": frame.line} for frame in frames],
    }


def _join_values(values: Iterable[str | None]) -> str | None:
    return ",".join(sorted({value for value in values if value})) or None


def format_stacks(folded: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the groups of `fold_stacks` as lines for people, most recent call first."""
    lines: list[str] = []
    for entry in folded:
        where = f" in {entry['wchan']}" if entry["wchan"] else ""
        word = "rank" if entry["ranks"].isdigit() else "ranks"
        lines.append(f"{word} {entry['ranks']}  state {entry['state'] or '?'}{where}  (by {entry['source']})")
        if entry["frames"] is None:
            lines.append("    no Python stack available")
        lines += [f"    {frame['function']}  {frame['file']}:{frame['line']}" for frame in entry["frames"] or ()]
    return lines
