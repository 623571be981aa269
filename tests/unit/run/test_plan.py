"""The launch plan: ranks, rendezvous, environment, argv."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.linux import spawn
from clusterctl.config.spec import ClusterSpec, Framework, HostSpec, JobSpec, NetworkSpec
from clusterctl.errors import RefusedError
from clusterctl.plan import environment, layout, rendezvous
from clusterctl.plan import launch as planning

IDENTITY = environment.RunIdentity(run="digits-ab12", attempt=2, max_restarts=3)


def spec_of(*hosts: HostSpec, job: JobSpec | None = None, **more: object) -> ClusterSpec:
    return ClusterSpec(
        name="digits", path="/w/cluster.yaml", hosts=hosts, job=job or JobSpec(script="train.py"), **more
    )  # type: ignore[arg-type]


def answer(node: str, *addresses: tuple[str, str], **more: object) -> rendezvous.NodeFacts:
    return rendezvous.NodeFacts(node=node, addresses=addresses, netns_id=(node, node), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lo", "docker0", "br-1f", "cni0", "tunl0", "kube-ipvs0", "vnet3", "virbr0"])
def test_workers_meet_by_no_interface_that_stays_on_its_machine(name: str) -> None:
    known = answer("a", (name, "10.1.0.1"), ("eth0", "10.0.0.1"))

    assert rendezvous.guess_address(HostSpec(name="a", host="a"), known, None) == "10.0.0.1"


def plan_of(spec: ClusterSpec, **answers: rendezvous.NodeFacts) -> planning.LaunchPlan:
    entries = layout.assign_ranks(spec.worker_hosts, {})
    known = {
        h.name: answers.get(h.name, answer(h.name, ("eth0", f"10.0.0.{i + 1}")))
        for i, h in enumerate(spec.worker_hosts)
    }
    master = known[spec.worker_hosts[0].name].addresses[0][1]
    routes = {n: rendezvous.Route(source=a.addresses[0][1], interface=a.addresses[0][0]) for n, a in known.items()}
    where = rendezvous.plan_rendezvous(entries, known, master, routes)
    ports = {e.host.name: [41000 + i for i, _ in enumerate(rendezvous.list_requested_ports(spec, e))] for e in entries}
    return planning.plan_launch(spec, IDENTITY, entries, known, where, ports)


def test_hosts_that_turn_out_to_have_no_gpu_are_named_unless_the_file_says_so() -> None:
    hosts = [
        HostSpec(name="auto", host="a"),
        HostSpec(name="unknown", host="b"),
        HostSpec(name="with", host="c"),
        HostSpec(name="none_meant", host="d", gpus=0),
        HostSpec(name="workers_said", host="e", workers=2),
        HostSpec(name="not_reached", host="f"),
    ]
    found = {"auto": 0, "unknown": None, "with": 8, "none_meant": 0, "workers_said": 0}

    assert layout.list_cpu_only_hosts(hosts, found) == ["auto", "unknown"]


counts = st.lists(st.integers(1, 16), min_size=1, max_size=40)


@given(counts)
def test_ranks_are_contiguous_in_host_order_whatever_the_counts(sizes: list[int]) -> None:
    hosts = [HostSpec(name=f"n{i}", host=f"n{i}", gpus=size) for i, size in enumerate(sizes)]

    entries = layout.assign_ranks(hosts, {})

    assert [r for e in entries for r in e.ranks] == list(range(sum(sizes)))
    assert [e.host.name for e in entries] == [h.name for h in hosts]


@given(counts)
def test_all_workers_agree_on_the_rendezvous_and_on_the_world(sizes: list[int]) -> None:
    plan = plan_of(spec_of(*[HostSpec(name=f"n{i}", host=f"n{i}", gpus=size) for i, size in enumerate(sizes)]))

    seen = {(w.env["MASTER_ADDR"], w.env["MASTER_PORT"], w.env["WORLD_SIZE"]) for n in plan.nodes for w in n.workers}

    assert seen == {("10.0.0.1", "41000", str(sum(sizes)))}


@given(counts)
def test_local_ranks_count_up_on_every_node(sizes: list[int]) -> None:
    plan = plan_of(spec_of(*[HostSpec(name=f"n{i}", host=f"n{i}", gpus=size) for i, size in enumerate(sizes)]))

    for node, size in zip(plan.nodes, sizes, strict=True):
        assert [w.env["LOCAL_RANK"] for w in node.workers] == [str(i) for i in range(size)]
        assert {w.env["LOCAL_WORLD_SIZE"] for w in node.workers} == {str(size)}


@pytest.mark.parametrize(
    ("host", "found", "count"),
    [
        pytest.param(HostSpec(name="a", host="a", gpus=4), None, 4, id="one a GPU"),
        pytest.param(HostSpec(name="a", host="a", gpus=(0, 2)), None, 2, id="one an index"),
        pytest.param(HostSpec(name="a", host="a", gpus=0), None, 1, id="one where there is no GPU"),
        pytest.param(HostSpec(name="a", host="a", gpus=8, workers=2), None, 2, id="what the file says"),
        pytest.param(HostSpec(name="a", host="a"), 8, 8, id="what the node turns out to have"),
        pytest.param(HostSpec(name="a", host="a"), 0, 1, id="auto on a node without a GPU"),
        pytest.param(HostSpec(name="a", host="a"), None, None, id="unknown until the node was asked"),
    ],
)
def test_worker_count_is(host: HostSpec, found: int | None, count: int | None) -> None:
    assert layout.count_workers(host, found) == count


def test_a_host_that_declares_nothing_has_a_rank_for_each_gpu_that_was_found() -> None:
    hosts = (HostSpec(name="a", host="a"), HostSpec(name="b", host="b"), HostSpec(name="c", host="c", gpus=2))

    entries = layout.assign_ranks(hosts, {"a": 3, "b": None})

    assert [entry.ranks for entry in entries] == [(0, 1, 2), (3,), (4, 5)]
    assert [entry.gpus for entry in entries] == [(0, 1, 2), (), (0, 1)]


def test_a_plain_count_leaves_cuda_visible_devices_alone() -> None:
    worker = plan_of(spec_of(HostSpec(name="a", host="a", gpus=2))).nodes[0].workers[0]

    assert "CUDA_VISIBLE_DEVICES" not in worker.env


def test_chosen_devices_are_made_visible() -> None:
    worker = plan_of(spec_of(HostSpec(name="a", host="a", gpus=(0, 2)))).nodes[0].workers[1]

    assert worker.env["CUDA_VISIBLE_DEVICES"] == "0,2"


@pytest.mark.parametrize(
    ("host", "order"),
    [
        pytest.param(HostSpec(name="a", host="a", gpus=2), "PCI_BUS_ID", id="a count"),
        pytest.param(HostSpec(name="a", host="a", gpus=(0, 2)), "PCI_BUS_ID", id="chosen devices"),
        pytest.param(
            HostSpec(name="a", host="a", gpus=1, env={"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}),
            "FASTEST_FIRST",
            id="the user's own",
        ),
        pytest.param(HostSpec(name="a", host="a", gpus=0), None, id="no GPU"),
    ],
)
def test_cuda_counts_devices_as_the_driver_does(host: HostSpec, order: str | None) -> None:
    assert plan_of(spec_of(host)).nodes[0].workers[0].env.get("CUDA_DEVICE_ORDER") == order


@pytest.mark.parametrize(
    ("host", "env"),
    [
        pytest.param(HostSpec(name="a", host="a", gpus=2), {}, id="a count"),
        pytest.param(HostSpec(name="a", host="a", gpus=(0, 2)), {"HIP_VISIBLE_DEVICES": "0,2"}, id="chosen devices"),
        pytest.param(
            HostSpec(name="a", host="a", gpus=(0, 2), env={"HIP_VISIBLE_DEVICES": "2,0"}),
            {"HIP_VISIBLE_DEVICES": "2,0"},
            id="the user's own",
        ),
    ],
)
def test_devices_of_amd_are_chosen_in_the_words_of_hip(host: HostSpec, env: dict[str, str]) -> None:
    plan = plan_of(spec_of(host), a=answer("a", ("eth0", "10.0.0.1"), vendor="amd"))

    told = {name: value for name, value in plan.nodes[0].workers[1].env.items() if "DEVICE" in name}

    assert told == env


def test_each_process_of_jax_gets_a_device_of_amd_of_its_own() -> None:
    spec = spec_of(HostSpec(name="a", host="a", gpus=2), job=JobSpec(script="train.py", framework=Framework.JAX))

    plan = plan_of(spec, a=answer("a", ("eth0", "10.0.0.1"), vendor="amd"))

    assert [worker.env["HIP_VISIBLE_DEVICES"] for worker in plan.nodes[0].workers] == ["0", "1"]
    assert "CUDA_VISIBLE_DEVICES" not in plan.nodes[0].workers[0].env


def test_what_the_user_set_wins_over_our_defaults() -> None:
    host = HostSpec(name="a", host="a", gpus=1, env={"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "ib0"})

    env = plan_of(spec_of(host)).nodes[0].workers[0].env

    assert (env["OMP_NUM_THREADS"], env["GLOO_SOCKET_IFNAME"]) == ("7", "ib0")


def test_the_env_of_a_host_wins_over_the_env_of_the_file() -> None:
    host = HostSpec(name="a", host="a", gpus=1, env={"X": "host"})

    assert plan_of(spec_of(host, env={"X": "file"})).nodes[0].workers[0].env["X"] == "host"


def test_nccl_is_left_alone_where_there_is_rdma() -> None:
    plan = plan_of(spec_of(HostSpec(name="a", host="a", gpus=1)), a=answer("a", ("eth0", "10.0.0.1"), has_rdma=True))

    assert "NCCL_SOCKET_IFNAME" not in plan.nodes[0].workers[0].env


def test_nccl_is_left_alone_where_several_networks_could_serve_it() -> None:
    two = answer("a", ("eth0", "10.0.0.1"), ("eth1", "10.1.0.1"))

    assert (
        "NCCL_SOCKET_IFNAME"
        not in plan_of(spec_of(HostSpec(name="a", host="a", gpus=1)), a=two).nodes[0].workers[0].env
    )


def test_each_node_gets_its_own_interface_by_exact_name() -> None:
    spec = spec_of(HostSpec(name="a", host="a", gpus=1), HostSpec(name="b", host="b", gpus=1))

    plan = plan_of(spec, a=answer("a", ("eth0", "10.0.0.1")), b=answer("b", ("ens7", "10.0.0.2")))

    assert [n.workers[0].env["GLOO_SOCKET_IFNAME"] for n in plan.nodes] == ["eth0", "ens7"]
    assert [n.workers[0].env["NCCL_SOCKET_IFNAME"] for n in plan.nodes] == ["=eth0", "=ens7"]


def test_nodes_in_one_network_namespace_meet_on_loopback() -> None:
    same = [rendezvous.NodeFacts(node=n, netns_id=("boot", "net")) for n in "ab"]

    assert rendezvous.can_use_loopback(same)


def test_nodes_of_one_machine_in_two_namespaces_do_not() -> None:
    assert not rendezvous.can_use_loopback([rendezvous.NodeFacts(node=n, netns_id=("boot", n)) for n in "ab"])


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        pytest.param(answer("a", ("docker0", "172.17.0.1"), ("eth0", "10.0.0.1")), "10.0.0.1", id="never docker0"),
        pytest.param(
            answer("a", ("eth0", "10.0.0.1"), ("eth1", "10.9.0.1"), reached_at="10.9.0.1"),
            "10.9.0.1",
            id="where the head reached it",
        ),
        pytest.param(
            answer("a", ("eth0", "10.0.0.1"), reached_at="203.0.113.7"), "10.0.0.1", id="not a translated address"
        ),
        pytest.param(answer("a", ("eth0", "fe80::1"), ("eth0", "fd00::1")), "fd00::1", id="never one of a link alone"),
        pytest.param(
            answer("a", ("eth0", "fe80::1"), ("eth1", "fd00::1"), reached_at="fe80::1"),
            "fd00::1",
            id="not where the head reached it on a link",
        ),
        pytest.param(
            answer("a", ("eth0", "169.254.0.1"), ("eth1", "fd00::1")), "fd00::1", id="rather one of all links"
        ),
        pytest.param(
            answer("a", ("eth0", "fe80::1"), ("eth0", "169.254.0.1")), "169.254.0.1", id="a cable between two"
        ),
        pytest.param(answer("a", ("eth0", "fe80::1")), None, id="nothing that another node could dial"),
        pytest.param(answer("a"), None, id="none at all"),
    ],
)
def test_provisional_address_is(known: rendezvous.NodeFacts, expected: str | None) -> None:
    assert rendezvous.guess_address(HostSpec(name="a", host="a"), known, None) == expected


def test_a_named_interface_gives_an_address_that_is_known_beyond_its_link() -> None:
    known = answer("a", ("eth0", "10.0.0.1"), ("ib0", "fe80::7"), ("ib0", "fd00::7"))
    assert rendezvous.guess_address(HostSpec(name="a", host="a"), known, "ib0") == "fd00::7"


def test_a_named_interface_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(RefusedError, match=r"a: no interface `ib0`.*eth0"):
        rendezvous.guess_address(HostSpec(name="a", host="a"), answer("a", ("eth0", "10.0.0.1")), "ib0")


def test_the_master_address_is_the_one_that_most_others_route_to() -> None:
    routes = [rendezvous.Route(source="10.0.0.1", interface="eth0")] * 2 + [
        rendezvous.Route(source="10.9.0.1", interface="eth1"),
        None,
    ]

    assert rendezvous.choose_master_address(HostSpec(name="a", host="a"), "192.0.2.1", routes) == "10.0.0.1"


def test_the_master_address_is_never_a_loopback_one() -> None:
    routes = [rendezvous.Route(source="127.0.1.1", interface="lo")]

    assert rendezvous.choose_master_address(HostSpec(name="a", host="a"), "10.0.0.1", routes) == "10.0.0.1"


def test_a_node_without_a_route_to_rank_0_is_refused_by_name() -> None:
    hosts = [HostSpec(name="a", host="a", gpus=1), HostSpec(name="b", host="b", gpus=1)]
    known = {n: answer(n, ("eth0", "10.0.0.1")) for n in "ab"}

    with pytest.raises(RefusedError, match=r"b has no route to 10\.0\.0\.1"):
        rendezvous.plan_rendezvous(layout.assign_ranks(hosts, {}), known, "10.0.0.1", {"b": None})


@pytest.mark.parametrize(
    ("job", "argv"),
    [
        pytest.param(JobSpec(script="t.py", args=("--lr", "1")), ("{python}", "t.py", "--lr", "1"), id="script"),
        pytest.param(JobSpec(module="pkg.train"), (layout.PYTHON_PLACEHOLDER, "-m", "pkg.train"), id="module"),
        pytest.param(JobSpec(command=("./run", "$(id)"), args=("-x",)), ("./run", "$(id)", "-x"), id="command list"),
        pytest.param(
            JobSpec(command="echo $RANK", args=("a b",)),
            ("bash", "--norc", "-eo", "pipefail", "-c", "echo $RANK", "bash", "a b"),
            id="command string",
        ),
    ],
)
def test_argv_of_a(job: JobSpec, argv: tuple[str, ...]) -> None:
    assert planning.build_job_argv(job) == argv


def test_tensorflow_workers_know_each_other_by_held_ports() -> None:
    job = JobSpec(script="t.py", framework=Framework.TENSORFLOW)
    plan = plan_of(
        spec_of(
            HostSpec(name="a", host="a", workers=2, gpus=0), HostSpec(name="b", host="b", workers=1, gpus=0), job=job
        )
    )

    config = json.loads(plan.nodes[1].workers[0].env["TF_CONFIG"])

    assert config == {
        "cluster": {"worker": ["10.0.0.1:41001", "10.0.0.1:41002", "10.0.0.2:41000"]},
        "task": {"type": "worker", "index": 2},
    }


def test_jax_gets_a_coordinator_on_a_port_of_its_own() -> None:
    plan = plan_of(
        spec_of(HostSpec(name="a", host="a", workers=2, gpus=0), job=JobSpec(script="t.py", framework=Framework.JAX))
    )

    env = plan.nodes[0].workers[1].env

    assert (env["JAX_COORDINATOR_ADDRESS"], env["JAX_PROCESS_ID"], env["JAX_NUM_PROCESSES"]) == (
        "10.0.0.1:41001",
        "1",
        "2",
    )


def test_the_printed_plan_hides_secrets() -> None:
    spec = spec_of(HostSpec(name="a", host="a", gpus=1), secrets={"TOKEN": "s3cr3t"})

    text = json.dumps(planning.plan_to_json(plan_of(spec), spec.secrets))

    assert "s3cr3t" not in text
    assert '"TOKEN": "***"' in text


def test_a_dry_run_leaves_open_what_only_a_node_can_tell() -> None:
    spec = spec_of(HostSpec(name="a", host="a", gpus=2))
    entries = layout.assign_ranks_from_file(spec)
    assert entries is not None

    shown = planning.plan_to_json(planning.plan_launch(spec, IDENTITY, entries, {}, None, {}), {})

    assert (shown["master_addr"], shown["master_port"], shown["nodes"][0]["address"]) == (None, None, None)
    assert shown["nodes"][0]["workers"][0]["argv"] == [None, "train.py"]


def test_a_dry_run_shows_the_interpreter_that_the_file_names() -> None:
    named = HostSpec(name="a", host="a", gpus=1, python=".venv/bin/python")
    spec = spec_of(named, HostSpec(name="b", host="b", gpus=1), job=JobSpec(module="t"))
    entries = layout.assign_ranks_from_file(spec)
    assert entries is not None

    shown = planning.plan_to_json(planning.plan_launch(spec, IDENTITY, entries, {}, None, {}), {})

    first, second = (node["workers"][0]["argv"] for node in shown["nodes"])
    assert (first, second) == ([".venv/bin/python", "-m", "t"], [None, "-m", "t"])


def test_the_restart_count_is_the_same_on_all_ranks() -> None:
    spec = spec_of(*[HostSpec(name=n, host=n, gpus=2) for n in "abc"], network=NetworkSpec(master_port=None))

    assert {w.env["TORCHELASTIC_RESTART_COUNT"] for n in plan_of(spec).nodes for w in n.workers} == {"2"}


def test_bash_names_the_variables_of_a_command_that_are_not_set() -> None:
    argv = planning.build_job_argv(JobSpec(command="true $GIVEN $DATA_DIR"), {"GIVEN"})
    done = subprocess.run(argv, env={}, capture_output=True, text=True, check=True)
    assert done.stderr == "clusterctl: `$DATA_DIR` is not set on this node: bash takes it as empty\n"
    assert subprocess.run(argv, env={"DATA_DIR": "/d"}, capture_output=True, text=True, check=True).stderr == ""


@pytest.mark.parametrize("by", ["command", "prologue"])
def test_the_bashrc_of_a_node_does_not_replace_the_env_of_the_file(tmp_path: Path, by: str) -> None:
    (tmp_path / ".bashrc").write_text("export HF_HOME=/data\n")
    env = {"PATH": os.defpath, "HOME": str(tmp_path), "SSH_CLIENT": "10.0.0.1 1 22", "HF_HOME": "/scratch"}
    argv = [*planning.STRICT_BASH, "echo $HF_HOME"]
    if by == "prologue":
        program = spawn.Program([b"sh", b"-c", b"echo $HF_HOME"], {}, prologue=b"true")
        argv = [word.decode() for word in spawn.build_command_line(program)]

    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout == "/scratch\n"
