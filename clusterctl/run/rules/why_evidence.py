"""Builds the evidence that `why` judges: the state of a run, and the stacks of its ranks. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from clusterctl.agent.protocol.record_types import FlightRecorderEntry, RankEvidence
from clusterctl.formatting import fold_ranks
from clusterctl.run.rules.blame import Cause, ExitAnalysis, find_cause_in_output
from clusterctl.run.rules.outcome import list_end_warnings
from clusterctl.run.rules.state import NodePhase, RunState, WorkerPhase, WorkerState
from clusterctl.why.evidence import (
    Evidence,
    Node,
    Rank,
    RankExit,
    RankSnapshot,
    RunError,
    StackFrame,
    StartRefusal,
)

LEFT_WORK_HINT = "keep the work in the foreground, or end the script with `wait PID`"
_RUN_ERROR_KINDS = ("node_lost", "start_failed", "unhealthy", "port_taken", "time_limit")


def build_why_evidence(
    state: RunState,
    evidence: Mapping[str, RankEvidence],
    *,
    evidence_folder: str | None = None,
    folder: str | None = None,
    stalled: bool = False,
    outputs: Mapping[int, str] | None = None,
    collective_counts: Mapping[int, Mapping[str, tuple[int, int]]] | None = None,
) -> Evidence:
    """Return the evidence about the newest attempt of a run.

    Args:
        state: The state that the journals give.
        evidence: The evidence of each rank (`agent.watch.rank_evidence`) from before its end.
        evidence_folder: The folder with stored evidence.
        folder: The folder of the run.
        stalled: The evidence is from a stall, even if the rule does not see one now.
        outputs: The last output of each rank that was stopped.
        collective_counts: The collective numbers of each rank before the first rank ended.
    """
    collective_counts, outputs = collective_counts or {}, outputs or {}
    snapshots = {stack.rank: _rank_snapshot(stack, evidence[str(stack.rank)]) for stack in parse_rank_stacks(evidence)}
    return Evidence(
        run=state.run,
        over=state.over,
        reason=state.reason,
        ranks=tuple(
            _rank(worker, snapshots.get(rank), outputs.get(rank, ""), collective_counts.get(rank))
            for rank, worker in sorted(state.workers.items())
        ),
        nodes={
            node.node: Node(
                node=node.node,
                link=node.link or NodePhase.WAITING.value,
                why=node.link_why,
                addresses=(node.address,) if node.address else (),
            )
            for node in state.nodes.values()
        },
        stalled=stalled or (state.stall is not None and state.stall.phase == "confirmed"),
        limit=None if state.stall is None else state.stall.limit_s,
        run_error=_run_error(state),
        troubles=_troubles(state),
        evidence_folder=evidence_folder if snapshots else None,
        folder=folder,
        warnings=tuple(list_end_warnings(state)),
    )


def _rank(
    worker: WorkerState,
    snapshot: RankSnapshot | None,
    output: str,
    collective_counts: Mapping[str, tuple[int, int]] | None,
) -> Rank:
    return Rank(
        rank=worker.rank,
        node=worker.node,
        started=worker.phase not in (WorkerPhase.PENDING, WorkerPhase.STARTING),
        end=_rank_exit(worker, output) if worker.phase is WorkerPhase.EXITED else None,
        snapshot=snapshot,
        collective_counts=collective_counts,
    )


def _rank_exit(worker: WorkerState, output: str) -> RankExit:
    unknown = Cause(kind="unknown", exit_code=worker.exit_code)
    analysis = worker.exit_analysis or ExitAnalysis(cause=unknown, earliest=0.0, latest=0.0)
    cause = analysis.cause
    if worker.stopped and output:
        cause = find_cause_in_output(worker.rank, worker.node, output) or unknown
    return RankExit(
        exit_code=cause.exit_code,
        signal=cause.signal,
        earliest=analysis.earliest,
        latest=analysis.latest,
        on_node_clock=analysis.on_node_clock,
        oom=None if worker.exited is None else worker.exited.oom,
        message=worker.swallowed or cause.message,
        traceback=cause.traceback,
        tail=worker.tail or output,
        secondary=cause.secondary,
        cls=cause.cls,
        is_recognised=cause.is_recognised,
        stopped=worker.stopped,
        failed_inside=worker.has_failed_inside,
    )


def _run_error(state: RunState) -> RunError | None:
    cause = state.external_cause
    if state.error is not None and not state.workers:
        error = state.error
        return RunError(
            kind="refused",
            message=str(error.get("message") or "the start was refused"),
            node=error.get("node"),
            hint=str(error.get("hint") or ""),
            reasons=tuple(_start_refusals(error)),
        )
    if cause is not None and cause.kind in _RUN_ERROR_KINDS:
        return RunError(kind=cause.kind, message=cause.message, node=cause.node)
    if state.has_left_work and state.cause is not None:
        message = f"all ranks ended with 0 within seconds, and {state.cause.message}"
        return RunError(kind="left_work", message=message, node=state.cause.node, hint=LEFT_WORK_HINT)
    return RunError(kind="cancelled", message="a person ended it") if state.reason == "cancelled" else None


def _start_refusals(error: Mapping[str, Any]) -> Iterator[StartRefusal]:
    """Yield the reasons in the error of a start (see `controller_events.StartFailed`)."""
    for entry in (*(error.get("findings") or ()), *(error.get("nodes") or ())):
        node = entry.get("node")
        message = str(entry.get("message") or "").removeprefix(f"{node}: ")
        yield StartRefusal(
            node=node, message=message, check=str(entry.get("check") or ""), hint=str(entry.get("hint") or "")
        )


def _troubles(state: RunState) -> dict[str, tuple[str, ...]]:
    messages: dict[str, tuple[str, ...]] = {}
    for (node, _, _), trouble in state.troubles.items():
        messages[node] = (*messages.get(node, ()), trouble.message)
    return messages


def _rank_snapshot(stack: RankStack, evidence: RankEvidence) -> RankSnapshot:
    inside = evidence.get("inside")
    seq = (inside.get("seq") or {}) if inside else {}
    return RankSnapshot(
        source=stack.source,
        state=stack.state,
        wchan=stack.wchan,
        cpu=evidence.get("cpu"),
        frames=stack.main_thread_frames,
        children=tuple(evidence["children"]),
        step=inside.get("step") if inside else None,
        status_age=inside.get("age_s") if inside and not inside.get("unseen") else None,
        seq={group: (numbers[0], numbers[1]) for group, numbers in seq.items()},
        entries=_entries(evidence, seq),
        sockets=tuple(evidence.get("sockets") or ()),
        error=evidence.get("error"),
    )


def _entries(evidence: RankEvidence, seq: Mapping[str, Any]) -> tuple[FlightRecorderEntry, ...] | None:
    """Return the entries of the flight recorder, unless they are from an earlier pause.

    The shim writes them after some seconds without a collective. A rank that was stopped sooner still has the entries
    of an earlier pause, and its counters are ahead of them.
    """
    recorded = evidence.get("recorded")
    if recorded is None:
        return None
    newest: dict[str, int] = {}
    for entry in recorded:
        if not entry["p2p"]:
            newest[entry["group"]] = max(entry["number"], newest.get(entry["group"], 0))
    if any(group in seq and 0 < number < seq[group][0] for group, number in newest.items()):
        return None
    return tuple(recorded)


# faulthandler's own format: `File "x.py", line 3 in f`; 3.14 adds thread names in brackets.
_THREAD = re.compile(
    r"^(?P<current>Current thread|Thread) 0x(?P<id>[0-9a-fA-F]+)(?: \[.*\])? \(most recent call first\)"
)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_SHIM_PATH = "/_clusterctl_shim/"
# A rank in one of these states is shown apart from running or sleeping ranks with the same stack.
_SPECIAL_STATES = "TtDZX"


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread, most recent call first.

    Attributes:
        ident: pthread identity (signal) or the kernel's thread id (py-spy).
        main: Whether it is the main thread.
        holds_gil: `None` if the dump does not show it.
    """

    ident: int
    main: bool
    frames: tuple[StackFrame, ...]
    holds_gil: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStack:
    """The stacks of one rank. `threads` is `None` if only `/proc` could be read; the source is then `proc`."""

    rank: int
    source: str
    state: str | None
    wchan: str | None
    threads: tuple[Thread, ...] | None

    @property
    def main_thread_frames(self) -> tuple[StackFrame, ...] | None:
        """Frames of the main thread, most recent call first; `None` if they are not known."""
        return next((thread.frames for thread in self.threads or () if thread.main), None)


def parse_faulthandler(text: str, main_thread: int | None = None) -> tuple[Thread, ...]:
    """Return the threads in the last dump of faulthandler.

    Args:
        text: The dump. Lines of another format are skipped.
        main_thread: Identity of the main thread, if the worker reported it. Otherwise it is the thread that received
            the signal, else the thread that started first, which faulthandler lists last.
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
        Thread(ident=ident, main=ident == main, frames=tuple(frames))
        for ident, _, frames in blocks
        if not any(_SHIM_PATH in frame.file for frame in frames)
    )


@lru_cache(maxsize=4096)
def _parse_frame(line: str) -> StackFrame | None:
    """Return the call in a line of a dump. The cache serves thousands of ranks at the same lines."""
    frame = _FRAME.match(line)
    if frame is None:
        return None
    return StackFrame(frame["function"], frame["file"], int(frame["line"]) if frame["line"].isdigit() else 0)


def parse_py_spy(text: str) -> tuple[Thread, ...]:
    """Return the threads in the output of `py-spy dump --json`; none if it has another format."""
    threads: list[Thread] = []
    try:
        for thread in json.loads(text):
            ident = thread.get("os_thread_id") or thread["thread_id"]
            frames = (StackFrame(one["name"], one["filename"], int(one["line"] or 0)) for one in thread["frames"])
            main = thread.get("thread_name") == "MainThread" or ident == thread["pid"]
            threads.append(Thread(int(ident), main, tuple(frames), holds_gil=bool(thread["owns_gil"])))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return ()
    return tuple(threads)


def parse_rank_stacks(ranks: Mapping[str, RankEvidence]) -> tuple[RankStack, ...]:
    """Return the stacks in the evidence of the ranks, in the order of the ranks.

    Args:
        ranks: The evidence of each rank (`ranks` of `watch.rank_evidence.collect_evidence`), of one or of all nodes.
    """
    stacks: list[RankStack] = []
    for rank in sorted(ranks, key=int):
        evidence = ranks[rank]
        source, text = str(evidence.get("source", "proc")), str(evidence.get("stacks", ""))
        threads: tuple[Thread, ...] = ()
        if source == "signal":
            threads = parse_faulthandler(text, evidence.get("main_thread"))
        elif source == "py-spy":
            threads = parse_py_spy(text)
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
        # Without frames only the wait channel distinguishes ranks.
        place: object = (stack.wchan, stack.state) if stack.main_thread_frames is None else stack.main_thread_frames
        groups.setdefault((stack.source, special, place), []).append(stack)
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
    """Return grouped stacks as lines for people, most recent call first."""
    lines: list[str] = []
    for entry in folded:
        where = f" in {entry['wchan']}" if entry["wchan"] else ""
        word = "rank" if entry["ranks"].isdigit() else "ranks"
        lines.append(f"{word} {entry['ranks']}  state {entry['state'] or '?'}{where}  (by {entry['source']})")
        if entry["frames"] is None:
            lines.append("    no Python stack to be had")
        lines += [f"    {frame['function']}  {frame['file']}:{frame['line']}" for frame in entry["frames"] or ()]
    return lines
