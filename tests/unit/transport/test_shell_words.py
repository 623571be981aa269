"""What a cluster file says of the way to a host never reaches a shell, whatever the user's ssh_config does with it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.cli.main import run
from clusterctl.errors import ConnectError, ExitCode
from clusterctl.transport.ssh.ssh_options import Destination, parse_options, resolve_options
from clusterctl.transport.ssh.underlying_stream import open_stream

if TYPE_CHECKING:
    from collections.abc import Sequence

PAYLOADS = {
    "substitution": "$(sh<evil.sh)",
    "backticks": "`sh<evil.sh`",
    "semicolon": "a;sh<evil.sh",
    "ampersand": "a&sh<evil.sh",
    "pipe": "a|sh<evil.sh",
    "output": "a>pwned",
    "line": "a\nsh evil.sh",
    "carriage-return": "a\rsh evil.sh",
    "separator": "a\u2028proxycommand sh evil.sh",
    "quote": "a';sh<evil.sh;'",
    "double-quote": 'a";sh<evil.sh;"',
    "backslash": "a\\;sh<evil.sh",
    "variable": "a$${IFS}b",
    "scope": "fe80::1%$(sh<evil.sh)",
    "option": "-oProxyCommand=sh<evil.sh",
    "token": "a%h;sh<evil.sh",
    "line-of-ssh": "x\nproxycommand sh evil.sh",
}
KEYS = ("host", "address", "user", "proxy_jump", "identity_file")
COMMANDS: dict[str, Sequence[str]] = {
    "exec": ("exec", "--", "true"),
    "trust": ("trust", "--yes"),
    "health": ("health",),
    "stats": ("stats",),
    "top": ("top",),
    "sync": ("sync",),
    "pull": ("sync", "--pull", "x"),
    "orphans": ("down", "--orphans"),
    "up": ("up", "-d"),
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, seen by a user whose ssh_config hands everything to shells."""
    (tmp_path / "evil.sh").write_text("touch pwned\n")
    (tmp_path / PAYLOADS["line-of-ssh"]).write_text("a file whose name is two lines\n")
    config = tmp_path / "ssh_config"
    config.write_text(
        'Match exec "true %h %n %r %p"\n    Port 1\nHost *\n    ProxyCommand sh -c "exit 1" %h %n %r %k\n'
        f"    UserKnownHostsFile {tmp_path}/known_hosts\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_SSH_CONFIG", str(config))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def cluster_file(key: str, value: str) -> str:
    host: dict[str, Any] = {"host": "gpu01", key: value}
    return json.dumps({"version": 1, "hosts": [host], "job": {"command": "true"}})


def pairs() -> list[Any]:
    """Return each payload with each key once, and so that each command meets each key and each payload."""
    keys, commands = [*KEYS, "internal_ip"], list(COMMANDS)
    rows = [
        (commands[(place + 2 * number) % len(commands)], key, payload)
        for place, key in enumerate(keys)
        for number, payload in enumerate(PAYLOADS)
    ]
    return [pytest.param(*row, id="-".join(row)) for row in rows]


@pytest.mark.parametrize(("command", "key", "payload"), pairs())
def test_no_command_hands_a_value_of_the_file_to_a_shell(
    place: Path, capfd: pytest.CaptureFixture[str], command: str, key: str, payload: str
) -> None:
    (place / "cluster.yaml").write_text(cluster_file(key, PAYLOADS[payload]))
    name, *rest = COMMANDS[command]
    code = run([name, *(() if command in ("exec", "pull") else ("cluster.yaml",)), *rest])
    assert not (place / "pwned").exists()
    assert code == ExitCode.CONFIG, capfd.readouterr().err


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("key", KEYS)
def test_nor_is_one_that_came_past_the_file(place: Path, key: str, payload: str) -> None:
    hostile = Destination(**{"host": "gpu01", key: PAYLOADS[payload]})
    with pytest.raises(ConnectError, match="` is not an? "):
        open_stream("n", resolve_options("n", hostile, config_file=os.environ["CLUSTERCTL_SSH_CONFIG"]), 0.0)
    assert not (place / "pwned").exists()


@pytest.mark.parametrize("key", ["hostname", "user", "hostkeyalias", "proxyjump"])
def test_what_ssh_says_is_looked_at_again_before_a_command_is_made_of_it(key: str) -> None:
    said = {"hostname": "gpu01", "user": "bob", "proxycommand": "nc %h %p", key: "a;b"}
    with pytest.raises(ConnectError, match="`a;b` is not an? "):
        parse_options("n", "".join(f"{name} {value}\n" for name, value in said.items()), Destination(host="gpu01"))


@pytest.mark.parametrize(
    ("address", "hostname"),
    [("10.0.0.9", "10.0.0.9"), ("fd00::9", "fd00::9"), ("fe80::9%eth0", "fe80::9%eth0"), ("gpu_1.lan", "gpu_1.lan")],
)
def test_an_address_of_any_kind_reaches_ssh_as_it_is(place: Path, address: str, hostname: str) -> None:
    found = resolve_options(
        "n", Destination(host="gpu01", address=address), config_file=os.environ["CLUSTERCTL_SSH_CONFIG"]
    )
    assert (found.hostname, found.proxy_command) == (hostname, f'sh -c "exit 1" {hostname} gpu01 {found.user} gpu01')


@pytest.mark.parametrize("variable", ["TOKEN", "TOKEN:-x", "TOKEN:?no"])
@pytest.mark.parametrize("key", [*KEYS, "known_hosts"])
def test_no_variable_is_told_to_name_servers_or_strangers(
    place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, variable: str
) -> None:
    monkeypatch.setenv("TOKEN", "sekrit")
    text = cluster_file(key, f"${{{variable}}}.evil.example")
    if key == "known_hosts":
        text = json.dumps({"version": 1, "hosts": "gpu01", "ssh": {"known_hosts": f"${{{variable}}}"}})
    (place / "cluster.yaml").write_text(text)
    assert run(["trust", "cluster.yaml"]) == ExitCode.CONFIG
    said = capfd.readouterr().err
    assert f"`${{{variable}}}` is not allowed here" in said
    assert "hint: " in said
    assert "sekrit" not in said
