from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.render.end_report import ReportContext, VisibleOutput, render_end_report
from clusterctl.render.run_messages import failure_line
from clusterctl.run.rules.failure_causes import Cause, ExitAnalysis
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, WorkerPhase, WorkerState

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

TRACE = 'Traceback (most recent call last):\n  File "train.py", line 88, in <module>\n    step()\nValueError: bad batch'
CAUSE = Cause(
    kind="exit", node="gpu02", rank=5, exit_code=1, message="ValueError: bad batch", traceback=TRACE, certain=True
)


def said(cause: Cause) -> ExitAnalysis:
    return ExitAnalysis(cause=cause, earliest=1100.0 + (cause.rank or 0), latest=1100.0 + (cause.rank or 0))


def stopped() -> dict[int, WorkerState]:
    return {
        rank: WorkerState(
            rank=rank,
            local_rank=rank % 4,
            node=f"gpu0{1 + rank // 4}",
            phase=WorkerPhase.EXITED,
            signal=15,
            stopped=True,
        )
        for rank in range(8)
    }


def failed_run() -> RunState:
    nodes = {
        name: NodeState(node=name, node_rank=i, ranks=tuple(range(4 * i, 4 * i + 4)), swept=True)
        for i, name in enumerate(("gpu01", "gpu02"))
    }
    workers = stopped()
    gone = {"exit_code": 1, "signal": None, "stopped": False}
    peer = Cause(kind="exit", node="gpu02", exit_code=1, message="Connection closed by peer", secondary=True)
    workers[5] = replace(workers[5], **gone, tail="step 1\n" + TRACE, exit_analysis=said(CAUSE))
    workers[6] = replace(workers[6], **gone, exit_analysis=said(replace(peer, rank=6)))
    workers[7] = replace(workers[7], **gone, exit_analysis=said(replace(peer, rank=7)))
    return RunState(
        run="digits-k3x9", name="digits", phase=RunPhase.FAILED, attempt=0, world_size=8, nodes=nodes, workers=workers,
        created=1000.0, ended=1192.0, exit_code=100,
    )  # fmt: skip


def test_who_had_an_end_of_its_own_while_it_was_stopped_is_not_called_stopped(pipe: Terminal) -> None:
    run = failed_run()
    run.workers[0] = replace(run.workers[0], exit_code=1, signal=None)
    run.workers[1] = replace(run.workers[1], exit_code=143, signal=None)
    lines = render_end_report(run, pipe)
    assert "  exit code 1 while being stopped: rank 0" in lines
    assert "  stopped by clusterctl: ranks 1-4" in lines


def test_begins_with_the_first_observed_failure_then_folds_the_others(pipe: Terminal) -> None:
    assert render_end_report(failed_run(), pipe) == [
        "first observed failure: rank 5 on gpu02, exit code 1: ValueError: bad batch",
        "  │ Traceback (most recent call last):",
        '  │   File "train.py", line 88, in <module>',
        "  │     step()",
        "  │ ValueError: bad batch",
        "  then ranks 6-7 on gpu02: exit 1: Connection closed by peer",
        "  stopped by clusterctl: ranks 0-4",
        "✗ digits-k3x9 failed after 3m12s (exit code 100)",
        "  clusterctl logs digits-k3x9 --rank 5 -n 200",
    ]


def test_says_so_where_another_may_have_come_first(pipe: Terminal) -> None:
    line = failure_line(replace(CAUSE, certain=False), 2, pipe)
    assert line == (
        "first observed failure (ambiguous: others overlap in time): rank 5 on gpu02, attempt 2, exit code 1: "
        "ValueError: bad batch"
    )


def test_a_signal_is_named_once(pipe: Terminal) -> None:
    cause = Cause(kind="signal", node="gpu02", rank=5, signal="SIGSEGV", message="killed by SIGSEGV", certain=True)
    assert failure_line(cause, 0, pipe) == "first observed failure: rank 5 on gpu02, killed by SIGSEGV"


def test_without_a_traceback_the_last_lines_are_shown(pipe: Terminal) -> None:
    state = failed_run()
    verdict = said(replace(CAUSE, traceback=None, message="giving up"))
    ended = replace(state.workers[5], tail="loss nan\n\x1b[2Jgiving up\n", exit_analysis=verdict)
    lines = render_end_report(replace(state, workers={**state.workers, 5: ended}), pipe)
    assert lines[1:3] == ["  │ loss nan", "  │ giving up"]


@pytest.mark.parametrize(("on_screen", "repeated"), [((5,), False), ((0,), True)])
def test_last_lines_that_stand_above_on_the_screen_are_not_repeated(
    pipe: Terminal, on_screen: tuple[int, ...], repeated: bool
) -> None:
    state = failed_run()
    verdict = said(replace(CAUSE, traceback=None, message="giving up"))
    ended = replace(state.workers[5], tail="loss nan\n\x1b[31mgiving up\x1b[0m\n", exit_analysis=verdict)
    above = VisibleOutput(ranks=frozenset(on_screen), lines=((on_screen, "loss nan"), (on_screen, "giving up")))

    lines = render_end_report(
        replace(state, workers={**state.workers, 5: ended}), pipe, ReportContext(visible_output=above)
    )

    assert any(line.startswith("  │") for line in lines) == repeated


def test_success_is_one_line(pipe: Terminal) -> None:
    state = replace(failed_run(), phase=RunPhase.SUCCEEDED, exit_code=0, workers=stopped(), attempt=1)
    assert render_end_report(state, pipe) == ["✓ digits-k3x9 succeeded: 8 ranks on 2 nodes, 2 attempts, 3m12s"]


def test_a_cancelled_run_did_not_fail(pipe: Terminal) -> None:
    state = replace(failed_run(), phase=RunPhase.CANCELLED, exit_code=103, workers=stopped(), reason_text="Ctrl-C")
    assert render_end_report(state, pipe) == ["! digits-k3x9 cancelled after 3m12s (exit code 103): Ctrl-C"]


def test_what_may_still_be_there_is_named(pipe: Terminal) -> None:
    left = ({"node": "gpu02", "pid": 77, "start_time": 1, "command": "python train.py", "why": "state D"},)
    lines = render_end_report(replace(failed_run(), remaining=left), pipe)
    at = lines.index("may still be there, on gpu02:")
    assert lines[at + 1] == "  gpu02: pid 77 `python train.py` (state D)"


def test_a_start_that_failed_shows_its_error_folded(pipe: Terminal) -> None:
    nodes = [
        {"node": f"gpu0{n}", "message": f"gpu0{n}: connection refused", "hint": "is sshd running?"} for n in (1, 2)
    ]
    error = {"class": "NodesError", "message": "2 nodes cannot be used", "nodes": nodes}
    state = RunState(run="r", phase=RunPhase.FAILED, error=error, exit_code=4)
    assert render_end_report(state, pipe) == [
        "error: gpu[01-02]: connection refused",
        "hint: is sshd running?",
        "✗ r failed after duration unknown (exit code 4)",
    ]


def test_ranks_that_failed_alike_are_told_once(pipe: Terminal) -> None:
    state = failed_run()
    same = {
        rank: replace(
            state.workers[rank], exit_code=1, signal=None, stopped=False, exit_analysis=said(replace(CAUSE, rank=rank))
        )
        for rank in (5, 6)
    }
    lines = render_end_report(replace(state, workers={**state.workers, **same}), pipe)

    assert lines[0] == "first observed failure: ranks 5-6 on gpu02 failed alike, exit code 1: ValueError: bad batch"
    assert [line for line in lines if "then rank" in line] == [
        "  then rank 7 on gpu02: exit 1: Connection closed by peer",
    ]


def test_peers_that_lost_each_other_are_one_group_whatever_ports_they_name(pipe: Terminal) -> None:
    state = failed_run()
    lost = {}
    for rank in (6, 7):
        peer = Cause(
            kind="exit", node="gpu02", rank=rank, exit_code=1, message=f"closed [10.0.0.1]:2{rank}", secondary=True
        )
        lost[rank] = replace(state.workers[rank], exit_analysis=said(peer))

    lines = render_end_report(replace(state, workers={**state.workers, **lost}), pipe)

    assert "  then ranks 6-7 on gpu02: exit 1: closed [10.0.0.1]:26" in lines


def test_a_traceback_that_stands_above_on_the_screen_is_not_repeated(pipe: Terminal) -> None:
    lines = render_end_report(failed_run(), pipe, ReportContext(visible_output=VisibleOutput(ranks=frozenset({5}))))

    assert lines[0].startswith("first observed failure: rank 5")
    assert not any("Traceback" in line for line in lines)


OF_RANK_0 = [((0,), f"[rank0]: {line}") for line in TRACE.splitlines()]


def test_a_traceback_that_another_rank_wrote_above_is_not_repeated(pipe: Terminal) -> None:
    mixed = [line for pair in zip(OF_RANK_0, [((1,), "[W1125 closing")] * 9, strict=False) for line in pair]
    lines = render_end_report(
        failed_run(), pipe, ReportContext(visible_output=VisibleOutput(ranks=frozenset({0}), lines=tuple(mixed)))
    )

    assert lines[:2] == [
        "first observed failure: rank 5 on gpu02, exit code 1: ValueError: bad batch",
        "  its traceback ends as that of rank 0 above",
    ]
    assert not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("other", ["line 88", "bad batch"])
def test_a_traceback_that_differs_from_those_above_is_shown(pipe: Terminal, other: str) -> None:
    lines = tuple((ranks, text.replace(other, "another")) for ranks, text in OF_RANK_0)
    told = render_end_report(
        failed_run(), pipe, ReportContext(visible_output=VisibleOutput(ranks=frozenset({0}), lines=lines))
    )

    assert any("Traceback" in line for line in told)


def test_files_of_the_code_are_named_by_their_place(pipe: Terminal) -> None:
    state = failed_run()
    placed = replace(CAUSE, traceback=TRACE.replace("train.py", "/root/work/digits/train.py"))
    workers = {**state.workers, 5: replace(state.workers[5], exit_analysis=said(placed))}

    lines = render_end_report(
        replace(state, workers=workers), pipe, ReportContext(folders=frozenset({"~/work/digits"}))
    )

    assert '  │   File "train.py", line 88, in <module>' in lines
