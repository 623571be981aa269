"""The history of machines: which records make a repeat offender, and what a machine is compared with."""

from __future__ import annotations

import pytest

from clusterctl.run.rules.controller_events import ControllerEvent, HealthChanged, LinkChanged, RestartPlanned
from clusterctl.run.rules.machine_history import (
    DAY_S,
    Machine,
    Record,
    RecordKind,
    describe_offence,
    list_run_records,
    measure_drop,
    read_machine,
)
from clusterctl.why.verdict import Confidence, Culprit, Fault, ProblemKind, Verdict
from tests.unit.health import healthy

NOW = 1_800_000_000.0
HOUR = 3600.0


def lost(days_ago: float, cause: str = "", run: str = "") -> Record:
    at = NOW - days_ago * DAY_S
    return Record("gpu07", RecordKind.LOST, cause, at, at, run=run or f"run-{days_ago}")


def found(days_ago: float, cause: str = "xid.79", *, until: float | None = None, **more: object) -> Record:
    usual = {"status": "FAIL", "action": "REBOOT_NODE", **more}
    last_at = NOW - (days_ago if until is None else until) * DAY_S
    return Record("gpu07", RecordKind.FINDING, cause, NOW - days_ago * DAY_S, last_at, **usual)  # type: ignore[arg-type]


def verdict(days_ago: float, fault: Fault, run: str = "") -> Record:
    at = NOW - days_ago * DAY_S
    return Record("gpu07", RecordKind.VERDICT, fault.value, at, at, run=run or f"run-{days_ago}")


@pytest.mark.parametrize(
    ("records", "text"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([lost(1)], None, id="one loss"),
        pytest.param([lost(1), lost(3)], "lost twice this week", id="two losses"),
        pytest.param([lost(1), lost(3), lost(4)], "lost 3 times this week", id="three losses"),
        pytest.param([lost(1), lost(8)], None, id="one of two was more than a week ago"),
        pytest.param([lost(1, run="a"), lost(1.1, run="a")], "lost twice this week", id="twice in one run"),
        pytest.param(
            [lost(1, "xid.79"), lost(3, "xid.79")], "lost twice this week, both times XID 79", id="the same cause"
        ),
        pytest.param(
            [lost(1, "xid.79"), lost(3, "reboot")], "lost twice this week (reboot, XID 79)", id="different causes"
        ),
        pytest.param([lost(1, "xid.79"), lost(3)], "lost twice this week (XID 79)", id="one cause is unknown"),
        pytest.param(
            [lost(1), found(1 - 0.5 / 24), lost(3), found(3 - 0.5 / 24)],
            "lost twice this week, both times XID 79",
            id="a finding after a loss explains it",
        ),
        pytest.param([lost(1), found(0.5)], "lost once and failed its checks once this week (XID 79)", id="a later finding counts"),
        pytest.param([found(2), found(2, "gpu.lost")], None, id="two findings of one check are one incident"),
        pytest.param([found(5, until=0)], None, id="one finding over days is one incident"),
        pytest.param([found(9, until=0), lost(1), lost(2)], "lost twice this week, both times XID 79", id="a finding that lasts explains all losses"),
        pytest.param([found(1), found(3)], "failed its checks twice this week, both times XID 79", id="two findings"),
        pytest.param([found(1, status="WARN"), found(3, status="WARN")], None, id="warnings"),
        pytest.param([found(d, "host.disk", action="FREE_SPACE") for d in (1, 2, 3)], None, id="a full disk"),
        pytest.param([verdict(1, Fault.GPU), verdict(2, Fault.GPU)], "failed twice this week, both times GPU", id="verdicts"),
        pytest.param([verdict(1, Fault.EXCEPTION), verdict(2, Fault.EXCEPTION)], None, id="errors of the program"),
        pytest.param([lost(1, run="a"), verdict(1, Fault.NODE_LOST, "a")], None, id="a loss and its verdict"),
        pytest.param([found(1, card="old"), found(3, card="old")], None, id="a replaced GPU"),
        pytest.param(
            [found(1, card="S1"), found(3, card="S1")],
            "failed its checks twice this week, both times XID 79",
            id="a present GPU",
        ),
    ],
)  # fmt: skip
def test_who_is_a_repeat_offender(records: list[Record], text: str | None) -> None:
    assert describe_offence(records, NOW, ["S0", "S1"]) == text


@pytest.mark.parametrize(
    ("values", "drop"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([100.0] * 5, None, id="too few days"),
        pytest.param([100.0] * 6 + [97.0], None, id="the usual spread"),
        pytest.param([98.0, 100.0, 101.0, 99.0, 100.0, 89.0], 0.11, id="11 % below its own past"),
        pytest.param([100.0] * 5 + [120.0], None, id="faster"),
        pytest.param([0.0] * 6, None, id="a past of zeros"),
    ],
)
def test_when_a_machine_is_slower_than_its_own_past(values: list[float], drop: float | None) -> None:
    points = [(NOW + day * DAY_S, value) for day, value in enumerate(values)]
    assert measure_drop(points) == (pytest.approx(drop) if drop else None)


def test_a_past_of_more_than_a_month_ago_is_no_baseline() -> None:
    old = [(NOW + day * DAY_S, 100.0) for day in range(10)]
    assert measure_drop([*old, (NOW + 60 * DAY_S, 50.0)]) is None


# --- what a run shows


def told(*events: ControllerEvent, verdict: Verdict | None = None) -> list[tuple[str, str, str, str]]:
    machines = {"gpu07": Machine(node="gpu07", cards={3: ("S3", "H100")})}
    timed = [(NOW + i, event) for i, event in enumerate(events)]
    return [(r.node, r.kind.value, r.cause, r.card) for r in list_run_records(timed, "llm-ab12", machines, verdict)]


XID = HealthChanged(
    node="gpu07", gpu=3, check="gpu.xid", key="gpu.xid 79", status="FAIL", message="XID 79", action="REBOOT_NODE"
)
GONE = LinkChanged(node="gpu07", link="lost", why="no answer for 2 min")


def test_a_loss_after_a_fatal_error_of_a_gpu_has_this_error_as_its_cause() -> None:
    assert told(XID, GONE) == [("gpu07", "finding", "xid.79", "S3"), ("gpu07", "lost", "xid.79", "")]


def test_a_loss_without_a_sign_has_no_cause_and_a_reboot_is_one() -> None:
    assert told(GONE, LinkChanged(node="gpu07", link="lost", rebooted=True)) == [
        ("gpu07", "lost", "", ""),
        ("gpu07", "lost", "reboot", ""),
    ]


def test_failures_of_the_program_are_no_failures_of_the_machine() -> None:
    def failed(fault: Fault) -> RestartPlanned:
        cause = {"node": "gpu07", "cls": fault.value, "message": "CUDA error"}
        return RestartPlanned(attempt=1, why="crash", at=NOW, cause=cause)

    assert told(failed(Fault.EXCEPTION), failed(Fault.GPU), failed(Fault.GPU)) == [("gpu07", "failure", "GPU", "")]


@pytest.mark.parametrize(("confidence", "count"), [(Confidence.LIKELY, 1), (Confidence.AMBIGUOUS, 0)])
def test_a_verdict_is_kept_if_it_blames_somebody(confidence: Confidence, count: int) -> None:
    culprits = (Culprit(rank=3, node="gpu07"),)
    judged = Verdict(kind=ProblemKind.CRASH, cls=Fault.GPU, confidence=confidence, summary="x", culprits=culprits)
    assert told(XID, verdict=judged)[1:] == [("gpu07", "verdict", "GPU", "")] * count


def test_a_problem_that_is_over_is_no_finding() -> None:
    over = HealthChanged(node="gpu07", gpu=3, check="gpu.xid", key="gpu.xid 79", status="PASS", message="over")
    assert told(over) == []


def test_a_machine_is_known_by_its_machine_id_and_its_gpus_by_their_serials() -> None:
    machine = read_machine("gpu00", healthy.facts(), NOW)
    assert (machine.identity, machine.find_card(3), machine.find_card(None)) == ("machine-0", "165000003", "")


def test_without_a_machine_id_the_host_key_stands_for_it() -> None:
    facts = healthy.changed(healthy.facts(), host__machine_id=None, controller__host_key="SHA256:abc")
    assert read_machine("gpu00", facts, NOW).identity == "SHA256:abc"
