"""Stacks of many ranks as people want them: read from the dumps, equal ones folded with the ranks that share them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from clusterctl.formatting import fold_ranks
from clusterctl.why.evidence import StackFrame

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from clusterctl.agent.protocol.record_types import RankEvidence

# faulthandler's own format: `File "x.py", line 3 in f`; 3.14 adds thread names in brackets.
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x(?P<id>[0-9a-fA-F]+)(?: \[.*\])? \(most recent call first\)"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_SHIM_PATH = "/_clusterctl_shim/"
# A rank in one of these tells another story than one that runs or sleeps, however equal their stacks.
_SPECIAL_STATES = "TtDZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """One thread, most recent call first.

    Attributes:
        ident: pthread identity (signal) or the kernel's thread id (py-spy).
        main: Whether it is the main thread.
        holds_gil: `None` where the dump does not tell.
    """

    ident: int
    main: bool
    frames: tuple[StackFrame, ...]
    holds_gil: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """Where one rank is. `threads` is `None` where only `/proc` could be read; its source is then `proc`."""

    rank: int
    source: str
    state: str | None
    wchan: str | None
    threads: tuple[Thread, ...] | None

    @property
    def frames(self) -> tuple[StackFrame, ...] | None:
        """Frames of the main thread, most recent call first; `None` where they are not known."""
        return next((thread.frames for thread in self.threads or () if thread.main), None)


def parse_faulthandler(text: str, main_thread: int | None = None) -> tuple[Thread, ...]:
    """Reads what faulthandler dumped; of several dumps the last.

    Args:
        text: The dump. What is not understood is skipped.
        main_thread: Identity of the main thread where the worker told; else it is the one that took the signal,
            else the one started first, which faulthandler lists last.
    """
    blocks: list[tuple[int, bool, list[StackFrame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            if any(current for _, current, _ in blocks) and _has_thread(blocks, int(head["id"], 16)):
                blocks = []
            blocks.append((int(head["id"], 16), head["current"].startswith("Current"), []))
        elif blocks and (frame := _parse_frame(line)) is not None:
            blocks[-1][2].append(frame)
    main = _find_main_thread(blocks, main_thread)
    return tuple(
        Thread(ident=ident, main=ident == main, frames=tuple(frames))
        for ident, _, frames in blocks
        if not any(_SHIM_PATH in frame.file for frame in frames)
    )


@lru_cache(maxsize=4096)
def _parse_frame(line: str) -> StackFrame | None:
    """Return the call that a line of a dump is; thousands of ranks stand at the same lines."""
    frame = _FRAME.match(line)
    if frame is None:
        return None
    return StackFrame(frame["function"], frame["file"], int(frame["line"]) if frame["line"].isdigit() else 0)


def _has_thread(blocks: list[tuple[int, bool, list[StackFrame]]], ident: int) -> bool:
    return any(other == ident for other, _, _ in blocks)


def _find_main_thread(blocks: list[tuple[int, bool, list[StackFrame]]], main: int | None) -> int | None:
    idents = [ident for ident, _, _ in blocks]
    if main in idents:
        return main
    current = [ident for ident, is_current, _ in blocks if is_current]
    return next(iter(current), idents[-1] if idents else None)


def parse_py_spy(text: str) -> tuple[Thread, ...]:
    """Reads `py-spy dump --json`; nothing where it is not that."""
    try:
        return tuple(_parse_py_spy_thread(thread) for thread in json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()


def _parse_py_spy_thread(thread: Mapping[str, Any]) -> Thread:
    ident = thread.get("os_thread_id") or thread["thread_id"]
    return Thread(
        ident=int(ident),
        main=thread.get("thread_name") == "MainThread" or ident == thread["pid"],
        frames=tuple(
            StackFrame(frame["name"], frame["filename"], int(frame["line"] or 0)) for frame in thread["frames"]
        ),
        holds_gil=bool(thread["owns_gil"]),
    )


def parse_rank_stacks(ranks: Mapping[str, RankEvidence]) -> tuple[RankStack, ...]:
    """The stacks in what the agents collected, ascending by rank.

    Args:
        ranks: Rank -> its evidence (`ranks` of `agent.watch.evidence.collect`), of one node or of all together.
    """
    return tuple(_parse_rank_stack(int(rank), ranks[rank]) for rank in sorted(ranks, key=int))


def _parse_rank_stack(rank: int, evidence: RankEvidence) -> RankStack:
    source, text = str(evidence.get("source", "proc")), str(evidence.get("stacks", ""))
    threads: tuple[Thread, ...] | None = None
    if source == "signal":
        threads = parse_faulthandler(text, evidence.get("main_thread")) or None
    elif source == "py-spy":
        threads = parse_py_spy(text) or None
    return RankStack(
        rank=rank,
        source=source if threads else "proc",
        state=evidence.get("state"),
        wchan=evidence.get("wchan"),
        threads=threads,
    )


def fold_stacks(stacks: Iterable[RankStack]) -> list[dict[str, Any]]:
    """Equal main-thread stacks as one entry with all their ranks, those of the lowest rank first.

    Returns:
        `[{ranks: "0-4,6", source, state, wchan, frames: [{function, file, line}] or null}]`, frames most recent call
        first. Where the ranks of an entry differ in state or wait channel, all of them are listed, `R,S`.
    """
    groups: dict[object, list[RankStack]] = {}
    for stack in sorted(stacks, key=lambda each: each.rank):
        special = stack.state if stack.state and stack.state in _SPECIAL_STATES else None
        # Without frames the wait channel is all there is to tell ranks apart.
        place: object = (stack.wchan, stack.state) if stack.frames is None else stack.frames
        groups.setdefault((stack.source, special, place), []).append(stack)
    return [_format_entry(members) for members in groups.values()]


def _format_entry(members: Sequence[RankStack]) -> dict[str, Any]:
    frames = members[0].frames
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
    """What `fold` gives as lines for people, most recent call first."""
    lines: list[str] = []
    for entry in folded:
        where = f" in {entry['wchan']}" if entry["wchan"] else ""
        word = "rank" if entry["ranks"].isdigit() else "ranks"
        lines.append(f"{word} {entry['ranks']}  state {entry['state'] or '?'}{where}  (by {entry['source']})")
        if entry["frames"] is None:
            lines.append("    no Python stack to be had")
        lines += [f"    {frame['function']}  {frame['file']}:{frame['line']}" for frame in entry["frames"] or ()]
    return lines
