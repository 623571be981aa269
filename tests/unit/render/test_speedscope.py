"""Stacks as a speedscope file: its samples are the stacks, outermost call first."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from clusterctl.render.speedscope import build_speedscope
from clusterctl.run.rules.stack_dump_parser import RankStack, ThreadStack
from clusterctl.why.evidence_types import StackFrame

FRAMES = st.builds(StackFrame, st.sampled_from("fgh"), st.just("w.py"), st.integers(0, 3))
THREADS = st.builds(ThreadStack, st.integers(0, 9), st.booleans(), st.lists(FRAMES, max_size=4).map(tuple))


def rank(number: int, threads: tuple[ThreadStack, ...] | None) -> RankStack:
    return RankStack(rank=number, source="signal", state="S", wchan=None, threads=threads)


def names(document: dict[str, Any]) -> dict[str, list[list[str]]]:
    frames = document["shared"]["frames"]
    return {
        profile["name"]: [[frames[number]["name"] for number in sample] for sample in profile["samples"]]
        for profile in document["profiles"]
    }


def test_main_threads_are_shown_together_and_by_rank() -> None:
    stack = (StackFrame("loss", "w.py", 2), StackFrame("main", "w.py", 9))
    other = ThreadStack(2, False, (StackFrame("read", "d.py", 1),))

    document = build_speedscope("R", [rank(0, (ThreadStack(1, True, stack), other)), rank(3, None)])

    assert names(document) == {
        "main threads": [["main", "loss"]],
        "main threads by rank": [["rank 0", "main", "loss"]],
        "other threads": [["read"]],
    }


@given(st.lists(THREADS, max_size=6).map(tuple))
def test_the_document_has_each_frame_once_and_a_weight_for_each_sample(threads: tuple[ThreadStack, ...]) -> None:
    document = build_speedscope("R", [rank(0, threads)])

    shared = [tuple(frame.values()) for frame in document["shared"]["frames"]]
    assert len(shared) == len(set(shared))
    for profile in document["profiles"]:
        assert len(profile["samples"]) == len(profile["weights"]) == profile["endValue"] > 0
        assert all(0 <= number < len(shared) for sample in profile["samples"] for number in sample)
