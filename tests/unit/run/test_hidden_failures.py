"""A run whose first processes all ended with 0 is no success where something below them tells otherwise."""

from __future__ import annotations

import io
from typing import Any

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.spec import RestartSpec
from clusterctl.errors import ExitCode
from clusterctl.render.console import Terminal
from clusterctl.render.end_report import render_end_report
from clusterctl.render.status_report import RunSnapshot, render_status, status_json
from clusterctl.run.rules import controller_events, next_action
from clusterctl.run.rules.outcome import determine_outcome
from clusterctl.run.rules.state import RunPhase, RunState
from clusterctl.run.rules.why_input import build_why_evidence
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, format_verdict_lines
from tests.unit.run.told import RUNNING, attempt, exited, started, told, wrote

ERROR = {"message": "RuntimeError: boom", "traceback": "Traceback (most recent call last):\nRuntimeError: boom"}
FAILED_INSIDE = wrote(RUNNING, "n0", exited(0, exit_code=0), exited(1, exit_code=0, error=ERROR))


def test_a_rank_whose_python_failed_below_a_shell_that_ended_with_0_has_failed() -> None:
    assert next_action.decide_action(
        FAILED_INSIDE, next_action.RunLimits(), next_action.RunObservations(silent_s={}), 200.0
    ) == next_action.EndAttempt(reason=StopReason.PEER_FAILED)
    assert determine_outcome(FAILED_INSIDE) == (RunPhase.FAILED, ExitCode.FAILED)


def test_status_says_that_its_command_ended_with_0() -> None:
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=200)
    text = "\n".join(render_status(RunSnapshot(state=FAILED_INSIDE, has_controller=True), 200.0, terminal))
    assert "rank 1 on n0, its Python failed, although its command ended with 0: RuntimeError: boom" in text
    assert "exit 0, its Python failed" in text


def test_why_names_the_rank_and_what_it_raised() -> None:
    verdict = judge_run(build_why_evidence(FAILED_INSIDE, {}))
    assert (verdict.cls, verdict.confidence) == (Fault.EXCEPTION, Confidence.CERTAIN)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert "although its command ended with 0" in verdict.summary


TABLE = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n===\ntrain.py FAILED\n"
LAUNCHED = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 15, in <module>
[rank1]:     raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
[rank1]: RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB
Traceback (most recent call last):
  File "/bin/torchrun", line 5, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  exitcode  : 1 (pid: 16121)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
cli: done
"""


def test_why_names_what_ended_the_program_below_a_launcher_and_not_the_table_of_the_launcher() -> None:
    error = {
        "message": TABLE,
        "traceback": 'Traceback (most recent call last):\n  File "/bin/torchrun", line 5\n' + TABLE,
    }
    state = wrote(RUNNING, "n0", exited(0, exit_code=0), exited(1, exit_code=0, error=error, tail=LAUNCHED))
    verdict = judge_run(build_why_evidence(state, {}))
    assert verdict.cls is Fault.OUT_OF_MEMORY
    assert "RuntimeError: CUDA out of memory" in verdict.summary
    assert "train.py:15" in str(list(format_verdict_lines(verdict)))


# --- what ranks leave at work, and what a stop has to kill

WORK = {"pid": 9, "rank": 0, "command": "python3 train.py", "age_s": 3.0}
WAITS = {**WORK, "pid": 10, "command": "bash ./monitor.sh"}
LAYOUT = [{"node": "n0", "node_rank": 0, "address": "10.0.0.1", "ranks": [0]}]


def ended(lasted_s: float, *leftovers: dict[str, Any], **swept: Any) -> RunState:
    """One rank that ended with 0 after a time, and what its node found then."""
    state = wrote(told(RunState(), attempt(layout=LAYOUT)), "n0", node_events.Prepared(0), started(0))
    last = node_events.Swept(0, leftovers=list(leftovers), **swept)  # type: ignore[arg-type]
    return wrote(state, "n0", exited(0, exit_code=0, earliest=lasted_s, latest=lasted_s), last)


@pytest.mark.parametrize(
    ("state", "succeeded"),
    [
        pytest.param(ended(2.0, WORK), False, id="work_left_within_seconds"),
        pytest.param(ended(2.0, WAITS, WORK), False, id="work_and_a_monitor"),
        pytest.param(ended(600.0, WORK), True, id="work_left_after_long"),
        pytest.param(ended(2.0, WAITS), True, id="a_monitor_alone"),
        pytest.param(ended(2.0), True, id="nothing_left"),
    ],
)
def test_ranks_that_ended_within_seconds_and_left_work_have_not_succeeded(state: RunState, *, succeeded: bool) -> None:
    assert determine_outcome(state) == (
        (RunPhase.SUCCEEDED, ExitCode.OK) if succeeded else (RunPhase.FAILED, ExitCode.FAILED)
    )


def test_a_run_that_left_its_work_is_not_tried_again_and_says_why() -> None:
    state = ended(2.0, WAITS, WORK)
    limits = next_action.RunLimits(restart=RestartSpec(max_restarts=3))
    assert isinstance(
        next_action.decide_action(state, limits, next_action.RunObservations(silent_s={}), 200.0), next_action.Finish
    )
    assert state.cause is not None
    assert state.cause.message == "`python3 train.py` (pid 9, 3 s old) was still at work, and was ended"
    verdict = judge_run(build_why_evidence(told(state, controller_events.RunEnded(state="failed", exit_code=100)), {}))
    assert verdict.cls is Fault.EXITED_EARLY
    assert "python3 train.py" in verdict.summary


@pytest.mark.parametrize(
    ("state", "words"),
    [
        pytest.param(ended(600.0, WORK), "rank 0 on n0 ended with 0 and left `python3 train.py`", id="left"),
        pytest.param(ended(600.0, past_grace=[WORK]), "rank 0 on n0: `python3 train.py`", id="killed"),
    ],
)
def test_status_report_and_why_name_what_was_ended(state: RunState, words: str) -> None:
    over = told(state, controller_events.RunEnded(state="succeeded", exit_code=0))
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=200)
    shown = [
        render_status(RunSnapshot(state=over, has_controller=True), 200.0, terminal),
        render_end_report(over, terminal),
    ]
    shown += [
        [judge_run(build_why_evidence(over, {})).summary],
        status_json(RunSnapshot(state=over, has_controller=True))["warnings"],
    ]
    assert [words in "\n".join(lines) for lines in shown] == [True] * 4


# --- exceptions that a handler has caught

SWALLOWED = (
    'step 4\nTraceback (most recent call last):\n  File "/w/train.py", line 15, in main\n    x[80]\nIndexError: no {}\n'
)


def all_ended(*tails: str) -> RunState:
    """All four ranks ended with 0, and what their nodes gave of their output."""
    ends = [exited(rank, exit_code=0, tail=tail) for rank, tail in enumerate(tails)]
    return wrote(wrote(RUNNING, "n0", *ends[:2]), "n1", *ends[2:])


@pytest.mark.parametrize(
    ("tails", "words"),
    [
        pytest.param(
            ["", SWALLOWED.format(1), "", ""],
            ["rank 1 ended with 0, but its last output is a traceback: IndexError: no 1 (train.py:15)"],
            id="one",
        ),
        pytest.param(
            [SWALLOWED.format(rank) for rank in range(4)],
            ["ranks 0-3 ended with 0, but their last output is a traceback: IndexError: no 0 (train.py:15)"],
            id="all_alike",
        ),
        pytest.param(["", "", SWALLOWED.format(1) + "saved\n", ""], [], id="went_on"),
    ],
)
def test_a_rank_that_ended_with_0_behind_a_traceback_is_warned_of_and_has_not_failed(
    tails: list[str], words: list[str]
) -> None:
    state = all_ended(*tails)
    assert determine_outcome(state) == (RunPhase.SUCCEEDED, ExitCode.OK)
    over = told(state, controller_events.RunEnded(state="succeeded", exit_code=0))
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=200)
    shown = [
        render_status(RunSnapshot(state=over, has_controller=True), 200.0, terminal),
        render_end_report(over, terminal),
    ]
    shown += [
        [judge_run(build_why_evidence(over, {})).summary],
        status_json(RunSnapshot(state=over, has_controller=True))["warnings"],
    ]
    assert [all(word in "\n".join(lines) for word in words) for lines in shown] == [True] * 4
    assert len(shown[3]) == len(words)


def test_a_rank_that_left_its_peers_behind_a_traceback_is_named_with_it() -> None:
    state = wrote(RUNNING, "n0", exited(1, exit_code=0, tail=SWALLOWED.format(1)))
    assert [rank.end.message for rank in build_why_evidence(state, {}).ranks if rank.end] == [
        "IndexError: no 1 (train.py:15)"
    ]


# --- signals of somebody else


def ended_for(*signals: tuple[int, float] | None) -> RunState:
    """All four ranks ended with 0, and which signal they had handled how long before."""
    ends = [
        exited(rank, exit_code=0, outside_signal=each and {"signal": each[0], "before_s": each[1]})
        for rank, each in enumerate(signals)
    ]
    return wrote(wrote(RUNNING, "n0", *ends[:2]), "n1", *ends[2:])


@pytest.mark.parametrize(
    ("signals", "words"),
    [
        pytest.param(
            [(15, 1.2), None, None, None],
            ["rank 0 received SIGTERM from outside clusterctl 1 s before it ended with 0"],
            id="one",
        ),
        pytest.param(
            [(15, 1.2), (15, 4.0), (2, 1.0), (2, 1.0)],
            [
                "ranks 0-1 received SIGTERM from outside clusterctl 4 s before they ended with 0",
                "ranks 2-3 received SIGINT from outside clusterctl 1 s before they ended with 0",
            ],
            id="two_signals",
        ),
        pytest.param([(15, 3600.0), None, None, None], [], id="long_before"),
    ],
)
def test_ranks_that_ended_with_0_for_a_signal_of_somebody_else_are_warned_of(
    signals: list[tuple[int, float] | None], words: list[str]
) -> None:
    over = told(ended_for(*signals), controller_events.RunEnded(state="succeeded", exit_code=0))
    assert determine_outcome(over) == (RunPhase.SUCCEEDED, ExitCode.OK)
    assert status_json(RunSnapshot(state=over, has_controller=True))["warnings"] == words


# --- ranks that leave their peers, or were about to fail when they were stopped with them

LOST = "step 4\nRuntimeError: Connection closed by peer [10.0.0.2]:4711\n"
BEFORE_STOP = (
    'step 4\nTraceback (most recent call last):\n  File "/w/train.py", line 9, in <module>\n    labels[step]\n'
    "KeyError: 5\nwandb: uploading history ...\n"
)


def lost_peers(*others: node_events.Exited) -> RunState:
    """Ranks 0 and 1 lost a peer on n1; how ranks 2 and 3 ended there."""
    state = wrote(RUNNING, "n0", *(exited(rank, exit_code=1, latest=2.0, tail=LOST) for rank in (0, 1)))
    return wrote(told(state, DECIDED), "n1", *others)


def shown_of(state: RunState) -> tuple[str, str]:
    """What the report of a run says of its end, and what `why` says."""
    over = told(state, controller_events.RunEnded(state="failed", exit_code=100))
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=200)
    verdict = judge_run(build_why_evidence(over, {}, outputs={w.rank: w.tail for w in over.workers.values()}))
    return "\n".join(render_end_report(over, terminal)), "\n".join(text for _, text in format_verdict_lines(verdict))


DECIDED = controller_events.AttemptEndDecided(attempt=0, reason="peer_failed", message="a worker failed")
STOPPED = exited(3, signal=15, stopped=True, latest=3.0)


@pytest.mark.parametrize(
    ("tail", "words"),
    [
        pytest.param(
            "step 4\ncould not load the checkpoint: [Errno 2] No such file or directory: 'rank_02'\n",
            "could not load the checkpoint: [Errno 2] No such file or directory: 'rank_02'",
            id="a_complaint",
        ),
        pytest.param("step 4\nnothing left to do here\n", "nothing left to do here", id="the_last_line"),
        pytest.param("step 3\nstep 4\n", None, id="steps_alone"),
    ],
)
def test_a_rank_that_left_its_peers_with_0_is_named_with_its_last_words(tail: str, words: str | None) -> None:
    state = lost_peers(exited(2, exit_code=0, latest=1.0, tail=tail), STOPPED)
    assert state.cause is not None
    assert (state.cause.kind, state.cause.rank) == ("exited_early", 2)
    lost = "2 ranks lost their connection to it"
    assert state.cause.message == (lost if words is None else f"{words} ({lost})")
    report, why = shown_of(state)
    assert words is None or (
        words in report and f"it ended with 0 while others went on; its last output: {words}" in why
    )


def test_a_rank_that_had_printed_why_it_fails_before_it_was_stopped_is_the_cause() -> None:
    state = lost_peers(
        exited(2, signal=15, stopped=True, latest=3.0), exited(3, signal=15, stopped=True, latest=3.0, tail=BEFORE_STOP)
    )
    assert state.cause is not None
    assert (state.cause.kind, state.cause.rank, state.cause.message) == ("stopped", 3, "KeyError: 5")
    report, why = shown_of(state)
    assert report.startswith(
        "first observed failure: rank 3 on n1, stopped by clusterctl before it ended by itself: KeyError: 5"
    )
    assert "then ranks 0-1 on n0: exit 1: RuntimeError: Connection closed by peer" in report
    assert "crash EXCEPTION, likely: rank 3 on n1 failed: KeyError: 5" in why


@pytest.mark.parametrize(
    ("first", "tail"),
    [
        pytest.param(LOST, "step 4\n", id="no_traceback"),
        pytest.param(LOST, BEFORE_STOP + "step 5\n", id="went_on"),
        pytest.param(BEFORE_STOP + LOST, BEFORE_STOP, id="all_have_printed_it"),
        pytest.param("RuntimeError: bad batch\n", BEFORE_STOP, id="a_failure_tells_for_itself"),
        pytest.param(
            LOST, BEFORE_STOP.replace("KeyError: 5", "RuntimeError: Connection reset by peer"), id="it_lost_a_peer_too"
        ),
    ],
)
def test_a_rank_that_was_stopped_is_no_cause_where_its_output_does_not_tell_so(first: str, tail: str) -> None:
    state = wrote(RUNNING, "n0", exited(0, exit_code=1, latest=2.0, tail=first))
    state = wrote(state, "n1", exited(3, signal=15, stopped=True, latest=3.0, tail=tail))
    assert state.cause is not None
    assert state.cause.rank == 0


# --- groups of their own


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        pytest.param(
            {"n0": ([0, 1], 2), "n1": ([0, 1], 2)},
            "of n0 and of n1 formed groups of their own (world 2, twice)",
            id="world_a_node",
        ),
        pytest.param(
            {"n0": ([0, 1], 2), "n1": ([0, 1, 2], 3)}, "formed groups of their own (worlds of 2 to 3)", id="unlike"
        ),
        pytest.param({"n0": ([0, 1], 2)}, "of n0 formed a group of their own (world 2)", id="a_part"),
        pytest.param({"n0": ([0, 1], 4), "n1": ([2, 3], 4)}, None, id="one_world"),
        pytest.param({"n0": ([0, 1, 2, 3], 8), "n1": ([4, 5], 8)}, None, id="larger_than_the_runs"),
    ],
)
def test_workers_that_did_not_meet_those_of_other_nodes_are_told_of(
    groups: dict[str, tuple[list[int], int]], words: str | None
) -> None:
    state = RUNNING
    for node, (ranks, size) in groups.items():
        state = wrote(state, node, node_events.GroupJoined(0, ranks, size))
    said = status_json(RunSnapshot(state=state, has_controller=True))["warnings"]
    assert said == [] if words is None else words in said[0]


def ended_as(*how: dict[str, Any], groups: dict[str, tuple[list[int], int]] | None = None) -> list[str]:
    """What is warned of where all four ranks ended with 0; the run has succeeded all the same."""
    ends = [exited(rank, exit_code=0, **each) for rank, each in enumerate(how)]
    state = RUNNING
    for node, (ranks, size) in (groups or {}).items():
        state = wrote(state, node, node_events.GroupJoined(0, ranks, size))
    state = wrote(wrote(state, "n0", *ends[:2]), "n1", *ends[2:])
    assert determine_outcome(state) == (RunPhase.SUCCEEDED, ExitCode.OK)
    over = told(state, controller_events.RunEnded(state="succeeded", exit_code=0))
    assert (
        list(build_why_evidence(over, {}).warnings)
        == status_json(RunSnapshot(state=over, has_controller=True))["warnings"]
    )
    return list(build_why_evidence(over, {}).warnings)


ALONE: dict[str, Any] = {"worked_alone": True}
EACH_FOR_ITSELF = ["the 4 ranks formed no process group with each other: each worked for itself"]


@pytest.mark.parametrize(
    ("how", "groups", "words"),
    [
        pytest.param([ALONE] * 4, None, EACH_FOR_ITSELF, id="no_group"),
        pytest.param([ALONE] * 4, {"n0": ([0], 1), "n1": ([0], 1)}, EACH_FOR_ITSELF, id="groups_of_one"),
        pytest.param([ALONE, ALONE, ALONE, {}], None, [], id="one_is_no_torch"),
    ],
)
def test_ranks_that_never_met_are_told_of(
    how: list[dict[str, Any]], groups: dict[str, tuple[list[int], int]] | None, words: list[str]
) -> None:
    assert ended_as(*how, groups=groups) == words


def child(pid: int, message: str, **more: Any) -> dict[str, Any]:
    return {"failed_child": {"pid": pid, "message": message}, **more}


NO_TORCHRUN = {"shell_error": "run.sh: line 9: torchrun: command not found"}
SHELL_SAID = "`run.sh: line 9: torchrun: command not found`: `set -e` ends a script where a command fails"
NO_PYTHON: dict[str, Any] = {"lacks_python": True}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param([NO_TORCHRUN, {}, {}, {}], [f"rank 0 ended with 0, but its shell said {SHELL_SAID}"], id="one"),
        pytest.param(
            [{"output_failure": "`Trainer.fit` stopped: No training batches."}, {}, {}, {}],
            ["rank 0 ended with 0, but its output says: `Trainer.fit` stopped: No training batches."],
            id="trained_nothing",
        ),
        pytest.param(
            [{"output_failure": "ERROR: Connection closed by peer"}, {"output_failure": "ERROR: NCCL error"}, {}, {}],
            [
                "rank 1 ended with 0, but its output says first: ERROR: NCCL error",
                "rank 0 ended with 0, but its output says that it then lost a peer: ERROR: Connection closed by peer",
            ],
            id="one_lost_the_other",
        ),
        pytest.param([NO_TORCHRUN] * 4, [f"ranks 0-3 ended with 0, but their shell said {SHELL_SAID}"], id="all"),
        pytest.param(
            [NO_PYTHON] * 4,
            ["none of the 4 ranks started a Python, though the job names one: nothing was trained"],
            id="no_python",
        ),
        pytest.param([NO_PYTHON, NO_PYTHON, NO_PYTHON, {}], [], id="a_python_in_one"),
    ],
)
def test_what_the_shell_of_a_rank_said_is_told(how: list[dict[str, Any]], words: list[str]) -> None:
    assert ended_as(*how) == words


PEER = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:{}"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(
            [{}, {}, {}, child(1234, "RuntimeError: NCCL error in: x.cpp:1691\nmore")],
            [
                "rank 3: its child process 1234 ended by RuntimeError: NCCL error in: x.cpp:1691, and the rank ended with 0"
            ],
            id="one",
        ),
        pytest.param(
            [child(rank, PEER.format(rank)) for rank in range(3)] + [child(1234, "RuntimeError: NCCL error")],
            [
                "rank 3: its child process 1234 ended by RuntimeError: NCCL error, and the rank ended with 0",
                f"ranks 0-2: their child processes ended by {PEER.format(0)}, and they ended with 0",
            ],
            id="those_that_lost_a_peer_go_last",
        ),
        pytest.param(
            [child(8, "SIGKILL"), child(9, "exit code 3"), {}, {}],
            [
                "rank 0: its child process 8 ended by SIGKILL, and the rank ended with 0",
                "rank 1: its child process 9 ended with exit code 3, and the rank ended with 0",
            ],
            id="signal_and_exit_code",
        ),
        pytest.param(
            [child(7, "IndexError: no 1", tail=SWALLOWED.format(1)), {}, {}, {}],
            ["rank 0: its child process 7 ended by IndexError: no 1, and the rank ended with 0"],
            id="its_traceback_is_told_once",
        ),
        pytest.param(
            [child(7, "future: ValueError: no bucket"), {}, child(8, "future: ValueError: no bucket"), {}],
            [
                "ranks 0,2 ended with 0, but nothing read the result of their futures, which raised ValueError: no bucket"
            ],
            id="futures",
        ),
    ],
)
def test_ranks_whose_child_processes_failed_unnoticed_are_told_of(how: list[dict[str, Any]], words: list[str]) -> None:
    assert ended_as(*how) == words
