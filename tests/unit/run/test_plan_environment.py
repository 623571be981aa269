"""What a worker gets from the launcher, whole: every variable and every argument, for each way to start."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.config.spec import ClusterSpec, Framework, HostSpec, JobSpec, NetworkSpec
from clusterctl.errors import RefusedError
from clusterctl.plan import environment, layout, rendezvous
from clusterctl.plan import launch as planning

RUN = environment.RunIdentity(run="digits-ab12", attempt=2, max_restarts=3)
HOSTS = (HostSpec(name="a", host="a", gpus=2), HostSpec(name="b", host="b", gpus=1))
ANSWERS = {
    "a": rendezvous.NodeFacts(node="a", addresses=(("eth0", "10.0.0.1"),), cores=32, netns_id=("1", "1")),
    "b": rendezvous.NodeFacts(node="b", addresses=(("ens7", "10.0.0.2"),), cores=9, netns_id=("2", "2")),
}
WHERE = rendezvous.Rendezvous(
    master_addr="10.0.0.1", addresses={"a": "10.0.0.1", "b": "10.0.0.2"}, interfaces={"a": "eth0", "b": "ens7"}
)
OF_THE_LAST_RANK = {
    "RANK": "2",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "ROLE_RANK": "2",
    "ROLE_WORLD_SIZE": "3",
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "digits-ab12",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
    "CLUSTERCTL_RUN_ID": "digits-ab12",
    "CLUSTERCTL_ATTEMPT": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "41000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "OMP_NUM_THREADS": "9",
    "GLOO_SOCKET_IFNAME": "ens7",
    "TP_SOCKET_IFNAME": "ens7",
    "NCCL_SOCKET_IFNAME": "=ens7",
}


def spec_of(*hosts: HostSpec, **more: Any) -> ClusterSpec:
    job = JobSpec(script="t.py", **more.pop("job", {}))
    return ClusterSpec(name="digits", path="/w/cluster.yaml", hosts=hosts or HOSTS, job=job, **more)


def plan_of(spec: ClusterSpec, identity: environment.RunIdentity = RUN, **options: Any) -> planning.LaunchPlan:
    entries = layout.assign_ranks(spec.worker_hosts, {})
    ports = {e.host.name: [41000 + i for i, _ in enumerate(rendezvous.list_requested_ports(spec, e))] for e in entries}
    known = {"answers": ANSWERS, "where": WHERE, "ports": ports, **options}
    return planning.plan_launch(spec, identity, entries, known["answers"], known["where"], known["ports"])


def envs(plan: planning.LaunchPlan) -> list[dict[str, str]]:
    return [dict(worker.env) for node in plan.nodes for worker in node.workers]


def test_a_worker_gets_what_torchrun_gives_and_where_to_meet() -> None:
    plan = plan_of(spec_of())

    assert envs(plan)[2] == OF_THE_LAST_RANK
    assert (plan.run, plan.attempt, plan.world_size) == ("digits-ab12", 2, 3)
    assert (plan.master_addr, plan.master_port) == ("10.0.0.1", 41000)
    assert [(n.node, n.node_rank, n.address, n.ranks) for n in plan.nodes] == [
        ("a", 0, "10.0.0.1", (0, 1)),
        ("b", 1, "10.0.0.2", (2,)),
    ]
    assert [(w.rank, w.local_rank) for n in plan.nodes for w in n.workers] == [(0, 0), (1, 1), (2, 0)]


def test_what_differs_on_another_rank() -> None:
    first, second, last = envs(plan_of(spec_of()))
    own = {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "NODE_RANK": "0", "OMP_NUM_THREADS": "16"}
    net = {"GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}

    assert second == {**last, **own, **net, "RANK": "1", "ROLE_RANK": "1", "LOCAL_RANK": "1"}
    assert first == {**second, "RANK": "0", "ROLE_RANK": "0", "LOCAL_RANK": "0"}


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(32, 2, "16"), (9, 2, "4"), (3, 4, "1"), (0, 1, "1")], ids=str
)
def test_threads_are_the_cores_shared_out(cores: int, workers: int, threads: str) -> None:
    host = HostSpec(name="a", host="a", gpus=0, workers=workers)
    known = {"a": rendezvous.NodeFacts(node="a", cores=cores)}

    assert {env["OMP_NUM_THREADS"] for env in envs(plan_of(spec_of(host), answers=known))} == {threads}


def test_a_node_that_said_nothing_yet_is_planned_without_its_cores_and_networks() -> None:
    env = envs(plan_of(spec_of(), answers={}))[2]

    assert env == {name: value for name, value in OF_THE_LAST_RANK.items() if name != "OMP_NUM_THREADS"}


def test_a_dry_run_knows_neither_place_nor_port() -> None:
    plan = plan_of(spec_of(), where=None, ports={}, answers={})
    unknown = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"}
    unknown |= {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}

    assert envs(plan)[2] == {name: value for name, value in OF_THE_LAST_RANK.items() if name not in unknown}
    assert (plan.master_addr, plan.master_port) == (None, None)


def test_a_dry_run_shows_the_addresses_and_the_port_of_the_file() -> None:
    hosts = [HostSpec(name="a", host="a", gpus=1, internal_ip="10.9.0.1"), HostSpec(name="b", host="b", gpus=1)]
    plan = plan_of(spec_of(*hosts, network=NetworkSpec(master_port=29500)), where=None, ports={})

    assert [node.address for node in plan.nodes] == ["10.9.0.1", None]
    assert plan.master_port == 29500
    assert {env["MASTER_PORT"] for env in envs(plan)} == {"29500"}


def test_a_checkpoint_to_resume_from_is_handed_on() -> None:
    identity = environment.RunIdentity(run="r", resume_from="ckpt/step-7")

    assert [env["CLUSTERCTL_RESUME_FROM"] for env in envs(plan_of(spec_of(), identity))] == ["ckpt/step-7"] * 3
    assert {env["TORCHELASTIC_RESTART_COUNT"] for env in envs(plan_of(spec_of(), identity))} == {"0"}


def test_names_that_only_a_launcher_may_set_win_over_the_user() -> None:
    env = envs(plan_of(spec_of(env={"RANK": "7", "MASTER_ADDR": "elsewhere", "PYTHONUNBUFFERED": "0"})))[2]

    assert (env["RANK"], env["MASTER_ADDR"], env["PYTHONUNBUFFERED"]) == ("2", "10.0.0.1", "0")


@pytest.mark.parametrize(
    ("addresses", "alone"),
    [
        pytest.param([("eth0", "10.0.0.1")], True, id="one network"),
        pytest.param([("eth0", "10.0.0.1"), ("eth0", "fd00::1")], True, id="one network with two addresses"),
        pytest.param(
            [("eth0", "10.0.0.1"), ("docker0", "172.17.0.1"), ("br-1", "172.18.0.1")], True, id="virtual ones"
        ),
        pytest.param([("eth0", "10.0.0.1"), ("eth1", "fe80::1%eth1")], True, id="one with a link-local address alone"),
        pytest.param([("eth0", "10.0.0.1"), ("eth1", "169.254.0.1")], True, id="one without a router"),
        pytest.param([("eth0", "10.0.0.1"), ("eth1", "10.1.0.1")], False, id="two networks"),
    ],
)
def test_nccl_is_told_its_interface_only_where_there_is_no_choice(
    addresses: list[tuple[str, str]], alone: bool
) -> None:
    known = {"a": rendezvous.NodeFacts(node="a", addresses=tuple(addresses))}

    env = envs(plan_of(spec_of(HOSTS[0]), answers=known))[0]

    assert ("NCCL_SOCKET_IFNAME" in env) is alone
    assert env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_without_an_interface_none_is_named() -> None:
    where = rendezvous.Rendezvous(master_addr="10.0.0.1", addresses=WHERE.addresses, interfaces={"a": "", "b": "ens7"})

    first, _, last = envs(plan_of(spec_of(), where=where))

    assert not {name for name in first if name.endswith("IFNAME")}
    assert last["GLOO_SOCKET_IFNAME"] == "ens7"


TWO = (("eth0", "10.0.0.1"), ("fab0", "10.9.0.1"), ("docker0", "172.17.0.1"))


def interfaces_of(
    logins: dict[str, dict[str, str]], written: dict[str, str], named: str | None, *, rdma: bool = False
) -> dict[str, tuple[str | None, ...]]:
    """What NCCL, Gloo and TensorPipe of each node will be told, whoever tells them."""
    spec = spec_of(env=written, network=NetworkSpec(interface=named))
    answers = {
        name: rendezvous.NodeFacts(node=name, addresses=TWO, login_env=logins.get(name, {}), has_rdma=rdma)
        for name in "ab"
    }
    where = rendezvous.Rendezvous(master_addr="x", addresses=WHERE.addresses, interfaces={"a": "eth0", "b": "eth0"})
    plan = plan_of(spec, answers=answers, where=where)
    found = {node.node: {**answers[node.node].login_env, **node.workers[0].env} for node in plan.nodes}
    return {n: tuple(env.get(f"{of}_SOCKET_IFNAME") for of in ("NCCL", "GLOO", "TP")) for n, env in found.items()}


N, G = "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(
    ("logins", "written", "named", "told"),
    [
        pytest.param({}, {}, None, (None, "eth0", "eth0"), id="route"),
        pytest.param({}, {}, "fab0", ("=fab0", "fab0", "fab0"), id="named"),
        pytest.param({N: "fab0"}, {}, None, ("fab0", "fab0", "fab0"), id="login of nccl"),
        pytest.param({N: "=fab0:1"}, {}, None, ("=fab0:1", "fab0", "fab0"), id="login of nccl exactly"),
        pytest.param({N: "^docker0,eth"}, {}, None, ("^docker0,eth", "fab0", "fab0"), id="login of nccl by exclusion"),
        pytest.param({N: "eth,fab"}, {}, None, ("eth,fab", "eth0", "eth0"), id="login of nccl with the route in it"),
        pytest.param({G: "fab0"}, {}, None, ("=fab0", "fab0", "fab0"), id="login of gloo"),
        pytest.param({N: "ib7"}, {}, None, ("=eth0", "eth0", "eth0"), id="login that names nothing"),
        pytest.param({N: "eth0"}, {}, "fab0", ("=fab0", "fab0", "fab0"), id="named over the login"),
        pytest.param({}, {N: "fab0"}, None, ("fab0", "fab0", "fab0"), id="env of nccl"),
        pytest.param({}, {G: "fab0"}, "eth0", ("=fab0", "fab0", "fab0"), id="env over named"),
        pytest.param({}, {N: "^docker0"}, "fab0", ("^docker0", "fab0", "fab0"), id="env that leaves the named one"),
        pytest.param({N: "eth0"}, {G: "fab0"}, None, ("=fab0", "fab0", "fab0"), id="env over the login"),
        pytest.param({N: "fab0", G: "eth0"}, {}, None, ("fab0", "eth0", "fab0"), id="login that says both"),
    ],
)
@pytest.mark.parametrize("rdma", [False, True], ids=["ethernet", "rdma"])
def test_the_three_libraries_use_one_network_whoever_names_it(
    logins: dict[str, str], written: dict[str, str], named: str | None, told: tuple[str, ...], rdma: bool
) -> None:
    found = interfaces_of({"a": logins, "b": logins}, written, named, rdma=rdma)

    assert found == {"a": told, "b": told}


def test_the_login_of_one_node_alone_leads_no_job_to_two_networks() -> None:
    found = interfaces_of({"a": {N: "fab0"}}, {}, None)

    assert found == {"a": ("=eth0", "eth0", "eth0"), "b": (None, "eth0", "eth0")}


def test_what_a_login_sets_stays_and_what_it_loses_is_named() -> None:
    login = {"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "", "TORCH_FR_BUFFER_SIZE": "9", N: "ib7"}
    login |= {"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "1", "KERAS_BACKEND": "jax"}
    answers = {**ANSWERS, "b": replace(ANSWERS["b"], login_env=login)}
    written = {"KERAS_BACKEND": "numpy"}
    plan = plan_of(spec_of(HOSTS[0], replace(HOSTS[1], gpus=(0,)), env=written), answers=answers)

    added = envs(plan)[2]

    assert not {"OMP_NUM_THREADS", "PYTHONUNBUFFERED", "TORCH_FR_BUFFER_SIZE"} & added.keys()
    assert added["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert plan.nodes[0].replaced_login_variables == ()
    assert plan.nodes[1].replaced_login_variables == (
        "NCCL_SOCKET_IFNAME=ib7 of its login is replaced by =ens7",
        "CUDA_DEVICE_ORDER=FASTEST_FIRST of its login is replaced by PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES=1 of its login is replaced by 0",
    )


# --- ports


@pytest.mark.parametrize(
    ("framework", "port", "wanted"),
    [
        pytest.param(Framework.AUTO, None, [(0,), ()], id="any free one"),
        pytest.param(Framework.AUTO, 29500, [(29500,), ()], id="the one of the file"),
        pytest.param(Framework.JAX, None, [(0, 0), ()], id="jax, one more for the coordinator"),
        pytest.param(Framework.JAX, 29500, [(29500, 0), ()], id="jax, whose coordinator takes any"),
        pytest.param(Framework.TENSORFLOW, None, [(0, 0, 0), (0,)], id="tensorflow, one more a worker"),
    ],
)
def test_the_ports_that_a_node_holds(framework: Framework, port: int | None, wanted: list[tuple[int, ...]]) -> None:
    spec = spec_of(job={"framework": framework}, network=NetworkSpec(master_port=port))

    assert [rendezvous.list_requested_ports(spec, entry) for entry in layout.assign_ranks(HOSTS, {})] == wanted


# --- frameworks


def test_keras_on_torch_is_told_its_backend() -> None:
    assert envs(plan_of(spec_of(job={"framework": Framework.KERAS})))[2] == {
        **OF_THE_LAST_RANK,
        "KERAS_BACKEND": "torch",
    }


@pytest.mark.parametrize(
    ("gpus", "workers", "devices"),
    [
        pytest.param(2, None, ["0", "1"], id="one device a worker"),
        pytest.param((3, 5), None, ["3", "5"], id="the chosen ones"),
        pytest.param((3, 5), 1, ["3,5"], id="all of them for a lone worker"),
        pytest.param(2, 3, ["0", "1", "0"], id="more workers than devices"),
        pytest.param(0, 2, [None, None], id="no device"),
    ],
)
@pytest.mark.parametrize("framework", [Framework.TENSORFLOW, Framework.JAX])
def test_a_framework_that_would_take_all_devices_sees_one(
    framework: Framework, gpus: int | tuple[int, ...], workers: int | None, devices: list[str | None]
) -> None:
    host = HostSpec(name="a", host="a", gpus=gpus, workers=workers)

    plan = plan_of(spec_of(host, job={"framework": framework}))

    assert [env.get("CUDA_VISIBLE_DEVICES") for env in envs(plan)] == devices


def test_jax_is_told_its_coordinator_in_every_dialect() -> None:
    env = envs(plan_of(spec_of(job={"framework": Framework.JAX})))[2]

    assert {name: env[name] for name in env if "JAX" in name or "KERAS" in name} == {
        "KERAS_BACKEND": "jax",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:41001",
        "JAX_COORDINATOR_PORT": "41001",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "10.0.0.1:41001",
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "3",
        "KERAS_DISTRIBUTION_PROCESS_ID": "2",
    }


def test_addresses_of_version_6_are_bracketed_before_a_port() -> None:
    where = rendezvous.Rendezvous(
        master_addr="fd00::1", addresses={"a": "fd00::1", "b": "10.0.0.2"}, interfaces=WHERE.interfaces
    )

    jax = envs(plan_of(spec_of(job={"framework": Framework.JAX}), where=where))[0]
    tensorflow = envs(plan_of(spec_of(job={"framework": Framework.TENSORFLOW}), where=where))[2]

    assert jax["JAX_COORDINATOR_ADDRESS"] == "[fd00::1]:41001"
    assert (jax["JAX_COORDINATOR_PORT"], jax["MASTER_ADDR"]) == ("41001", "fd00::1")
    assert json.loads(tensorflow["TF_CONFIG"]) == {
        "cluster": {"worker": ["[fd00::1]:41001", "[fd00::1]:41002", "10.0.0.2:41000"]},
        "task": {"type": "worker", "index": 2},
    }


@pytest.mark.parametrize("framework", [Framework.TENSORFLOW, Framework.JAX])
def test_a_dry_run_leaves_frameworks_without_addresses(framework: Framework) -> None:
    env = envs(plan_of(spec_of(job={"framework": framework}), where=None, ports={}))[0]

    assert not {name for name in env if "JAX" in name or name == "TF_CONFIG"}


# --- addresses


@pytest.mark.parametrize(
    ("host", "known", "interface", "expected"),
    [
        pytest.param({"internal_ip": "10.5.0.1"}, {}, "ib0", "10.5.0.1", id="what the file says"),
        pytest.param({}, {"addresses": [("ib0", "fd00::1"), ("ib0", "10.6.0.1")]}, "ib0", "10.6.0.1", id="ib0's, of 4"),
        pytest.param({}, {"addresses": [("ib0", "fd00::1")]}, "ib0", "fd00::1", id="ib0's only one"),
        pytest.param(
            {}, {"addresses": [("eth0", "fd00::1"), ("eth1", "10.7.0.1")]}, None, "10.7.0.1", id="of version 4"
        ),
        pytest.param({}, {"addresses": [("eth0", "fd00::1")]}, None, "fd00::1", id="of version 6 where there is no 4"),
        pytest.param(
            {},
            {"addresses": [("docker0", "172.17.0.1"), ("eth0", "10.0.0.1")], "reached_at": "172.17.0.1"},
            None,
            "172.17.0.1",
            id="a virtual one that the head came by",
        ),
    ],
)
def test_an_address_before_routes_are_known(
    host: dict[str, Any], known: dict[str, Any], interface: str | None, expected: str
) -> None:
    answer = rendezvous.NodeFacts(node="a", **{**known, "addresses": tuple(known.get("addresses", ()))})

    assert rendezvous.guess_address(HostSpec(name="a", host="a", **host), answer, interface) == expected


@pytest.mark.parametrize(
    ("addresses", "there"),
    [
        pytest.param((), "none", id="no interface"),
        pytest.param((("eth1", "10.0.0.1"), ("eth0", "10.0.0.2"), ("eth0", "fd00::1")), "eth0, eth1", id="two"),
    ],
)
def test_an_interface_that_is_not_there_is_named_with_those_that_are(
    addresses: tuple[tuple[str, str], ...], there: str
) -> None:
    with pytest.raises(RefusedError) as caught:
        rendezvous.guess_address(HOSTS[0], rendezvous.NodeFacts(node="a", addresses=addresses), "ib0")

    assert str(caught.value) == f"a: no interface `ib0` with an address (it has: {there})"
    assert caught.value.hint == "set `network.interface` to an interface that every node has, or remove it"


def test_the_master_address_of_the_file_is_taken_as_it_is() -> None:
    host = HostSpec(name="a", host="a", internal_ip="10.9.9.9")
    route = rendezvous.Route(source="10.0.0.1", interface="eth0")

    assert rendezvous.choose_master_address(host, "x", [route]) == "10.9.9.9"
    assert rendezvous.choose_master_address(HOSTS[0], "x", [route]) == "10.0.0.1"
    assert rendezvous.choose_master_address(HOSTS[0], "x", []) == "x"


def test_where_each_node_binds() -> None:
    hosts = [*HOSTS, HostSpec(name="c", host="c", gpus=1, internal_ip="10.8.0.3"), HostSpec(name="d", host="d", gpus=1)]
    answers = {
        **ANSWERS,
        "c": rendezvous.NodeFacts(node="c", addresses=(("eth0", "10.0.0.3"), ("ib0", "10.8.0.3"))),
        "d": rendezvous.NodeFacts(node="d", addresses=(("eth9", "10.0.0.4"),)),
    }
    routes = {
        "b": rendezvous.Route(source="10.0.0.2", interface="ens7"),
        "c": rendezvous.Route(source="10.0.0.3", interface="eth0"),
        "d": rendezvous.Route(source="192.0.2.4", interface="nat0"),
    }

    found = rendezvous.plan_rendezvous(layout.assign_ranks(hosts, {}), answers, "10.0.0.1", routes)

    assert found == rendezvous.Rendezvous(
        master_addr="10.0.0.1",
        addresses={"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.8.0.3", "d": "192.0.2.4"},
        interfaces={"a": "eth0", "b": "ens7", "c": "ib0", "d": "nat0"},
    )


def test_a_node_without_a_route_is_refused_with_the_remedy() -> None:
    with pytest.raises(RefusedError) as caught:
        rendezvous.plan_rendezvous(layout.assign_ranks(HOSTS, {}), ANSWERS, "10.0.0.1", {})

    assert str(caught.value) == "b has no route to 10.0.0.1, where rank 0 listens (a)"
    hint = "set `internal_ip` of the hosts, or `network.interface`, to the network that they share"
    assert caught.value.hint == hint


def test_nodes_that_share_their_loopback_meet_there() -> None:
    assert rendezvous.plan_loopback_rendezvous(layout.assign_ranks(HOSTS, {})) == rendezvous.Rendezvous(
        master_addr="127.0.0.1", addresses={"a": "127.0.0.1", "b": "127.0.0.1"}, interfaces={"a": "lo", "b": "lo"}
    )


# --- GPUs, and the printed plan


@pytest.mark.parametrize(
    ("gpus", "found", "claimed"),
    [
        pytest.param((0, 2), 8, (0, 2), id="those of the file"),
        pytest.param(3, 8, (0, 1, 2), id="the first of them"),
        pytest.param(None, 2, (0, 1), id="all that are found"),
        pytest.param(None, None, (), id="none that is known"),
        pytest.param(0, 8, (), id="none that is wanted"),
    ],
)
def test_the_gpus_that_a_run_claims(gpus: Any, found: int | None, claimed: tuple[int, ...]) -> None:
    host = HostSpec(name="a", host="a", gpus=gpus)

    assert layout.list_claimed_gpus(host, found) == claimed
    assert layout.assign_ranks([host], {"a": found})[0].gpus == claimed


def test_a_printed_plan_has_its_published_shape() -> None:
    spec = spec_of(HOSTS[0], secrets={"TOKEN": "s3cr3t"})
    plan = plan_of(spec)

    assert planning.plan_to_json(plan, spec.secrets) == {
        "run": "digits-ab12",
        "world_size": 2,
        "master_addr": "10.0.0.1",
        "master_port": 41000,
        "nodes": [
            {
                "node": "a",
                "node_rank": 0,
                "address": "10.0.0.1",
                "workers": [
                    {"rank": rank, "local_rank": rank, "argv": [None, "t.py"], "env": {**env, "TOKEN": "***"}}
                    for rank, env in enumerate(envs(plan))
                ],
            }
        ],
    }


def test_a_plan_that_only_the_nodes_could_make_says_so() -> None:
    hosts = (HostSpec(name="a", host="a", internal_ip="10.0.0.1"), HostSpec(name="b", host="b", gpus=2))
    spec = spec_of(*hosts, network=NetworkSpec(master_port=29500))

    assert layout.assign_ranks_from_file(spec) is None
    plan = planning.partial_plan_to_json(spec, RUN)

    assert {name: plan[name] for name in ("run", "world_size", "master_addr", "master_port")} == {
        "run": "digits-ab12",
        "world_size": None,
        "master_addr": None,
        "master_port": 29500,
    }
    asked, known = ([(w["rank"], w["local_rank"]) for w in node["workers"]] for node in plan["nodes"])
    assert (asked, known) == ([(None, None)], [(None, 0), (None, 1)])
    env = plan["nodes"][1]["workers"][1]["env"]
    assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"], env["RANK"], env["WORLD_SIZE"]) == ("1", "2", None, None)


CACHED = replace(ANSWERS["b"], state_root="/var/tmp/clusterctl-0")


@pytest.mark.parametrize(
    ("facts", "env", "folder"),
    [
        pytest.param(CACHED, {}, None, id="a local home keeps its downloads"),
        pytest.param(
            replace(CACHED, has_network_home=True),
            {},
            "/var/tmp/clusterctl-0/caches/downloads",
            id="a home on a server",
        ),
        pytest.param(replace(CACHED, has_network_home=True), {"HF_HOME": "/x"}, None, id="the cluster file"),
        pytest.param(
            replace(CACHED, has_network_home=True, login_env={"HF_HUB_CACHE": "/x"}), {}, None, id="the login"
        ),
    ],
)
def test_downloads_are_on_a_disk_of_the_node(
    facts: rendezvous.NodeFacts, env: dict[str, str], folder: str | None
) -> None:
    host = HostSpec(name="b", host="b", python="/e/py1/bin/python")
    found = environment.build_shared_environment(
        spec_of(host, job={"cache": "node"}, env=env),
        RUN,
        layout.NodeLayout(host=host, node_rank=0, ranks=(0,), gpus=()),
        facts,
    )

    assert found.get("HF_HUB_CACHE") == folder
    assert found["TRITON_CACHE_DIR"] == "/var/tmp/clusterctl-0/caches/py1-cpu/triton_cache"
