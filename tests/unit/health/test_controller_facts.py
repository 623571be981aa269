"""What only the head can tell of a node: runs that are meant to live, the code, the rendezvous port."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_cluster, judge_node
from clusterctl.health.settings import NOT_SYNCED, HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

CONTEXT = HealthSettings(
    nodes={"n0": NodeDeclaration(gpus=8), "n1": NodeDeclaration(gpus=8), "n2": NodeDeclaration(gpus=8)}
)
HELD = {"procs__runs": [{"run": "nightly-1", "pid": 77, "comm": "python"}]}


def of_node(name: str, **changes: Any) -> Finding:
    (found,) = judge_node("n0", changed(facts(), **changes), CONTEXT, [name])
    return found


@pytest.mark.parametrize(
    ("controller", "status", "words"),
    [
        ({"live_runs": ["nightly-1"]}, Status.PASS, "is alive"),
        ({"live_runs": [], "own_run": "nightly-1"}, Status.PASS, "no processes of earlier"),
        ({"live_runs": []}, Status.FAIL, "left over by run nightly-1"),
        ({"live_runs": [], "strange_runs": ["nightly-1"]}, Status.WARN, "which neither this node nor this head knows"),
        ({"live_runs": None}, Status.WARN, "1 process of run nightly-1"),
    ],
    ids=["alive", "our own", "over", "unknown to all", "nobody could be asked"],
)
def test_processes_of_a_run_are_leftovers_only_where_it_is_known_to_be_over(
    controller: dict[str, Any], status: Status, words: str
) -> None:
    found = of_node("run.leftover", **HELD, **{f"controller__{key}": value for key, value in controller.items()})

    assert found.status is status
    assert words in found.message


@pytest.mark.parametrize(
    ("hashes", "status", "blamed"),
    [
        (["c0de", "c0de", "c0de"], Status.PASS, None),
        (["c0de", "c0de", "dead"], Status.FAIL, "n2"),
        (["c0de", "c0de", ""], Status.FAIL, "n2"),
        (["c0de", "c0de", NOT_SYNCED], Status.PASS, None),
        (["", "", NOT_SYNCED], Status.SKIP, None),
        (["c0de", "c0de", None], Status.UNKNOWN, None),
    ],
    ids=["the same", "another", "missing", "a local node", "nothing synced yet", "one does not say"],
)
def test_code_is_compared_where_it_is_synced(hashes: list[str | None], status: Status, blamed: str | None) -> None:
    told = {f"n{i}": changed(facts(i), controller__code_hash=found) for i, found in enumerate(hashes)}

    (found,) = judge_cluster(told, CONTEXT, ["version.code"])

    assert (found.status, found.node) == (status, blamed)


@pytest.mark.parametrize(
    ("seen", "status", "words"),
    [
        ({"ok": True, "peers": 3, "reached_by": 2}, Status.PASS, "listened at 10.0.0.1:29500"),
        ({"ok": True, "peers": 3, "reached_by": 0}, Status.FAIL, "none of 3 nodes could connect"),
        # Of two nodes nobody can say which one is to blame; the other has failed.
        ({"ok": True, "peers": 1, "reached_by": 0}, Status.PASS, "listened at"),
        ({"ok": False, "error": "Address already in use"}, Status.FAIL, "cannot listen at 10.0.0.1:29500: Address"),
    ],
    ids=["one is cut off", "all are cut off", "the other of two is cut off", "taken"],
)
def test_the_node_that_listens_is_blamed_where_no_other_came_through(
    seen: dict[str, Any], status: Status, words: str
) -> None:
    tried = {"address": "10.0.0.1", "port": 29500, "role": "listen", "error": None, **seen}

    found = of_node("net.rendezvous", controller__rendezvous=tried)

    assert found.status is status
    assert words in found.message


def test_nodes_on_one_machine_have_no_packet_size_to_compare() -> None:
    route = {"other": {"address": "127.0.0.1", "source": "127.0.0.1", "interface": "lo", "error": None}}
    told = {f"n{i}": changed(facts(i), net__routes=route) for i in range(2)}

    (found,) = judge_cluster(told, CONTEXT, ["net.mtu"])

    assert found.status is Status.SKIP


@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        pytest.param({"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}, Status.PASS, "eth0", id="one"),
        pytest.param(
            {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "eth0"}, Status.WARN, "two networks", id="two"
        ),
        pytest.param({"NCCL_SOCKET_IFNAME": "lo,eth", "GLOO_SOCKET_IFNAME": "eth0"}, Status.PASS, "lo,eth", id="both"),
    ],
)
def test_ranks_that_would_use_two_networks_are_warned_of(settings: dict[str, str], status: Status, words: str) -> None:
    found = of_node("net.ifname_env", host__env=settings)

    assert found.status is status
    assert words in found.message
