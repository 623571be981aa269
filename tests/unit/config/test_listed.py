"""Hosts that are not written in the file: of an allocation, a list, a command."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clusterctl.config.loader import LoadedClusterFile
from clusterctl.config.sections.hostfiles_and_slurm import (
    HostListError,
    build_srun_command,
    is_srun_command,
    list_slurm_hosts,
    parse_hostfile,
)
from clusterctl.config.spec import TransportKind
from clusterctl.errors import ConfigError

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "gpu[01-02],big",
    "SLURM_JOB_CPUS_PER_NODE": "24(x2),64",
    "SLURMD_NODENAME": "gpu01",
}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        pytest.param("a\nb\n", [("a", None, None), ("b", None, None)], id="names"),
        pytest.param("a slots=4\nb slots = 2 max_slots=4 # x\n", [("a", None, 4), ("b", None, 2)], id="open-mpi"),
        pytest.param("a:4\nb:1\n", [("a", None, 4), ("b", None, 1)], id="mpich"),
        pytest.param("a\na\nb\na\n", [("a", None, 3), ("b", None, None)], id="pbs"),
        pytest.param("a gpus=8\nb gpus=4 slots=2\n", [("a", 8, None), ("b", 4, 2)], id="gpus"),
        pytest.param("\n# nothing\ngpu[01-02] gpus=8\n", [("gpu01", 8, None), ("gpu02", 8, None)], id="range"),
    ],
)
def test_a_list_of_hosts_is_read_in_the_forms_of_several_launchers(text: str, hosts: list[object]) -> None:
    assert [(one.host, one.gpus, one.workers) for one in parse_hostfile(text)] == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("\n", "the file contains no hosts", id="empty"),
        pytest.param("a slots=x\n", "line 1: `slots=x` is not valid", id="slots"),
        pytest.param("a\nb c\n", "line 2: `c` is not valid", id="words"),
        pytest.param("a[3-1]\n", "line 1: the range `3-1` runs backwards", id="range"),
        pytest.param("a\nb slots=0\n", "line 2: with `slots=0`, `b` has no workers", id="no slots"),
        pytest.param("a rack=1\n", "line 1: `rack=1` is not valid", id="unknown words"),
        pytest.param("me@a\nyou@a\n", "line 2: `a` had another user or port before", id="two users"),
        pytest.param("a slots=9999\n", "more than 1024 workers", id="many"),
        pytest.param("a[1-9999]\nb[1-9999]\n", "more than 10000 hosts", id="hosts"),
    ],
)
def test_a_list_that_cannot_be_read_says_where(text: str, message: str) -> None:
    with pytest.raises(HostListError, match=message.replace("[", r"\[")):
        parse_hostfile(text)


def test_an_allocation_gives_nodes_cpus_and_a_way_to_each() -> None:
    found = list_slurm_hosts(BATCH)
    assert [(one.host, one.gpus, one.workers) for one in found] == [
        ("gpu01", 0, None),
        ("gpu02", 0, None),
        ("big", 0, None),
    ]
    assert [one.transport for one in found] == [build_srun_command(24), build_srun_command(24), build_srun_command(64)]


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        pytest.param({"SLURM_GPUS_PER_NODE": "4"}, 4, id="per-node"),
        pytest.param({"SLURM_GPUS_PER_NODE": "a100:4"}, 4, id="typed"),
        pytest.param({"SLURM_GPUS_ON_NODE": "2"}, 2, id="gres"),
        pytest.param({"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS": "7"}, None, id="in-all"),
        pytest.param({"SLURM_JOB_GPUS": "0,1"}, None, id="indices"),
        pytest.param({}, 0, id="none"),
    ],
)
def test_gpus_are_those_of_the_job(variables: dict[str, str], gpus: int | None) -> None:
    assert {one.gpus for one in list_slurm_hosts(BATCH | variables)} == {gpus}


def test_tasks_are_workers() -> None:
    assert {one.workers for one in list_slurm_hosts(BATCH | {"SLURM_NTASKS_PER_NODE": "2"})} == {2}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        pytest.param({"SLURM_JOB_ID": ""}, "no Slurm allocation", id="outside"),
        pytest.param({"SLURM_STEP_ID": "0"}, "in a step of Slurm", id="step"),
        pytest.param({"SLURM_HET_SIZE": "2"}, "heterogeneous jobs", id="heterogeneous"),
        pytest.param({"SLURM_JOB_NODELIST": "a["}, "SLURM_JOB_NODELIST is not valid", id="nodes"),
    ],
)
def test_what_is_no_whole_allocation_is_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(HostListError, match=message) as caught:
        list_slurm_hosts(BATCH | variables)
    assert caught.value.hint or "is not valid" in str(caught.value)


def test_the_shell_of_salloc_may_be_a_step_of_its_own() -> None:
    assert len(list_slurm_hosts(BATCH | {"SLURM_STEP_ID": "4294967290"})) == 3


def test_the_command_of_a_step_is_known_as_ours_and_a_changed_one_is_not() -> None:
    argv = build_srun_command(8)
    assert is_srun_command(argv)
    assert not is_srun_command((*argv, "; id"))
    assert not is_srun_command((*argv[:-1], "id"))


FROM = "version: 1\nhosts: {from: %s}\n"


def test_hosts_of_an_allocation_are_as_if_they_were_written(parse_text: Callable[..., LoadedClusterFile]) -> None:
    spec = parse_text(FROM % "slurm", environ=BATCH).spec
    assert [host.name for host in spec.hosts] == ["gpu01", "gpu02", "big"]
    assert spec.hosts[2].transport == build_srun_command(64)
    assert (
        parse_text(FROM % "slurm" + "defaults: {transport: ssh}\n", environ=BATCH).spec.hosts[0].transport
        is TransportKind.SSH
    )


def test_what_a_list_says_of_the_way_to_a_host_holds(parse_text: Callable[..., LoadedClusterFile]) -> None:
    inventory = "[gpu]\na ansible_host=10.0.0.1 ansible_user=me ansible_ssh_common_args='-J b'\n"
    text = "version: 1\nhosts: {from: {command: [list]}}\n"

    (host,) = parse_text(text, run_host_command=lambda _argv: inventory).spec.hosts
    (other,) = parse_text(text, run_host_command=lambda _argv: "\ufeffyou@c:2222 slots=2\n").spec.hosts

    assert (host.host, host.address, host.user, host.proxy_jump) == ("a", "10.0.0.1", "me", "b")
    assert (other.host, other.user, other.port, other.workers) == ("c", "you", 2222, 2)


def test_a_command_that_lists_hosts_is_run_by_whoever_may(parse_text: Callable[..., LoadedClusterFile]) -> None:
    asked = []

    def run(argv: tuple[str, ...]) -> str:
        asked.append(argv)
        return "a slots=2\nb\n"

    text = FROM % "{command: [inventory, --all]}"
    spec = parse_text(text, run_host_command=run).spec
    assert [(host.name, host.workers) for host in spec.hosts] == [("a", 2), ("b", None)]
    assert asked == [("inventory", "--all")]
    with pytest.raises(ConfigError, match="this subcommand does not run the command"):
        parse_text(text)


def test_a_host_may_be_called_from(parse_text: Callable[..., LoadedClusterFile]) -> None:
    assert [host.name for host in parse_text(FROM % "8").spec.hosts] == ["from"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("slrm", "unknown source", id="misspelt"),
        pytest.param("{file: nowhere}", "nowhere cannot be read: No such file", id="no-file"),
        pytest.param("{file: train.py}", "the file contains no hosts", id="empty-file"),
        pytest.param("{command: inventory}", "the command must be a list", id="text"),
        pytest.param("{command: [./inventory]}", "an absolute path", id="relative"),
        pytest.param("{command: [inventory, '${HOME}']}", "is not allowed here", id="variable"),
        pytest.param("slurm, gpu01: 8", "`from` must be the only key", id="beside"),
        pytest.param("slurm", "no Slurm allocation", id="outside"),
    ],
)
def test_a_source_that_is_wrong_is_marked(
    parse_text: Callable[..., LoadedClusterFile], source: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse_text(FROM % source)
    assert [problem.line for problem in caught.value.problems] == [2]


@pytest.mark.parametrize("text", ["-x\n", "a;id\n", "$(id)\n", "u@-x\n"])
def test_a_name_that_is_no_host_s_is_refused_from_wherever_it_comes(
    parse_text: Callable[..., LoadedClusterFile], text: str
) -> None:
    with pytest.raises(ConfigError, match=r"hosts\[0\]"):
        parse_text(FROM % "{command: [x]}", run_host_command=lambda _: text)
