"""Reads the ssh_config of a host from the output of `ssh -G`, which evaluates Include, Match and the system's file.

The output of `ssh -G` (OpenSSH 7.2 to 10) has one `key value` per line, with keys in lower case. `identityfile` and
`certificatefile` repeat and contain `~` and tokens. The known-hosts files are expanded and on one line. `proxycommand`
contains tokens. An unset key is absent or `none`.
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
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from clusterctl.config import value_parsers
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ConnectError

CONFIG_VARIABLE = "CLUSTERCTL_SSH_CONFIG"
"""Environment variable with the path of a file that replaces the user's ssh_config, like `ssh -F`."""

_RESOLVE_TIMEOUT_S = 10.0
_NAMES = {
    "h": ("a host name", value_parsers.is_host_name),
    "k": ("a name of a host key", value_parsers.is_known_hosts_name),
    "n": ("a host name", value_parsers.is_host_name),
    "r": ("a user name", value_parsers.is_user_name),
}
"""Token of a proxy command to the check of its value. All values are checked, whatever their origin."""
ALGORITHMS = ("ciphers", "macs", "kexalgorithms", "hostkeyalgorithms")
_OPENSSH_ONLY = (
    *("knownhostscommand", "verifyhostkeydns", "gssapiauthentication", "hostbasedauthentication", "pkcs11provider"),
    *("controlpath", "bindinterface", "proxyusefdpass", "remotecommand", "sessiontype", "stdinnull"),
    "forkafterauthentication",
)
_DEFAULT_KEYS = ("id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk")
_DEFAULT_KNOWN_HOSTS = ("known_hosts", "known_hosts2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """The ssh_config of one host.

    Attributes:
        hostname: Address to connect to.
        identity_files: Paths of private keys in the order of attempts; some may not exist.
        cluster_file_key: Path of the private key in the cluster file. `ssh -G` omits a key whose file does not exist.
        certificate_files: Paths of user certificates besides those named `<key>-cert.pub`.
        identities_only: Offer only keys of the ssh-agent that match one of the files.
        identity_agent: Socket of the ssh-agent, or `None` for no agent.
        proxy_jump: Jump hosts, `[user@]host[:port]` each, or empty.
        proxy_command: Command with its tokens expanded, or `None`.
        address_family: `any`, `inet` or `inet6`.
        bind_address: Local address to connect from, or `None` for any.
        host_key_alias: Name to look up in the known-hosts files, or `None`.
        user_known_hosts: Known-hosts files of the user; new keys are added to the first.
        global_known_hosts: Known-hosts files of the machine.
        strict_host_keys: As printed by ssh: `ask`, `yes`, `true`, `accept-new`, `no`, `off`, `false`.
        hash_known_hosts: New entries hash the name of their host.
        revoked_host_keys: File of host keys that must not be trusted, or `None`.
        environment: Variables of `SendEnv` and `SetEnv`. The server accepts only variables in its `AcceptEnv`.
        algorithms: Lists of algorithms as printed by ssh, by the name of the option.
        openssh_only: Options that the built-in client does not support, by name, as printed by ssh.
    """

    hostname: str
    port: int
    user: str
    identity_files: tuple[str, ...] = ()
    cluster_file_key: str | None = None
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
    revoked_host_keys: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    algorithms: tuple[tuple[str, str], ...] = ()
    openssh_only: tuple[tuple[str, str], ...] = ()

    def get_openssh_only(self, key: str) -> str | None:
        """Return the value of an option that the built-in client does not support; `None` if the option is not set."""
        value = dict(self.openssh_only).get(key)
        return None if value in (None, "none", "no", "false") else value

    @property
    def address(self) -> str:
        """The arguments of `ssh` for this host, for messages. `ssh` may not know the name of the node."""
        return f"-p {self.port} " * (self.port != 22) + f"{self.user}@{self.hostname}"

    @property
    def known_hosts_name(self) -> str:
        """The name of the host in the known-hosts files."""
        if self.host_key_alias:
            return self.host_key_alias
        name = self.hostname.lower()
        return name if self.port == 22 else f"[{name}]:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """A host as the cluster file describes it. ssh_config sets the fields that are `None`."""

    host: str
    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None


def find_duplicate_hosts(options: Mapping[str, SshOptions]) -> list[list[str]]:
    """Return groups of names that ssh_config maps to one host: the same address, port and jump hosts."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name, one in options.items():
        way = (one.hostname.lower(), one.port, one.proxy_jump, one.proxy_command)
        places.setdefault(way, []).append(name)
    return [names for names in places.values() if len(names) > 1]


def parse_jump_host(text: str, proxy_jump: str | None = None) -> Destination:
    """Return a jump host of a ProxyJump: `[user@]host[:port]`, `[user@][IPv6]:port`, or the same after `ssh://`.

    Args:
        text: The jump host.
        proxy_jump: The jump hosts on the way to this jump host, or `None` to use ssh_config.
    """
    user, host, port = value_parsers.split_proxy_hop(text)
    return Destination(host=host, user=user or None, port=port, proxy_jump=proxy_jump)


def split_last_jump_host(node: str, options: SshOptions, chains: tuple[str, ...]) -> tuple[str, Destination]:
    """Return the chain of jump hosts to a host as text, and the last jump host of the chain.

    Args:
        node: Name of the node, for messages.
        options: ssh_config of the host.
        chains: The chains already followed, to detect cycles.

    Raises:
        ConnectError: The jump hosts form a cycle.
    """
    chain = ",".join(options.proxy_jump)
    if chain in chains:
        hint = "exempt the jump host itself, as in `Host * !bastion`"
        raise ConnectError(node, "its jump hosts form a cycle", hint=hint)
    *before, last = options.proxy_jump
    return chain, parse_jump_host(last, proxy_jump=",".join(before) or None)


def build_query_arguments(destination: Destination, config_file: str | None) -> list[str]:
    """Return the arguments of `ssh -G` that print the options for `destination`."""
    options = ["-G"]
    options += ["-F", config_file] if config_file else []
    # ssh expands tokens here: the `%` of a scoped address must be doubled.
    options += ["-o", f"HostName={destination.address.replace('%', '%%')}"] if destination.address else []
    options += ["-l", destination.user] if destination.user else []
    options += ["-p", str(destination.port)] if destination.port else []
    options += ["-i", destination.identity_file] if destination.identity_file else []
    options += ["-J", ",".join(map(_format_hop, destination.proxy_jump.split(",")))] if destination.proxy_jump else []
    return [*options, "--", destination.host]


def _format_hop(text: str) -> str:
    """Return a jump host in the form that ssh accepts: an IPv6 address needs brackets even without a port."""
    user, at, place = text.strip().rpartition("@")
    return f"{user}{at}[{place}]" if place.count(":") > 1 and not set(place) & set("[/") else text.strip()


def resolve_options(node: str, destination: Destination, *, config_file: str | None = None) -> SshOptions:
    """Return the options by which `ssh` would connect to `destination`; without `ssh`, the defaults of OpenSSH.

    Raises:
        ConnectError: ssh_config is invalid, or a name is not safe for a shell.
    """
    _check_asked(node, destination)
    program = _program()
    if program is None:
        return _defaults(node, destination)
    command = [program, *build_query_arguments(destination, config_file)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        hint = "a `Match exec` in ~/.ssh/config may hang"
        raise ConnectError(node, f"`ssh -G {destination.host}` does not end", hint=hint) from error
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        hint = f"correct ~/.ssh/config until `ssh -G {destination.host}` succeeds"
        raise ConnectError(node, f"ssh cannot read its configuration: {lines[-1]}", hint=hint)
    return parse_options(node, done.stdout.decode("utf-8", "surrogateescape"), destination)


def _check_asked(node: str, destination: Destination) -> None:
    """Reject values that `ssh` would treat as an option or a second line, or would pass to a shell (`Match exec`)."""
    hops = (destination.proxy_jump or "").split(",") if destination.proxy_jump else []
    _check(node, "a host name", value_parsers.is_host_name, destination.host)
    _check(node, "an address", value_parsers.is_host_name, destination.address)
    _check(node, "a user name", value_parsers.is_user_name, destination.user)
    _check(node, "a path of a key", value_parsers.is_ssh_path, destination.identity_file)
    for hop in hops:
        _check(node, "a jump host", value_parsers.is_proxy_hop, hop)


def _check(node: str, what: str, is_one: Callable[[str], bool], text: str | None) -> None:
    if text is not None and not is_one(text):
        hint = "correct it in the cluster file or in ssh_config"
        raise ConnectError(node, f"`{repr(text[:60])[1:-1]}` is not {what}", hint=hint)


def get_destination(host: HostSpec) -> Destination:
    """Return the destination that the cluster file describes."""
    return Destination(
        host=host.host,
        address=host.address,
        user=host.user,
        port=host.port,
        identity_file=host.identity_file,
        proxy_jump=host.proxy_jump,
    )


def _values(text: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for line in text.split("\n"):
        key, _, value = line.partition(" ")
        values.setdefault(key, []).append(value.strip())
    return values


def parse_options(node: str, text: str, destination: Destination) -> SshOptions:
    """Return the options in `text`, the output of `ssh -G`.

    Raises:
        ConnectError: A name contains characters that are not allowed in a command.
    """
    values = _values(text)
    tokens = _tokens(destination, values)
    for token, (what, is_one) in _NAMES.items():
        _check(node, what, is_one, tokens[token] or None)
    _check(node, "a port", lambda text: text.isascii() and text.isdigit() and int(text[:6]) <= 65535, tokens["p"])

    def first(key: str) -> str | None:
        return next((value for value in values.get(key, [])[:1] if value.lower() != "none"), None)

    jump = first("proxyjump")
    for hop in jump.split(",") if jump else ():
        _check(node, "a jump host", value_parsers.is_proxy_hop, hop)
    return SshOptions(
        hostname=tokens["h"],
        port=int(tokens["p"]),
        user=tokens["r"],
        identity_files=tuple(_path(v, tokens) for v in values.get("identityfile", ()) if v.lower() != "none"),
        cluster_file_key=_path(key, tokens) if (key := destination.identity_file) and key.lower() != "none" else None,
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
        revoked_host_keys=_path(revoked, tokens) if (revoked := first("revokedhostkeys")) else None,
        environment=_environment(values.get("sendenv", ()), values.get("setenv", ())),
        algorithms=tuple((key, values[key][0]) for key in ALGORITHMS if key in values),
        openssh_only=tuple((key, values[key][0]) for key in _OPENSSH_ONLY if key in values),
    )


def _environment(patterns: Iterable[str], settings: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the variables that `ssh` sends: variables of this process that match `SendEnv`, overridden by `SetEnv`."""
    wanted = [re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".") for pattern in patterns]
    sent = {name: value for name, value in os.environ.items() if any(re.fullmatch(w, name) for w in wanted)}
    chosen = dict(setting.partition("=")[::2] for setting in settings)
    return tuple((sent | chosen).items())


def _defaults(node: str, destination: Destination) -> SshOptions:
    home = value_parsers.find_ssh_home()
    lines = [f"hostname {destination.address or destination.host}"]
    lines += [f"user {destination.user or getpass.getuser()}", f"port {destination.port or 22}"]
    keys = [destination.identity_file] if destination.identity_file else [f"{home}/.ssh/{k}" for k in _DEFAULT_KEYS]
    lines += [f"identityfile {key}" for key in keys]
    lines += ["userknownhostsfile " + " ".join(f"{home}/.ssh/{name}" for name in _DEFAULT_KNOWN_HOSTS)]
    lines += ["globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"]
    lines += [f"proxyjump {destination.proxy_jump}"] if destination.proxy_jump else []
    return parse_options(node, "\n".join(lines), destination)


@functools.cache
def _program() -> str | None:
    return shutil.which("ssh")


def _tokens(destination: Destination, values: dict[str, list[str]]) -> dict[str, str]:
    return {
        "%": "%",
        "d": value_parsers.find_ssh_home(),
        "h": values.get("hostname", [destination.host])[0],
        "i": str(os.getuid()),
        "k": values.get("hostkeyalias", [destination.host])[0],
        "L": socket.gethostname().partition(".")[0],
        "l": socket.gethostname(),
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
    words = re.finditer(r'"([^"]*)"|\S+', text or "")
    return tuple(_path(word[1] or word[0], tokens) for word in words)


def _agent(value: str | None, tokens: dict[str, str]) -> str | None:
    if value is not None and value.lower() == "none":
        return None
    if value is None or value == "SSH_AUTH_SOCK":
        return os.environ.get("SSH_AUTH_SOCK") or None
    if value.startswith("$") and not value.startswith("${"):
        return os.environ.get(value[1:]) or None
    return _path(value, tokens)


_ONE_ASKS = threading.Lock()
"""Lets only one of many connecting threads ask `ssh`, because `ssh` answers all of them alike."""


def filter_algorithms(node: str, options: SshOptions, option: str, offered: Sequence[str]) -> tuple[str, ...]:
    """Return the algorithms of `offered` that ssh_config allows; all of them if ssh_config does not change the list.

    Args:
        node: Name of the node, for messages.
        options: The ssh_config of the host.
        option: Name of the option, such as `Ciphers`.
        offered: Algorithms of the built-in client.

    Raises:
        ConnectError: ssh_config allows no offered algorithm.
    """
    key = option.lower()
    listed = dict(options.algorithms).get(key, "")
    # An ssh before 8.5 may print additions to and removals from the default list, instead of the resulting list.
    if listed[:1] in ("", *"+-^"):
        return tuple(offered)
    with _ONE_ASKS:
        built_in = _list_defaults()
    if listed == built_in.get(key):
        return tuple(offered)
    names = set(listed.split(","))
    left = tuple(name for name in offered if name in names or name.removesuffix("@libssh.org") in names)
    if not left:
        hint = f"clusterctl supports: {', '.join(offered)}"
        raise ConnectError(node, f"`{option}` of ssh_config allows no algorithm that clusterctl supports", hint=hint)
    return left


@functools.cache
def _list_defaults() -> dict[str, str]:
    """Return the default algorithms of `ssh`, by option. Such a list does not forbid algorithms unknown to `ssh`."""
    program = _program()
    if program is None:
        return {}
    command = [program, "-G", "-F", "none", "localhost"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_RESOLVE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    pairs = (line.partition(" ") for line in done.stdout.decode("utf-8", "replace").split("\n"))
    return {key: value for key, _, value in pairs if key in ALGORITHMS}
