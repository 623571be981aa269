"""Converts the profiles of ranks into one trace, with a group for each rank. Pure."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence

from clusterctl.agent.protocol.record_types import RankProfile
from clusterctl.render.trace_events import TraceEvent, build_names
from clusterctl.run.rules.stack_dump_parser import ThreadStack, parse_faulthandler_dump, parse_py_spy_dump
from clusterctl.why.evidence_types import StackFrame

INVALID_PROFILE_ERRORS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The errors that an invalid file of a node may raise."""


def convert_profile(profile: RankProfile, text: str, rank: int, name: str, shift_s: float) -> list[TraceEvent]:
    """Return the trace events of a rank.

    Args:
        profile: The answer of the node.
        text: The content of the file that the node has written.
        rank: The rank, which becomes the pid of all events.
        name: The name of the group.
        shift_s: The seconds to add to the node's wall clock to get the time of the trace.

    Raises:
        INVALID_PROFILE_ERRORS: The file is invalid.
    """
    document, main_thread = json.loads(text), profile["main_thread"]
    match profile["method"]:
        case "torch":
            # Times of kineto are relative to `baseTimeNanoseconds` of the wall clock.
            shift_us = round(document["baseTimeNanoseconds"] / 1e3 + shift_s * 1e6)
            events = list(_convert_chrome_events(document["traceEvents"], None, rank, shift_us))
        case "py-spy":
            shift_us = round((profile["began"] + shift_s) * 1e6)
            events = list(_convert_chrome_events(document, main_thread, rank, shift_us))
        case "samples":
            frames = [StackFrame(str(name), str(file), int(line)) for name, file, line in document["frames"]]
            seen = [
                (time, tuple(_build_thread(stack, frames, main_thread) for stack in stacks))
                for time, stacks in document["samples"]
            ]
            events = list(_convert_samples(seen, rank, shift_s))
        case "signal":
            events = list(
                _convert_samples([(t, _parse_dump(s, text, main_thread)) for t, s, text in document], rank, shift_s)
            )
        case method:
            raise ValueError(f"unknown method {method}")
    return [*build_names(rank, 0, "process", name), *events]


def _convert_chrome_events(
    events: Sequence[TraceEvent], main_thread: int | None, rank: int, shift_us: int
) -> Iterator[TraceEvent]:
    """Yield the events of a process and its GPUs as events of one group, whose tracks have small numbers.

    Torch gives each GPU a group of its own, with the same number in each rank.
    """
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    numbers: dict[tuple[int, Hashable], int] = {}
    for event in events:
        pid, tid = event["pid"], event.get("tid", 0)
        # Groups whose number is a text have no operations: `Spans` and `Traces`.
        if event["ph"] == "M" or isinstance(pid, str):
            continue
        if (pid, tid) not in numbers:
            label = str(names.get(("process_labels", pid, 0), {}).get("labels", "CPU"))
            title = str(names.get(("thread_name", pid, tid), {}).get("name", "thread"))
            is_main = label == "CPU" and tid in (pid, main_thread)
            numbers[pid, tid] = 0 if is_main else len(numbers) + 1
            title = "main thread" if is_main else title if label == "CPU" else f"{label} {title}"
            yield from build_names(rank, numbers[pid, tid], "thread", title)
        changes = {"pid": rank, "tid": numbers[pid, tid], "ts": round(event["ts"] + shift_us, 3)}
        # A flow connects events with the same id, which must differ from the ids of other ranks.
        yield {**event, **changes, **({"id": f"{rank}.{event['id']}"} if "id" in event else {})}


def _build_thread(stack: Sequence[int], frames: Sequence[StackFrame], main_thread: int | None) -> ThreadStack:
    ident, *numbers = stack
    return ThreadStack(ident, ident == main_thread, tuple(frames[number] for number in numbers))


def _parse_dump(source: str, text: str, main_thread: int | None) -> tuple[ThreadStack, ...]:
    return parse_py_spy_dump(text) if source == "py-spy" else parse_faulthandler_dump(text, main_thread)


def _convert_samples(
    samples: Sequence[tuple[float, Sequence[ThreadStack]]], rank: int, shift_s: float
) -> Iterator[TraceEvent]:
    """Yield a slice for each call, which lasts from its first sample until the first sample without this call."""
    seen = [(time + shift_s, threads) for time, threads in samples]
    interval_s = (seen[-1][0] - seen[0][0]) / (len(seen) - 1) if len(seen) > 1 else 0.1
    threads = dict.fromkeys(thread.ident for _, threads in seen for thread in threads)
    for number, ident in enumerate(threads):
        stacks = [
            (time, next((tuple(reversed(one.frames)) for one in threads if one.ident == ident), ()))
            for time, threads in seen
        ]
        is_main = any(one.is_main for _, threads in seen for one in threads if one.ident == ident)
        yield from build_names(rank, number, "thread", "main thread" if is_main else f"thread {number}")
        for frame, began, ended in merge_stacks([*stacks, (seen[-1][0] + interval_s, ())]):
            yield {
                "ph": "X", "pid": rank, "tid": number, "name": frame.function,
                "ts": round(began * 1e6, 3), "dur": round((ended - began) * 1e6, 3),
                "args": {"file": frame.file, "line": frame.line},
            }  # fmt: skip


def merge_stacks(
    samples: Sequence[tuple[float, Sequence[StackFrame]]],
) -> Iterator[tuple[StackFrame, float, float]]:
    """Yield each call with its begin and end. A call lasts while it and all its callers are in each sample.

    Args:
        samples: The time and the stack of each sample, outermost call first. The last stack is empty.
    """
    active: list[tuple[StackFrame, float]] = []
    for time, stack in samples:
        common = 0
        while common < min(len(active), len(stack)) and _is_same_call(active[common][0], stack[common]):
            common += 1
        while len(active) > common:
            frame, began = active.pop()
            yield frame, began, time
        active += [(frame, time) for frame in stack[common:]]


def _is_same_call(one: StackFrame, other: StackFrame) -> bool:
    """Return whether two frames are probably one call: the line of a call changes while the function runs."""
    return (one.function, one.file) == (other.function, other.file)
