"""Roles: which nodes they take, the ranks that they get, the order of their starts, and the end of their run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol.run_requests import StopReason
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, ReadySpec, RoleSpec
from clusterctl.errors import RefusedError
from clusterctl.plan import environment, launch, layout, rendezvous, roles
from clusterctl.run.rules import next_action, outcome
from clusterctl.run.rules.state import RunPhase, RunState
from tests.unit.run.told import BEGUN, attempt, exited, started, told, wrote

IDENTITY = environment.RunIdentity(run="r-1")


def spec_of(parts: dict[str, RoleSpec], workers: list[int]) -> ClusterSpec:
    hosts = tuple(HostSpec(name=f"n{i}", host=f"n{i}", workers=count) for i, count in enumerate(workers))
    return ClusterSpec(name="r", path="/w/c.yaml", hosts=hosts, job=JobSpec(roles=parts))


def plan_of(spec: ClusterSpec) -> launch.LaunchPlan:
    layouts = layout.assign_ranks(spec.worker_hosts, {})
    addresses = {entry.host.name: f"10.0.0.{entry.host.name[1:]}" for entry in layouts}
    where = rendezvous.Rendezvous(
        master_addr=addresses[layouts[0].host.name], addresses=addresses, interfaces=dict.fromkeys(addresses, "eth0")
    )
    ports = {
        entry.host.name: [41000 for _ in rendezvous.list_requested_ports(part.spec, entry)]
        for part in roles.split_by_role(spec, layouts)
        for entry in part.layouts
    }
    return launch.plan_launch(spec, IDENTITY, layouts, {}, where, ports)


@st.composite
def specs(draw: st.DrawFn) -> ClusterSpec:
    """Specs with roles that fit: hosts by name, by number, and perhaps a role that takes the rest."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    with_rest = draw(st.booleans())
    count = sum(sizes)
    workers = draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    parts, first = {}, 0
    for number, size in enumerate(sizes):
        is_rest = with_rest and number == len(sizes) - 1
        named = draw(st.booleans()) and not is_rest
        hosts = tuple(f"n{i}" for i in order[first : first + size])
        first += size
        how = {"hosts": hosts} if named else {} if is_rest else {"nodes": size}
        own = draw(st.one_of(st.none(), st.integers(1, 3)))
        parts[f"role{number}"] = RoleSpec(command="x", workers=own, **how)  # type: ignore[arg-type]
    return spec_of(parts, workers)


@given(specs())
def test_each_node_has_one_role_and_each_role_is_a_world_of_its_own(spec: ClusterSpec) -> None:
    plan = plan_of(roles.assign_roles(spec))

    assert sorted(node.node for node in plan.nodes) == sorted(host.name for host in spec.hosts)
    assert [node.node_rank for node in plan.nodes] == list(range(len(spec.hosts)))
    assert [rank for node in plan.nodes for rank in node.ranks] == list(range(plan.world_size or 0))
    for name in spec.job.roles if spec.job else ():
        own = [node for node in plan.nodes if node.role == name]
        workers = [worker for node in own for worker in node.workers]
        assert [worker.env["RANK"] for worker in workers] == [str(number) for number in range(len(workers))]
        assert {w.env["WORLD_SIZE"] for w in workers} == {str(len(workers))}
        assert {(w.env["MASTER_ADDR"], w.env["CLUSTERCTL_ROLE"]) for w in workers} == {(own[0].address, name)}
        assert all(w.rank == int(w.env["RANK"]) + int(w.env["CLUSTERCTL_RANK_OFFSET"]) for w in workers)
        assert [w.env["NODE_RANK"] for node in own for w in node.workers[:1]] == [str(i) for i in range(len(own))]


@given(specs())
def test_roles_are_the_same_when_they_are_assigned_again(spec: ClusterSpec) -> None:
    once = roles.assign_roles(spec)

    assert roles.assign_roles(once) == once


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_a_role_starts_after_all_that_it_needs(needs: list[set[int]], dice: object) -> None:
    # A role needs only roles of lower numbers, so there is no circle.
    parts = {f"r{i}": RoleSpec(command="x", needs=tuple(f"r{j}" for j in own if j < i)) for i, own in enumerate(needs)}
    names = list(parts)
    dice.shuffle(names)  # type: ignore[attr-defined]

    order = [name for name, _ in roles.list_start_phases(JobSpec(roles={name: parts[name] for name in names}))]

    assert sorted(order) == sorted(parts)
    assert all(order.index(other) < order.index(name) for name in order for other in parts[name].needs)


def test_all_ranks_learn_the_addresses_of_all_roles() -> None:
    server = RoleSpec(command="x", nodes=2, ready=ReadySpec(port=8000))
    plan = plan_of(roles.assign_roles(spec_of({"trainer": RoleSpec(command="x"), "server": server}, [1, 1, 1])))

    told_here = {
        tuple(sorted((k, v) for k, v in w.env.items() if k.startswith(("CLUSTERCTL_SERVER", "CLUSTERCTL_TRAINER"))))
        for node in plan.nodes
        for w in node.workers
    }

    assert told_here == {
        (
            ("CLUSTERCTL_SERVER_ADDR", "10.0.0.1:8000"),
            ("CLUSTERCTL_SERVER_HOST", "10.0.0.1"),
            ("CLUSTERCTL_SERVER_HOSTS", "10.0.0.1,10.0.0.2"),
            ("CLUSTERCTL_TRAINER_HOST", "10.0.0.0"),
            ("CLUSTERCTL_TRAINER_HOSTS", "10.0.0.0"),
        )
    }


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param({"a": {"nodes": 2}, "b": {"nodes": 2}}, "need 4 nodes, but the run has 3", id="too few"),
        pytest.param({"a": {"nodes": 3}, "b": {}}, "need 4 nodes, but the run has 3", id="nothing left"),
        pytest.param({"a": {"nodes": 1}, "b": {"nodes": 1}}, "no role takes n2", id="too many"),
        pytest.param({"a": {}, "b": {}}, "have neither `nodes` nor `hosts`", id="two take the rest"),
        pytest.param({"a": {"hosts": ("n0",)}, "b": {"hosts": ("n0",)}}, "of role `a` and of role `b`", id="twice"),
        pytest.param({"a": {"hosts": ("n7",)}, "b": {}}, "`n7`, a host of role `a`, takes no part", id="unknown"),
    ],
)
def test_nodes_that_do_not_fit_the_roles_are_refused(parts: dict[str, dict[str, object]], message: str) -> None:
    made = {name: RoleSpec(command="x", **how) for name, how in parts.items()}  # type: ignore[arg-type]

    with pytest.raises(RefusedError, match=message):
        roles.assign_roles(spec_of(made, [1, 1, 1]))


LAYOUT = [
    {"node": "n0", "node_rank": 0, "address": "10.0.0.1", "ranks": [0, 1], "role": "trainer", "is_service": False},
    {"node": "n1", "node_rank": 1, "address": "10.0.0.2", "ranks": [2, 3], "role": "server", "is_service": True},
]
NOTHING = next_action.RunObservations(silent_s={})


def running() -> RunState:
    state = told(BEGUN, attempt(1, LAYOUT))
    for node, ranks in (("n0", (0, 1)), ("n1", (2, 3))):
        state = wrote(state, node, *(started(rank, 1) for rank in ranks))
    return state


def end(state: RunState, rank: int, code: int, **how: object) -> RunState:
    event = replace(exited(rank, exit_code=code, earliest=1.0, latest=1.0, **how), attempt=1)
    return wrote(state, state.workers[rank].node, event)


def decide(state: RunState) -> next_action.Action | None:
    return next_action.decide_action(state, next_action.RunLimits(), NOTHING, 1000.0)


def test_the_run_ends_with_the_last_role_that_no_other_needs() -> None:
    state = end(running(), 0, 0)
    before = decide(state)

    after = decide(end(state, 1, 0))

    assert before is None
    assert after == next_action.EndAttempt(reason=StopReason.ROLES_DONE, message="trainer has ended: stopping server")


@pytest.mark.parametrize("code", [0, 1, 143])
def test_how_a_service_ends_when_it_is_stopped_is_no_failure(code: int) -> None:
    state = replace(end(end(running(), 0, 0), 1, 0), reason=StopReason.ROLES_DONE.value)
    state = end(end(state, 2, code, stopped=True), 3, 1)

    assert (outcome.determine_outcome(state)[0], state.cause) == (RunPhase.SUCCEEDED, None)


def test_a_service_that_fails_early_ends_the_run_and_is_the_cause() -> None:
    state = end(running(), 2, 3)
    action = decide(state)

    assert action == next_action.EndAttempt(reason=StopReason.PEER_FAILED)
    assert state.cause is not None
    assert state.label_cause(state.cause).node == "n1 (server)"


def test_a_service_that_ends_with_0_early_ends_nothing() -> None:
    assert decide(end(end(running(), 2, 0), 3, 0)) is None
