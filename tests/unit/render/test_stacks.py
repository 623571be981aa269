from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.render.stack_report import render_stack_notes, render_stacks

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

WAITING = {
    "ranks": "0-2", "source": "signal", "state": "S", "wchan": "unix_stream_read",
    "frames": [{"function": "all_reduce", "file": "/x/dist.py", "line": 12}],
}  # fmt: skip
STOPPED = {"ranks": "3", "source": "proc", "state": "T", "wchan": "do_signal_stop", "frames": None}


def test_equal_stacks_stand_once_under_their_ranks_most_recent_call_first(narrow: Terminal) -> None:
    assert render_stacks([WAITING, STOPPED], narrow) == [
        "ranks 0-2  state S, in unix_stream_read, by signal",
        "    all_reduce  /x/dist.py:12",
        "",
        "rank 3  stopped, in do_signal_stop, by proc",
        "    no Python stack",
    ]


def test_remarks_say_why_there_is_no_stack_and_which_children_do_not_run(narrow: Terminal) -> None:
    child = {"pid": 9, "name": "pt_data_worker", "command": "", "state": "T"}
    idle = {**child, "state": "S"}
    ranks = {
        "0": {"source": "signal", "why": [], "children": [idle, child]},
        "1": {"source": "proc", "why": ["signal: not armed"], "children": []},
        "2": {"source": "proc", "why": ["signal: not armed"], "children": []},
    }
    assert render_stack_notes(ranks, narrow) == [
        "note: rank 0: its child 9 (`pt_data_worker`) is stopped",
        "note: ranks 1-2: no Python stack (signal: not armed)",
    ]


def test_control_sequences_of_a_node_do_not_reach_the_terminal(narrow: Terminal) -> None:
    frame = {"function": "\x1b[2Jf", "file": "a\x07b", "line": 1}
    assert "\x1b" not in "".join(render_stacks([{**WAITING, "frames": [frame]}], narrow))
