"""Starter files are good cluster files, whatever they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.config.sections.foreign_host_lists import is_ansible_inventory, parse_host_list
from clusterctl.config.sections.hostfiles_and_slurm import HostListError, ListedHost, parse_hosts_with_users
from clusterctl.config.starter_file import render_starter_file, render_template_for_hosts

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

TEMPLATES = Path(__file__).resolve().parents[3] / "templates"


@pytest.mark.parametrize(
    "machines",
    [
        pytest.param([], id="nothing_known"),
        pytest.param([ListedHost("gpu01", 8), ListedHost("gpu02", 8), ListedHost("gpu03", 4)], id="unequal"),
        pytest.param([ListedHost("b"), ListedHost("a"), ListedHost("10.0.0.1"), ListedHost("null")], id="odd_names"),
        pytest.param([ListedHost("n2", (0, 2)), ListedHost("n1", (0, 2))], id="order_against_folding"),
        pytest.param([ListedHost("fe80::1", 1)], id="ipv6"),
    ],
)
def test_a_starter_file_is_a_good_file_with_its_machines_in_order(
    machines: list[ListedHost], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    spec = parse_text(render_starter_file(machines, name="trial"), require_job=True).spec
    expected = machines or [ListedHost("gpu01", 8), ListedHost("gpu02", 8)]
    assert [ListedHost(h.host, h.gpus) for h in spec.hosts] == expected
    assert spec.name == "trial"


def test_every_commented_line_of_the_starter_file_is_good_too(parse_text: Callable[..., LoadedClusterFile]) -> None:
    lines = render_starter_file().splitlines()
    uncommented = [line.replace("# ", "", 1) if _is_example(line) else line for line in lines]
    spec = parse_text("\n".join(uncommented)).spec
    assert spec.restart.max_restarts == 3
    assert spec.hosts[0].user == "ubuntu"


def _is_example(line: str) -> bool:
    text = line.strip().removeprefix("# ")
    return (
        line.strip().startswith("# ")
        and text.split(":")[0].strip().isidentifier()
        and ":" in text
        and "gpu03" not in text
    )


@pytest.mark.parametrize("name", [path.parent.name for path in sorted(TEMPLATES.glob("*/cluster.yaml"))])
@pytest.mark.parametrize("gpus", [8, 0, None])
def test_every_template_is_a_good_file_on_other_machines(
    name: str, gpus: int | None, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    own = (TEMPLATES / name / "cluster.yaml").read_text()
    alone = own.count("host: localhost") == 1
    machines = [ListedHost(host, gpus) for host in (["gpu01"] if alone else ["gpu01", "gpu02"])]

    spec = parse_text(render_template_for_hosts(own, machines), require_job=True).spec

    assert [ListedHost(host.host, host.gpus) for host in spec.hosts] == machines
    assert bool((spec.job and spec.job.args) or spec.env) == (gpus == 0 and not alone)
    assert "all on this machine" not in render_template_for_hosts(own, machines)


def test_a_template_for_one_machine_takes_no_more() -> None:
    own = (TEMPLATES / "torch_dataparallel/cluster.yaml").read_text()
    with pytest.raises(ValueError, match="runs on one machine, not on 2"):
        render_template_for_hosts(own, [ListedHost("a"), ListedHost("b")])


def test_a_hostfile_gives_hosts_and_slots() -> None:
    text = (
        "# two racks\nworker-1 slots=8\nworker-2 slots=8  # new\nroot@worker-3 slots = 4\n\nmpi1 slots=2 max_slots=4\n"
    )
    assert parse_host_list(text) == [
        ListedHost("worker-1", workers=8),
        ListedHost("worker-2", workers=8),
        ListedHost("worker-3", workers=4, user="root"),
        ListedHost("mpi1", workers=2),
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        pytest.param("a slots=x\n", 1, id="slots"),
        pytest.param("#\n", 0, id="none"),
        pytest.param("a\n[x\n", 2, id="bracket"),
        pytest.param("gpu[x] slots=2\n", 1, id="no range"),
        pytest.param("a slots=4\nb slots=0\n", 2, id="no slots"),
        pytest.param("a slots=4\nb slots=4 rack=7\n", 2, id="an unknown word"),
        pytest.param("a slots=4 slots=8\n", 1, id="slots twice"),
        pytest.param("a:99999\n", 1, id="no port"),
    ],
)
def test_a_bad_hostfile_is_refused_at_its_line(text: str, line: int) -> None:
    with pytest.raises(HostListError) as caught:
        parse_host_list(text)
    assert caught.value.line == line


def test_ssh_config_gives_hosts_without_patterns_and_forges() -> None:
    text = "Host gpu01 gpu02\n  User u\nHost *.corp !x\nhost=gpu03\nHost github.com\nInclude more\n"
    assert [m.host for m in parse_host_list(text, lambda pattern: ["Host inner\n"])] == [
        "gpu01",
        "gpu02",
        "gpu03",
        "inner",
    ]


def test_an_ssh_config_that_includes_itself_ends() -> None:
    assert parse_host_list("Include self\nHost a\n", lambda pattern: ["Include self\nHost a\n"]) == [ListedHost("a")]


def test_a_slurm_expression_gives_its_hosts() -> None:
    for parse in (parse_host_list, parse_hosts_with_users):
        assert [m.host for m in parse("gpu[08-10],head")] == ["gpu08", "gpu09", "gpu10", "head"]
        with pytest.raises(ValueError, match="bracket|closed|range"):
            parse("gpu[08-")


def test_the_modeline_is_written_where_a_schema_is_given() -> None:
    assert render_starter_file(schema="cluster.schema.json").startswith(
        "# yaml-language-server: $schema=cluster.schema.json\nversion"
    )
    assert render_starter_file().startswith("version: 1\n")


INVENTORY = """\
# two racks
[gpu]
node1 ansible_host=10.98.0.2 ansible_user=ubuntu   # new
gpu[03:04] ansible_port=2222

[gpu:vars]
ansible_python_interpreter=/usr/bin/python3

[cpu:children]
gpu
"""
AS_YAML = """\
all:
  vars: {ansible_user: ubuntu}
  hosts:
    node1: {ansible_host: 10.98.0.2}
  children:
    gpu:
      hosts:
        gpu[03:04]: {ansible_port: 2222}
"""


@pytest.mark.parametrize(
    ("text", "machines"),
    [
        pytest.param(
            INVENTORY,
            [
                ListedHost("node1", address="10.98.0.2", user="ubuntu", python="/usr/bin/python3"),
                ListedHost("gpu03", port=2222, python="/usr/bin/python3"),
                ListedHost("gpu04", port=2222, python="/usr/bin/python3"),
            ],
            id="ini",
        ),
        pytest.param(
            AS_YAML,
            [
                ListedHost("node1", address="10.98.0.2", user="ubuntu"),
                ListedHost("gpu03", user="ubuntu", port=2222),
                ListedHost("gpu04", user="ubuntu", port=2222),
            ],
            id="yaml",
        ),
    ],
)
def test_an_inventory_of_ansible_is_known_and_read(text: str, machines: list[ListedHost]) -> None:
    assert is_ansible_inventory(text)
    assert parse_host_list(text) == machines


SHARED_BY_GROUPS = """\
[racks:vars]
ansible_port = 2222
ansible_user=rack
[all:vars]
ansible_user='root'   # of everybody
ansible_port=22
[gpu]
node1
node2 ansible_user=me
[gpu:vars]
ansible_ssh_user=older
ansible_user=gpu
[racks:children]
gpu
[other]
node3 ansible_host=10.0.0.3
"""
SHARED_BY_GROUPS_IN_YAML = """\
all:
  vars: {ansible_user: root, ansible_port: 22}
  children:
    racks:
      vars: {ansible_port: 2222, ansible_user: rack}
      children:
        gpu:
          vars: {ansible_user: gpu}
          hosts: {node1: , node2: {ansible_user: me}}
    other:
      hosts: {node3: {ansible_host: 10.0.0.3}}
"""


@pytest.mark.parametrize("text", [SHARED_BY_GROUPS, SHARED_BY_GROUPS_IN_YAML], ids=["ini", "yaml"])
def test_variables_of_groups_reach_their_hosts_and_the_inner_ones_win(text: str) -> None:
    assert parse_host_list(text) == [
        ListedHost("node1", user="gpu", port=2222),
        ListedHost("node2", user="me", port=2222),
        ListedHost("node3", address="10.0.0.3", user="root", port=22),
    ]


def test_machines_keep_how_they_are_reached(parse_text: Callable[..., LoadedClusterFile]) -> None:
    spec = parse_text(render_starter_file(parse_host_list(INVENTORY))).spec

    assert [(host.host, host.address, host.user, host.port) for host in spec.hosts] == [
        ("node1", "10.98.0.2", "ubuntu", None),
        ("gpu03", None, None, 2222),
        ("gpu04", None, None, 2222),
    ]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[gpu]\n", id="no host"),
        pytest.param("[gpu]\ngpu[03:x]\n", id="no range"),
        pytest.param("all:\n  hosts:\n  - a\n", id="a list"),
        pytest.param("all:\n  hosts:\n   {\n", id="no yaml"),
    ],
)
def test_an_inventory_that_cannot_be_read_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(HostListError) as caught:
        parse_host_list(text)
    assert "one host in each line" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        pytest.param("a ansible_ssh_private_key_file=~/.ssh/k", ListedHost("a", identity_file="~/.ssh/k"), id="key"),
        pytest.param("a ansible_python_interpreter=/opt/py", ListedHost("a", python="/opt/py"), id="python"),
        pytest.param("a ansible_python_interpreter=auto_silent", ListedHost("a"), id="python as found"),
        pytest.param("a:2222", ListedHost("a", port=2222), id="port"),
        pytest.param("a rack=7 ansible_connection=ssh", ListedHost("a"), id="variables of playbooks"),
        pytest.param("a ansible_ssh_common_args='-J me@b:22'", ListedHost("a", proxy_jump="me@b:22"), id="jump"),
        pytest.param("a ansible_ssh_extra_args='-o ProxyJump=b,c'", ListedHost("a", proxy_jump="b,c"), id="jumps"),
        pytest.param(
            """a ansible_ssh_common_args='-o ProxyCommand="ssh -q -W %h:%p -p 2222 me@b" -o ControlPersist=60s'""",
            ListedHost("a", proxy_jump="me@b:2222"),
            id="command of a jump",
        ),
        pytest.param(
            """a ansible_ssh_args='-oProxyCommand="/usr/bin/ssh me@b nc %h %p" -p 23 -i k -l u'""",
            ListedHost("a", proxy_jump="me@b", port=23, identity_file="k", user="u"),
            id="options",
        ),
    ],
)
def test_how_an_inventory_says_a_host_is_reached_is_kept(line: str, machine: ListedHost) -> None:
    assert parse_host_list(f"[gpu]\n{line}\n") == [machine]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param(
            "a ansible_connection=docker", "`ansible_connection` of `a`: a cluster file cannot express", id="connection"
        ),
        pytest.param("a ansible_password=x", "`ansible_password` of `a`: passwords", id="password"),
        pytest.param("a ansible_become=true", "`ansible_become` of `a`", id="another user"),
        pytest.param("a ansible_user={{me}}", "`ansible_user` of `a`: `{{me}}` is a template", id="template"),
        pytest.param("a ansible_port=x", "`ansible_port` of `a`: `x` is not a port", id="port"),
        pytest.param("a ansible_ssh_args='-F f'", "`-F` is an unsupported option of ssh", id="another configuration"),
        pytest.param(
            "a ansible_ssh_args='-o StrictHostKeyChecking=no'",
            "`-o StrictHostKeyChecking` is an unsupported option",
            id="option",
        ),
        pytest.param(
            "a ansible_ssh_args='-o ProxyCommand=\"nc -x p %h %p\"'", "does not connect through a jump host", id="proxy"
        ),
        pytest.param("a b", "`b` is not valid", id="word"),
        pytest.param("[x", "", id="bracket"),
        pytest.param("a[03:x]", "`03:x` is not a range of numbers", id="no range"),
    ],
)
def test_what_of_an_inventory_no_cluster_file_can_say_is_refused_at_its_line(line: str, said: str) -> None:
    with pytest.raises(HostListError) as caught:
        parse_host_list(f"[gpu]\n{line}\n")
    assert said in str(caught.value)
    assert caught.value.line == 2


@pytest.mark.parametrize("part", ["gpu: nodes", "gpu: {host: {a: }}", "gpu: {hosts: {a: {ansible_become: yes}}}"])
def test_no_part_of_an_inventory_in_yaml_is_passed_over(part: str) -> None:
    with pytest.raises(HostListError):
        parse_host_list(f"all:\n  hosts: {{b: }}\n  children:\n    {part}\n")


@pytest.mark.parametrize(
    ("line", "machine"),
    [
        pytest.param("gpu01:4", ListedHost("gpu01", workers=4), id="a count of slots"),
        pytest.param("root@gpu01:4", ListedHost("gpu01", workers=4, user="root"), id="with a user"),
        pytest.param("fe80::1 slots=2", ListedHost("fe80::1", workers=2), id="an address"),
        pytest.param(
            "me@gpu01:2222 slots=8", ListedHost("gpu01", workers=8, user="me", port=2222), id="a port beside slots"
        ),
        pytest.param("gpu01:2222", ListedHost("gpu01", port=2222), id="more than a machine has"),
        pytest.param("gpu01:22", ListedHost("gpu01", port=22), id="the port of ssh"),
        pytest.param("\ufeffgpu01 slots=4", ListedHost("gpu01", workers=4), id="behind the mark of Windows"),
        pytest.param("gpu01 slots=4 gpus=2", ListedHost("gpu01", 2, workers=4), id="slots and GPUs"),
    ],
)
def test_a_colon_in_a_hostfile_stands_before_a_count(line: str, machine: ListedHost) -> None:
    assert parse_host_list(line) == [machine]
