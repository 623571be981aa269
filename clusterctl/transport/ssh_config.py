"""What `ssh HOST` would do, as plain values: `ssh -G` knows Include, Match, tokens and the system's file; we only ask.

Facts about the output of `ssh -G` (OpenSSH 7.2 to 10): one `key value` a line, keys in lower case; `identityfile` and
`certificatefile` repeat and keep their `~` and tokens; the known-hosts files are expanded and stand on one line;
`proxycommand` keeps its tokens; what is not set is absent or `none`.
"""

from __future__ import annotations

import functools
import getpass
import os
import pwd
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.errors import ConnectError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.config.spec import HostSpec

CONFIG_VARIABLE = "CLUSTERCTL_SSH_CONFIG"
"""Environment variable that names a file to use in place of the user's ssh_config, as `ssh -F` does."""

_RESOLVE_SECONDS = 10.0
_KEYS = {
    *("hostname", "port", "user", "proxyjump", "proxycommand", "addressfamily", "bindaddress"),
    *("identityfile", "certificatefile", "identitiesonly", "identityagent"),
    *("hostkeyalias", "userknownhostsfile", "globalknownhostsfile", "stricthostkeychecking", "hashknownhosts"),
}
_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_DEFAULT_KNOWN_HOSTS = ("known_hosts", "known_hosts2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How one host is reached and trusted.

    Attributes:
        hostname: Address to connect to.
        identity_files: Private keys in the order in which they are tried; some may not exist.
        certificate_files: User certificates beside those named `<key>-cert.pub`.
        identities_only: Offer no key of the ssh-agent that is not one of the files.
        identity_agent: Socket of the ssh-agent, or `None` for no agent.
        proxy_jump: Hops from here to there, `[user@]host[:port]` each, or empty.
        proxy_command: Command with its tokens expanded, or `None`.
        address_family: `any`, `inet` or `inet6`.
        bind_address: Own address to connect from, or `None` for any.
        host_key_alias: Name to look up in the known-hosts files, or `None`.
        user_known_hosts: Files of the user; the first is written to.
        global_known_hosts: Files of the machine.
        strict_host_keys: As ssh prints it: `ask`, `yes`, `true`, `accept-new`, `no`, `off`, `false`.
        hash_known_hosts: New entries hide the name of their host.
    """

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    certificate_files: tuple[str, ...] = ()
    identities_only: bool = False
    identity_agent: str | None = None
    proxy_jump: tuple[str, ...] = ()
    proxy_command: str | None = None
    address_family: str = "any"
    bind_address: str | None = None
    host_key_alias: str | None = None
    user_known_hosts: tuple[str, ...] = ()
    global_known_hosts: tuple[str, ...] = ()
    strict_host_keys: str = "ask"
    hash_known_hosts: bool = False

    @property
    def known_name(self) -> str:
        """The name under which the host key is filed."""
        if self.host_key_alias:
            return self.host_key_alias
        name = self.hostname.lower()
        return name if self.port == 22 else f"[{name}]:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A host as it was asked for; what is `None` is left to the config."""

    host: str
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None


def parse_hop(text: str, proxy_jump: str | None = None) -> Destination:
    """Return a hop of a ProxyJump: `[user@]host[:port]`, `[user@][IPv6]:port` or the same after `ssh://`.

    Args:
        text: The hop.
        proxy_jump: The hops before it, or `None` for what the config says.
    """
    rest = text.strip().removeprefix("ssh://").rstrip("/")
    user, _, place = rest.rpartition("@")
    bracketed = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?", place)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    elif place.count(":") == 1:
        host, _, port = place.partition(":")
    else:
        host, port = place, None
    return Destination(host=host, user=user or None, port=int(port) if port else None, proxy_jump=proxy_jump)


def arguments(destination: Destination, config_file: str | None) -> list[str]:
    """Return the arguments of `ssh` that make it print its options for `destination`."""
    options = ["-G"]
    options += ["-F", config_file] if config_file else []
    options += ["-o", f"HostName={destination.address}"] if destination.address else []
    options += ["-l", destination.user] if destination.user else []
    options += ["-p", str(destination.port)] if destination.port else []
    options += ["-i", destination.identity_file] if destination.identity_file else []
    options += ["-J", ",".join(map(_hop, destination.proxy_jump.split(",")))] if destination.proxy_jump else []
    return [*options, "--", destination.host]


def _hop(text: str) -> str:
    """Return a hop as ssh takes it, which wants an IPv6 address in brackets even where there is no port."""
    user, at, place = text.strip().rpartition("@")
    return f"{user}{at}[{place}]" if place.count(":") > 1 and not set(place) & set("[/") else text.strip()


def resolve(node: str, destination: Destination, *, config_file: str | None = None) -> SshOptions:
    """Ask `ssh` how it would reach `destination`; where there is no `ssh`, take OpenSSH's own defaults.

    Raises:
        ConnectError: The config is broken, or the host's name cannot be one.
    """
    if destination.host.startswith("-"):
        raise ConnectError(node, f"`{destination.host}` is not a host name")
    program = _program()
    if program is None:
        return _defaults(destination)
    command = [program, *arguments(destination, config_file)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        hint = "a `Match exec` in ~/.ssh/config may be waiting for something"
        raise ConnectError(node, f"`ssh -G {destination.host}` does not end", hint=hint) from error
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        hint = f"`ssh -G {destination.host}` shows the same; mend ~/.ssh/config"
        raise ConnectError(node, f"ssh cannot read its configuration: {said[-1]}", hint=hint)
    return parse(done.stdout.decode("utf-8", "surrogateescape"), destination)


def destination_of(host: HostSpec) -> Destination:
    """Return what the cluster file says of the way to a host."""
    return Destination(
        host=host.host,
        address=host.address,
        user=host.user,
        port=host.port,
        identity_file=host.identity_file,
        proxy_jump=host.proxy_jump,
    )


def parse(text: str, destination: Destination) -> SshOptions:
    """Return the options that `ssh -G` printed as `text`."""
    values: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key in _KEYS:
            values.setdefault(key, []).append(value.strip())
    tokens = _tokens(destination, values)

    def first(key: str) -> str | None:
        value = values.get(key, ["none"])[0]
        return None if value.lower() == "none" else value

    jump = first("proxyjump")
    return SshOptions(
        hostname=tokens["h"],
        port=int(tokens["p"]),
        user=tokens["r"],
        identity_files=tuple(_path(v, tokens) for v in values.get("identityfile", ()) if v.lower() != "none"),
        certificate_files=tuple(_path(v, tokens) for v in values.get("certificatefile", ()) if v.lower() != "none"),
        identities_only=first("identitiesonly") == "yes",
        identity_agent=_agent(values.get("identityagent", [None])[0], tokens),
        proxy_jump=tuple(part.strip() for part in jump.split(",")) if jump else (),
        proxy_command=_expand(first("proxycommand") or "", tokens) or None,
        address_family=first("addressfamily") or "any",
        bind_address=first("bindaddress"),
        host_key_alias=first("hostkeyalias"),
        user_known_hosts=_paths(first("userknownhostsfile"), tokens),
        global_known_hosts=_paths(first("globalknownhostsfile"), tokens),
        strict_host_keys=(first("stricthostkeychecking") or "ask").lower(),
        hash_known_hosts=first("hashknownhosts") == "yes",
    )


def _defaults(destination: Destination) -> SshOptions:
    home = _home()
    lines = [f"hostname {destination.address or destination.host}"]
    lines += [f"user {destination.user or getpass.getuser()}", f"port {destination.port or 22}"]
    keys = [destination.identity_file] if destination.identity_file else [f"{home}/.ssh/{k}" for k in _DEFAULT_KEYS]
    lines += [f"identityfile {key}" for key in keys]
    lines += ["userknownhostsfile " + " ".join(f"{home}/.ssh/{name}" for name in _DEFAULT_KNOWN_HOSTS)]
    lines += ["globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"]
    lines += [f"proxyjump {destination.proxy_jump}"] if destination.proxy_jump else []
    return parse("\n".join(lines), destination)


@functools.cache
def _program() -> str | None:
    return shutil.which("ssh")


def _home() -> str:
    # ssh goes by the password database, not by $HOME; its files are where it looks for them.
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return str(Path.home())


def _tokens(destination: Destination, values: dict[str, list[str]]) -> dict[str, str]:
    local = socket.gethostname()
    return {
        "%": "%",
        "d": _home(),
        "h": values.get("hostname", [destination.host])[0],
        "i": str(os.getuid()),
        "k": values.get("hostkeyalias", [destination.host])[0],
        "L": local.partition(".")[0],
        "l": local,
        "n": destination.host,
        "p": values.get("port", ["22"])[0],
        "r": values.get("user", [destination.user or ""])[0],
        "u": _local_user(),
    }


def _local_user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _expand(text: str, tokens: dict[str, str]) -> str:
    if "%" not in text:
        return text
    return re.sub(r"%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _path(text: str, tokens: dict[str, str]) -> str:
    text = _expand(text.strip('"'), tokens)
    if "${" in text:
        text = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), text)
    return tokens["d"] + text[1:] if text == "~" or text.startswith("~/") else text


def _paths(text: str | None, tokens: dict[str, str]) -> tuple[str, ...]:
    return tuple(_path(part, tokens) for part in _words(text or "")) if text else ()


def _words(text: str) -> Iterable[str]:
    return (match[1] or match[0] for match in re.finditer(r'"([^"]*)"|\S+', text))


def _agent(value: str | None, tokens: dict[str, str]) -> str | None:
    if value is not None and value.lower() == "none":
        return None
    if value is None or value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:]) or None
    return _path(value, tokens)
