from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.formatting import fold_ranks
from clusterctl.run.rules import stack_dump_parser
from clusterctl.run.rules.stack_dump_parser import RankStack, ThreadStack
from clusterctl.why.evidence_types import StackFrame

DUMP = """\
Thread 0x00007f6c0fb636c0 (most recent call first):
  File "/a b/w.py", line 3 in inner
  File "/usr/lib/python3.11/threading.py", line 982 in run

Thread 0x00007f6c103646c0 (most recent call first):
  File "/run/inject/_clusterctl_shim/status_writer.py", line 105 in _run

Current thread 0x00007f6c10dd8b80 (most recent call first):
  File "/a b/w.py", line 6 in main
  File "/a b/w.py", line ??? in <module>
"""


def test_a_faulthandler_dump_gives_threads_without_ours():
    threads = stack_dump_parser.parse_faulthandler_dump(DUMP)
    assert [thread.is_main for thread in threads] == [False, True]
    assert threads[1].frames == (StackFrame("main", "/a b/w.py", 6), StackFrame("<module>", "/a b/w.py", 0))


def test_the_thread_that_took_the_signal_need_not_be_the_main_one():
    main = int("00007f6c0fb636c0", 16)
    assert [thread.is_main for thread in stack_dump_parser.parse_faulthandler_dump(DUMP, main)] == [True, False]


def test_of_several_dumps_the_last_counts():
    later = DUMP.replace("line 6 in main", "line 9 in main")
    threads = stack_dump_parser.parse_faulthandler_dump(DUMP + later)
    assert len(threads) == 2
    assert threads[1].frames[0].line == 9


def test_thread_names_of_python_3_14_are_understood():
    dump = 'Current thread 0x00007f6c10dd8b80 [python] (most recent call first):\n  File "w.py", line 6 in main\n'
    assert stack_dump_parser.parse_faulthandler_dump(dump)[0].frames == (StackFrame("main", "w.py", 6),)


def test_py_spy_tells_who_holds_the_gil():
    frames = [{"name": "f", "filename": "w.py", "line": 4, "module": None, "locals": None}]
    said = [{"pid": 9, "thread_id": 1, "os_thread_id": 9, "thread_name": None, "owns_gil": True, "frames": frames}]
    assert stack_dump_parser.parse_py_spy_dump(json.dumps(said)) == (
        ThreadStack(ident=9, is_main=True, frames=(StackFrame("f", "w.py", 4),), holds_gil=True),
    )


@given(st.text())
def test_no_text_breaks_the_readers(text):
    stack_dump_parser.parse_faulthandler_dump(text)
    stack_dump_parser.parse_py_spy_dump(text)


def rank(number, function="f", state="S", wchan="futex", source="signal"):
    threads = (ThreadStack(ident=1, is_main=True, frames=(StackFrame(function, "w.py", 1),)),) if function else None
    return RankStack(rank=number, source=source, state=state, wchan=wchan, threads=threads)


@pytest.mark.parametrize(
    ("given_ranks", "expected"),
    [
        pytest.param([rank(0), rank(1), rank(3)], [("0-1,3", "S", "futex")], id="equal stacks"),
        pytest.param([rank(0), rank(1, "g")], [("0", "S", "futex"), ("1", "S", "futex")], id="another place"),
        pytest.param([rank(0), rank(1, state="R", wchan=None)], [("0-1", "R,S", "futex")], id="caught running"),
        pytest.param([rank(0), rank(1, state="T")], [("0", "S", "futex"), ("1", "T", "futex")], id="stopped"),
        pytest.param(
            [rank(0, None, wchan="a", source="proc"), rank(1, None, wchan="b", source="proc")],
            [("0", "S", "a"), ("1", "S", "b")],
            id="without stacks the wait channel tells",
        ),
        pytest.param([rank(0), rank(1, source="py-spy")], [("0", "S", "futex"), ("1", "S", "futex")], id="sources"),
    ],
)
def test_equal_stacks_are_folded_with_their_ranks(given_ranks, expected):
    folded = stack_dump_parser.fold_stacks(given_ranks)
    assert [(entry["ranks"], entry["state"], entry["wchan"]) for entry in folded] == expected


def test_the_text_names_ranks_rung_and_lines():
    assert stack_dump_parser.format_stacks(
        stack_dump_parser.fold_stacks([rank(0), rank(1), rank(2, None, source="proc")])
    ) == [
        "ranks 0-1  state S in futex  (by signal)",
        "    f  w.py:1",
        "rank 2  state S in futex  (by proc)",
        "    no Python stack available",
    ]


def test_evidence_without_a_readable_dump_counts_as_proc():
    found = stack_dump_parser.parse_rank_stacks(
        {"0": {"source": "signal", "stacks": "noise", "state": "S", "wchan": None}}
    )
    assert (found[0].source, found[0].main_thread_frames) == ("proc", None)


def _unfold(text):
    parts = [part.split("-") for part in text.split(",") if part]
    return {number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)}


@given(st.sets(st.integers(0, 300)))
def test_folded_ranks_are_the_ranks(ranks):
    assert _unfold(fold_ranks(ranks)) == ranks
