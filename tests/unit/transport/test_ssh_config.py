from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ConnectError
from clusterctl.transport.ssh.ssh_options import (
    CONFIG_VARIABLE,
    Destination,
    SshOptions,
    build_query_arguments,
    find_duplicate_hosts,
    parse_jump_host,
    parse_options,
    resolve_options,
)


def home() -> str:
    """The folder that ssh goes by now: the lab's tests give this process another one."""
    return pwd.getpwuid(os.getuid()).pw_dir


# Printed by `ssh -G` of OpenSSH 9.2 (shortened).
PRINTED = """\
host gpu1
user bob
hostname 10.0.0.1
port 2222
hashknownhosts yes
identitiesonly yes
stricthostkeychecking false
hostkeyalias cluster
proxycommand nc -X 5 %h %p # %r %%
identityfile ~/.ssh/%h_key
identityfile /keys/two
certificatefile ~/two-cert.pub
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
userknownhostsfile /home/bob/.ssh/known_hosts /home/bob/.ssh/known_hosts2
identityagent /run/agent.%u
connecttimeout none
addressfamily inet6
bindaddress fd00::7
sendenv WANDB_*
sendenv A?
setenv A1=set here
setenv B=two words=2
"""


def test_every_option_of_use_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "A1", "A2", "A22", "C"):
        monkeypatch.setenv(name, "sent")
    user = pwd.getpwuid(os.getuid()).pw_name
    assert parse_options("n", PRINTED, Destination(host="gpu1")) == SshOptions(
        hostname="10.0.0.1",
        port=2222,
        user="bob",
        identity_files=(f"{home()}/.ssh/10.0.0.1_key", "/keys/two"),
        certificate_files=(f"{home()}/two-cert.pub",),
        identities_only=True,
        identity_agent=f"/run/agent.{user}",
        proxy_command="nc -X 5 10.0.0.1 2222 # bob %",
        address_family="inet6",
        bind_address="fd00::7",
        host_key_alias="cluster",
        user_known_hosts=("/home/bob/.ssh/known_hosts", "/home/bob/.ssh/known_hosts2"),
        global_known_hosts=("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2"),
        strict_host_keys="false",
        hash_known_hosts=True,
        environment=(("WANDB_MODE", "sent"), ("A1", "set here"), ("A2", "sent"), ("B", "two words=2")),
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        pytest.param({"port": 22}, "h", id="plain"),
        pytest.param({"port": 2222}, "[h]:2222", id="port"),
        pytest.param({"port": 2222, "host_key_alias": "a"}, "a", id="alias-hides-the-port"),
        pytest.param({"hostname": "Gpu1.Example", "port": 22}, "gpu1.example", id="lower-case"),
        pytest.param({"hostname": "FD00::12", "port": 22}, "fd00::12", id="ipv6"),
        pytest.param({"hostname": "fd00::12", "port": 2222}, "[fd00::12]:2222", id="ipv6-and-port"),
    ],
)
def test_a_key_is_filed_as_openssh_files_it(options: dict[str, object], name: str) -> None:
    assert SshOptions(**{"hostname": "h", "user": "u", **options}).known_hosts_name == name  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "hop"),
    [
        ("gate", Destination(host="gate")),
        ("bob@gate:2222", Destination(host="gate", user="bob", port=2222)),
        ("ssh://bob@gate:22/", Destination(host="gate", user="bob", port=22)),
        ("bob@corp@gate", Destination(host="gate", user="bob@corp")),
        ("[fe80::1]:22", Destination(host="fe80::1", port=22)),
        ("fe80::1", Destination(host="fe80::1")),
    ],
)
def test_a_hop_is_read_in_all_its_spellings(text: str, hop: Destination) -> None:
    assert parse_jump_host(text) == hop


def test_hops_are_in_the_order_of_the_config() -> None:
    assert parse_options("n", "hostname h\nproxyjump a@b:33, c", Destination(host="h")).proxy_jump == ("a@b:33", "c")


def test_the_cluster_file_overrides_the_config_through_ssh_itself() -> None:
    wanted = Destination(host="h", address="1.2.3.4", user="u", port=23, identity_file="/k", proxy_jump="j")
    assert build_query_arguments(wanted, "/f") == [
        *("-G", "-F", "/f", "-o", "HostName=1.2.3.4", "-l", "u", "-p", "23", "-i", "/k", "-J", "j", "--", "h")
    ]


def test_the_key_of_the_cluster_file_is_remembered_where_ssh_passes_it_over(tmp_path: Path) -> None:
    (tmp_path / "config").touch()
    gone = str(tmp_path / "gone")
    options = resolve_options("n", Destination(host="h", identity_file=gone), config_file=str(tmp_path / "config"))
    assert (gone in options.identity_files, options.cluster_file_key) == (False, gone)


@pytest.mark.parametrize(
    ("written", "hops"),
    [
        ("fd00::1", ("[fd00::1]",)),
        ("bob@fd00::1", ("bob@[fd00::1]",)),
        ("gate, fd00::1,[fd00::2]:2222", ("gate", "[fd00::1]", "[fd00::2]:2222")),
        ("ssh://bob@gate:22", ("bob@gate:22",)),
    ],
)
def test_a_hop_named_by_an_ipv6_address_is_understood_by_ssh(
    tmp_path: object, written: str, hops: tuple[str, ...]
) -> None:
    with open(f"{tmp_path}/config", "w"):
        pass
    found = resolve_options("n", Destination(host="h", proxy_jump=written), config_file=f"{tmp_path}/config")
    assert found.proxy_jump == hops


def test_a_host_that_looks_like_an_option_is_refused() -> None:
    with pytest.raises(ConnectError, match="`-oProxyCommand=x` is not a host name"):
        resolve_options("n", Destination(host="-oProxyCommand=x"))


def test_a_config_that_ssh_cannot_read_is_quoted(tmp_path: object) -> None:
    path = f"{tmp_path}/config"
    with open(path, "w") as file:
        file.write("NoSuchOption yes\n")
    with pytest.raises(ConnectError, match="ssh cannot read its configuration"):
        resolve_options("n", Destination(host="h"), config_file=path)


def test_without_an_ssh_program_the_usual_defaults_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    from clusterctl.transport.ssh import ssh_options

    monkeypatch.setenv("PATH", str(tmp_path))
    ssh_options._program.cache_clear()
    try:
        options = resolve_options("n", Destination(host="h", user="u", proxy_jump="j"))
    finally:
        ssh_options._program.cache_clear()
    assert (options.hostname, options.port, options.user, options.proxy_jump) == ("h", 22, "u", ("j",))
    assert f"{home()}/.ssh/id_ed25519" in options.identity_files
    assert options.user_known_hosts[0] == f"{home()}/.ssh/known_hosts"


@pytest.mark.parametrize(
    ("second", "is_one"),
    [
        pytest.param({}, True, id="one_address"),
        pytest.param({"hostname": "GPU.example"}, True, id="other_letters"),
        pytest.param({"port": 2222}, False, id="another_port"),
        pytest.param({"proxy_jump": ("bastion",)}, False, id="behind_a_jump_host"),
    ],
)
def test_names_that_ssh_leads_to_one_place_are_found(second: dict[str, Any], *, is_one: bool) -> None:
    first = SshOptions(hostname="gpu.example", port=22, user="me")
    options = {"a": first, "b": replace(first, **second), "c": replace(first, hostname="other.example")}
    assert find_duplicate_hosts(options) == ([["a", "b"]] if is_one else [])


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh")
def test_config_refuses_one_machine_under_two_names(tmp_path: Path) -> None:
    (tmp_path / "ssh_config").write_text("Host one\n HostName 10.9.9.9\n")
    (tmp_path / "cluster.yaml").write_text("version: 1\nhosts: {one: 1, 10.9.9.9: 1}\n")
    env = {**os.environ, CONFIG_VARIABLE: str(tmp_path / "ssh_config")}
    command = [sys.executable, "-m", "clusterctl", "config", "-q", str(tmp_path / "cluster.yaml")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "`one` and `10.9.9.9` are the same machine for ssh" in done.stderr) == (3, True)
