"""A run whose first processes all ended with 0 is no success where something below them tells otherwise."""

from __future__ import annotations

import io

from clusterctl.agent.protocol.reasons import StopReason
from clusterctl.errors import ExitCode
from clusterctl.render.status import RunView, render_status
from clusterctl.render.terminal.console import Terminal
from clusterctl.run.rules import policy
from clusterctl.run.rules.case import case_of
from clusterctl.run.rules.outcome import outcome
from clusterctl.run.rules.state import RunPhase
from clusterctl.why.judge import judge
from clusterctl.why.verdict import Class, Confidence
from tests.unit.run.told import RUNNING, exited, wrote

ERROR = {"message": "RuntimeError: boom", "traceback": "Traceback (most recent call last):\nRuntimeError: boom"}
FAILED_INSIDE = wrote(RUNNING, "n0", exited(0, exit_code=0), exited(1, exit_code=0, error=ERROR))


def test_a_rank_whose_python_failed_below_a_shell_that_ended_with_0_has_failed() -> None:
    assert policy.decide(FAILED_INSIDE, policy.Limits(), policy.Sight(silent={}), 200.0) == policy.EndAttempt(
        reason=StopReason.PEER_FAILED
    )
    assert outcome(FAILED_INSIDE) == (RunPhase.FAILED, ExitCode.FAILED)


def test_status_says_that_its_command_ended_with_0() -> None:
    terminal = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=200)
    text = "\n".join(render_status(RunView(state=FAILED_INSIDE, attended=True), 200.0, terminal))
    assert "rank 1 on n0, its Python failed, although its command ended with 0: RuntimeError: boom" in text
    assert "exit 0, its Python failed" in text


def test_why_names_the_rank_and_what_it_raised() -> None:
    verdict = judge(case_of(FAILED_INSIDE, {}))
    assert (verdict.cls, verdict.confidence) == (Class.EXCEPTION, Confidence.CERTAIN)
    assert [culprit.rank for culprit in verdict.culprits] == [1]
    assert "although its command ended with 0" in verdict.summary
