from __future__ import annotations

from clusterctl.errors import ConnectError, NodesError, UnhealthyError
from clusterctl.health.findings import Finding, Status
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.controller_events import build_start_failed
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import apply_controller_event
from clusterctl.run.rules.why_input import build_why_evidence
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, Verdict


def finding(node: str | None, check: str = "host.disk", message: str = "0 bytes free") -> Finding:
    return Finding(check=check, node=node, message=message, status=Status.FAIL, hint="make room")


def refused(error: UnhealthyError | NodesError | ConnectError) -> Verdict:
    state = apply_controller_event(RunState(), 1.0, controller_events.RunCreated(run="r-1", name="r", path="/c.yaml"))
    return judge_run(build_why_evidence(apply_controller_event(state, 2.0, build_start_failed(error)), {}))


def test_a_check_that_failed_alike_on_several_nodes_is_told_once_with_all_of_them() -> None:
    told = refused(UnhealthyError("2 checks failed", [finding("gpu01"), finding("gpu02")]))
    assert (told.cls, told.confidence) == (Fault.REFUSED, Confidence.CERTAIN)
    assert told.summary == "nothing was started: host.disk on gpu[01-02]: 0 bytes free"
    assert [(c.rank, c.node) for c in told.culprits] == [(None, "gpu01"), (None, "gpu02")]


def test_what_helps_stands_before_how_to_go_on_all_the_same() -> None:
    told = refused(UnhealthyError("1 check failed", [finding("gpu01")], hint="`--no-health` skips all checks"))
    assert told.next_commands == ("make room", "clusterctl health --nodes gpu01", "`--no-health` skips all checks")


def test_of_several_reasons_each_is_named_beside_its_node() -> None:
    told = refused(UnhealthyError("2 checks failed", [finding("gpu01"), finding("gpu02", "gpu.lost", "GPU 3 is lost")]))
    assert told.summary.endswith("0 bytes free; and 1 more")
    assert [c.evidence for c in told.culprits] == ["host.disk: 0 bytes free", "gpu.lost: GPU 3 is lost"]


def test_nodes_that_could_not_be_reached_are_named_without_a_check() -> None:
    told = refused(NodesError([ConnectError("gpu07", "no route to host", hint="ping gpu07")]))
    assert told.summary == "nothing was started: gpu07: no route to host"
    assert told.next_commands[0] == "ping gpu07"


def test_a_finding_about_all_nodes_blames_none() -> None:
    told = refused(UnhealthyError("1 check failed", [finding(None, "net.mtu", "nodes disagree on MTU")]))
    assert told.summary == "nothing was started: net.mtu: nodes disagree on MTU"
    assert told.culprits == ()
