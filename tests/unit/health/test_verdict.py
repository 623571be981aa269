"""How findings are weighed by the cluster file, and what they add up to."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.config.spec import HealthSpec
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node, verdict
from clusterctl.health.registry import find_unknown_names
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts, log

ONE = {"n0": NodeDeclaration(gpus=8)}


def only(check: str, settings: HealthSettings, **changes: Any) -> Finding:
    found = judge_node("n0", changed(facts(), **changes), settings, [check])
    assert len(found) == 1
    return found[0]


def finding(status: Status) -> Finding:
    return Finding(check="x", status=status, message="")


@pytest.mark.parametrize(
    ("seen", "worst", "strict"),
    [
        ([Status.PASS, Status.SKIP], Status.PASS, Status.PASS),
        ([Status.PASS, Status.UNKNOWN], Status.UNKNOWN, Status.FAIL),
        ([Status.UNKNOWN, Status.WARN], Status.WARN, Status.FAIL),
        ([Status.WARN, Status.FAIL], Status.FAIL, Status.FAIL),
        ([Status.SKIP], Status.UNKNOWN, Status.FAIL),
        ([], Status.UNKNOWN, Status.FAIL),
    ],
    ids=["pass", "unknown", "warn", "fail", "only-skip", "nothing"],
)
def test_the_verdict_is_the_worst_and_never_a_pass_by_silence(
    seen: list[Status], worst: Status, strict: Status
) -> None:
    assert verdict(map(finding, seen)) is worst
    assert verdict(map(finding, seen), strict=True) is strict


def test_a_healthy_node_gives_at_least_25_passes_and_nothing_else_to_worry_about() -> None:
    found = judge_node("n0", facts(), HealthSettings(nodes=ONE))
    assert sum(f.status is Status.PASS for f in found) >= 25
    assert {f.status for f in found} == {Status.PASS, Status.SKIP}


def test_an_ignored_finding_is_shown_as_ignored() -> None:
    found = only("host.governor", HealthSettings(nodes=ONE, ignore=("host.gov*@n0",)), host__governors={"powersave": 1})
    assert (found.status, found.ignored) == (Status.SKIP, True)
    assert found.message == "ignored (WARN): CPU governor powersave"


def test_ignoring_names_the_node_it_is_for() -> None:
    found = only(
        "host.governor", HealthSettings(nodes=ONE, ignore=("host.governor@n7",)), host__governors={"powersave": 1}
    )
    assert found.status is Status.WARN


def test_what_is_ignored_is_not_invented_where_all_is_well() -> None:
    assert only("host.governor", HealthSettings(nodes=ONE, ignore=("host.governor",))).status is Status.PASS


@pytest.mark.parametrize(("wanted", "status"), [("fail", Status.FAIL), ("warn", Status.WARN), ("ignore", Status.SKIP)])
def test_severity_sets_how_grave_a_finding_is(wanted: str, status: Status) -> None:
    settings = HealthSettings(nodes=ONE, severity={"gpu.persistence": wanted})
    assert only("gpu.persistence", settings, gpu0__persistence=0).status is status


def test_one_xid_can_be_silenced_alone() -> None:
    lines = (
        "NVRM: Xid (PCI:0000:10:00): 31, pid=1, MMU Fault",
        "NVRM: Xid (PCI:0000:11:00): 79, pid=1, GPU has fallen off the bus.",
    )
    settings = HealthSettings(nodes=ONE, severity={"xid.31": "ignore"})
    found = judge_node("n0", changed(facts(), kernel_log=log(*lines)), settings, ["gpu.xid"])
    assert [f.status for f in found] == [Status.SKIP, Status.FAIL]


def test_a_required_check_that_could_not_look_is_a_failure() -> None:
    found = only("gpu.xid", HealthSettings(nodes=ONE, required=("gpu.xid",)), kernel_log="timeout")
    assert found.status is Status.FAIL
    assert found.message.startswith("required, but unknown")


def test_a_threshold_of_the_cluster_file_wins() -> None:
    assert only("host.load", HealthSettings(nodes=ONE), host__load1=150.0).status is Status.PASS
    assert (
        only("host.load", HealthSettings(nodes=ONE, thresholds={"host.load.warn": 1.0}), host__load1=150.0).status
        is Status.WARN
    )


def test_only_declared_gpus_are_judged() -> None:
    sick = changed(facts(), gpu7__ecc_unc=5)
    for declared, status in (((0, 1), Status.PASS), (4, Status.PASS), (8, Status.FAIL), ((7,), Status.FAIL)):
        settings = HealthSettings(nodes={"n0": NodeDeclaration(gpus=declared)})
        assert judge_node("n0", sick, settings, ["gpu.ecc_uncorrected"])[0].status is status


def test_declared_gpus_without_a_driver_are_a_failure_and_undeclared_ones_are_not() -> None:
    bare = changed(facts(), nvml__init_error=12, nvml__devices=[], driver__pci=[], driver__module=None)
    assert judge_node("n0", bare, HealthSettings(nodes=ONE), ["gpu.driver"])[0].status is Status.FAIL
    auto = HealthSettings(nodes={"n0": NodeDeclaration()})
    assert judge_node("n0", bare, auto, ["gpu.driver"])[0].status is Status.SKIP


def test_an_unreachable_node_has_one_finding_and_spoils_no_comparison() -> None:
    told = {"n0": facts(0), "n1": {"unreachable": "connection refused"}, "n2": facts(2)}
    settings = HealthSettings(nodes={name: NodeDeclaration(gpus=8) for name in told})
    assert [(f.check, f.status) for f in judge_node("n1", told["n1"], settings)] == [("net.ssh", Status.FAIL)]
    assert {f.status for f in judge_cluster(told, settings)} <= {Status.PASS, Status.SKIP}


def test_of_a_node_that_cannot_look_at_itself_it_is_said_that_its_interpreter_fails_and_not_its_connection() -> None:
    told = {"unprobed": "no interpreter `/nope` on this node", "there": "/usr/bin/python3 (3.11.2)"}
    found = {f.check: f for f in judge_node("n0", told, HealthSettings(nodes=ONE))}
    assert {name: f.status for name, f in found.items()} == {
        "net.ssh": Status.PASS,
        "version.interpreter": Status.FAIL,
    }
    message = "no interpreter `/nope` on this node; the agent runs on /usr/bin/python3 (3.11.2)"
    assert found["version.interpreter"].message == message


def test_a_run_of_ours_that_is_alive_is_no_leftover() -> None:
    runs = [{"run": "r1", "pid": 5, "comm": "python"}]
    assert (
        only("run.leftover", HealthSettings(nodes=ONE), procs__runs=runs, controller__live_runs=["r1"]).status
        is Status.PASS
    )
    assert (
        only("run.leftover", HealthSettings(nodes=ONE), procs__runs=runs, controller__live_runs=None).status
        is Status.WARN
    )


def test_one_machine_listed_twice_with_its_own_gpus_each_is_fine() -> None:
    twin = changed(facts(0), names__hostname="gpu00")
    settings = HealthSettings(nodes={"a": NodeDeclaration(gpus=(0, 1)), "b": NodeDeclaration(gpus=(2, 3))})
    found = judge_cluster({"a": facts(0), "b": twin}, settings, ["cluster.unique", "cluster.hostnames"])
    assert {f.status for f in found} == {Status.PASS}
    assert "on one machine: a+b" in found[0].message


@pytest.mark.parametrize(
    ("second", "status"),
    [
        pytest.param(["boot", "pid", "net"], Status.FAIL, id="one_place"),
        pytest.param(["boot", "pid", "other"], Status.PASS, id="a_container_with_its_own_network"),
        pytest.param(None, Status.PASS, id="not_reached_by_ssh"),
    ],
)
def test_one_machine_under_two_names_is_one(second: list[str] | None, status: Status) -> None:
    places = {"a": ["boot", "pid", "net"], "10.0.0.1": second}
    told = {node: changed(facts(0), controller__place=place) for node, place in places.items()}
    settings = HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=0)))
    (found,) = judge_cluster(told, settings, ["cluster.unique"])
    assert found.status is status
    assert ("a and 10.0.0.1 are one machine" in found.message) == (status is Status.FAIL)


def test_of_two_nodes_the_one_that_the_head_contradicts_has_the_wrong_clock() -> None:
    told = {"a": facts(0), "b": changed(facts(1), controller__clock={"offset": -40.0, "error": 0.1})}
    settings = HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8)))
    found = judge_cluster(told, settings, ["net.clock_skew"])
    assert [(f.node, f.status, f.message) for f in found] == [("b", Status.FAIL, "clock 40.0 s behind")]


def test_an_uncertain_clock_is_given_the_benefit_of_the_doubt() -> None:
    told = {"a": facts(0), "b": changed(facts(1), controller__clock={"offset": 1.5, "error": 0.8})}
    settings = HealthSettings(nodes=dict.fromkeys(told, NodeDeclaration(gpus=8)))
    assert judge_cluster(told, settings, ["net.clock_skew"])[0].status is Status.PASS


def test_names_that_match_no_check_are_mistakes_with_a_suggestion() -> None:
    health = HealthSpec(
        ignore=("host.governer@n0", "gpu.*"),
        severity={"xid.31": "ignore", "gpu.persistance": "warn"},
        required=("gpu.count",),
        thresholds={"host.disk.wrn": 1.0, "host.load.warn": 2.0},
        expect={"toch": "2.6"},
    )
    assert find_unknown_names(health) == [
        ("ignore", "host.governer", "host.governor"),
        ("severity", "gpu.persistance", "gpu.persistence"),
        ("thresholds", "host.disk.wrn", "host.disk.warn"),
        ("expect", "toch", "torch"),
    ]


def test_a_finding_has_the_promised_json_shape() -> None:
    keys = {
        "check",
        "status",
        "message",
        "hint",
        "action",
        "value",
        "expected",
        "node",
        "gpu",
        "duration_ms",
        "ignored",
        "needs_root",
    }
    assert set(only("gpu.count", HealthSettings(nodes=ONE)).to_json()) == keys
