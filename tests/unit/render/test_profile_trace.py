"""Profiles of ranks as one trace: times on one clock, a group for each rank, and calls merged from samples."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol.record_types import RankProfile
from clusterctl.render.profile_trace import INVALID_PROFILE_ERRORS, convert_profile, merge_stacks
from clusterctl.why.evidence_types import StackFrame


def convert(method: str, document: object, *, shift_s: float = 0.0, main_thread: int | None = None) -> list[Any]:
    profile: RankProfile = {"method": method, "why": [], "began": 100.0, "main_thread": main_thread}
    return convert_profile(profile, json.dumps(document), 3, "rank 3 a", shift_s)


def tracks(events: list[Any]) -> dict[int, str]:
    return {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}


def meta(what: str, pid: object, tid: int, **args: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


KINETO = {
    "baseTimeNanoseconds": 90_000_000_000,
    "traceEvents": [
        meta("process_labels", 500, 0, labels="CPU"),
        meta("process_labels", 0, 0, labels="GPU 0"),
        meta("thread_name", 500, 501, name="thread 501 (pt_gloo_runloop)"),
        meta("thread_name", 0, 7, name="stream 7"),
        {"ph": "X", "name": "gloo:all_reduce", "pid": 500, "tid": 501, "ts": 1.5, "dur": 2},
        {"ph": "X", "name": "aten::mm", "pid": 500, "tid": 500, "ts": 10e6, "dur": 5.25},
        {"ph": "X", "name": "gemm", "pid": 0, "tid": 7, "ts": 11e6, "dur": 3},
        {"ph": "s", "id": 9, "name": "ac2g", "pid": 500, "tid": 500, "ts": 10e6},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler", "ts": 0, "dur": 9},
    ],
}


def test_operations_and_kernels_of_a_rank_are_one_group_on_the_clock_of_the_trace() -> None:
    events = convert("torch", KINETO, shift_s=-95.0)

    assert tracks(events) == {1: "thread 501 (pt_gloo_runloop)", 0: "main thread", 3: "GPU 0 stream 7"}
    assert {e["pid"] for e in events} == {3}
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("gloo:all_reduce", 1, -5e6 + 1.5, 2),
        ("aten::mm", 0, 5e6, 5.25),
        ("gemm", 3, 6e6, 3),
    ]
    assert [e["id"] for e in events if e["ph"] == "s"] == ["3.9"]


def test_samples_of_py_spy_begin_when_it_began() -> None:
    call = {"name": "f", "pid": 500, "tid": 140, "args": {}}
    events = convert("py-spy", [{**call, "ph": "B", "ts": 10}, {**call, "ph": "E", "ts": 30}], main_thread=140)

    assert tracks(events) == {0: "main thread"}
    assert [(e["ph"], e["ts"]) for e in events if e["ph"] != "M"] == [("B", 100e6 + 10), ("E", 100e6 + 30)]


def dump(*functions: str) -> str:
    frames = "".join(f'  File "w.py", line {n} in {name}\n' for n, name in enumerate(functions))
    return f"Current thread 0x0000000000000008 (most recent call first):\n{frames}"


DUMPS = [(100.0, "signal", dump("f", "main")), (101.0, "signal", dump("f", "main")), (102.0, "signal", dump("main"))]
SAMPLES = {
    "frames": [["f", "w.py", 1], ["main", "w.py", 2], ["main", "w.py", 3]],
    "samples": [[100.0, [[8, 0, 1]]], [101.0, [[8, 0, 2]]], [102.0, [[8, 1]]]],
}


@pytest.mark.parametrize(("method", "document"), [("signal", DUMPS), ("samples", SAMPLES)])
def test_samples_of_stacks_become_calls_that_last_until_the_next_sample(method: str, document: object) -> None:
    events = convert(method, document, shift_s=-100.0, main_thread=8)

    assert tracks(events) == {0: "main thread"}
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [("f", 0.0, 2e6), ("main", 0.0, 3e6)]


STACKS = st.lists(st.lists(st.sampled_from([StackFrame(name, "w.py", 1) for name in "abc"]), max_size=4), max_size=8)


@given(STACKS)
def test_the_calls_give_every_sampled_stack_back(stacks: list[list[StackFrame]]) -> None:
    calls = list(merge_stacks([*((float(n), stack) for n, stack in enumerate(stacks)), (float(len(stacks)), [])]))

    assert sum(ended - began for _, began, ended in calls) == sum(map(len, stacks))
    for time, stack in enumerate(stacks):
        active = [call for call in calls if call[1] <= time < call[2]]
        assert sorted(frame.function for frame, _, _ in active) == sorted(frame.function for frame in stack)
        spans = sorted((began, -ended) for _, began, ended in active)
        assert all(one[1] <= other[1] for one, other in itertools.pairwise(spans)), "the calls nest"


@pytest.mark.parametrize("method", ["torch", "py-spy", "samples", "signal", "none"])
@given(
    document=st.recursive(
        st.none() | st.integers() | st.text(), lambda one: st.lists(one) | st.dictionaries(st.text(), one), max_leaves=5
    )
)
def test_a_file_of_a_node_raises_nothing_but_the_expected_errors(method: str, document: object) -> None:
    try:
        convert(method, document)
    except INVALID_PROFILE_ERRORS:
        return
