"""Hosts of an Ansible inventory (INI or YAML), with the `ssh` arguments that it may contain. Pure."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections.host_lists import HostListError, ListedHost, strip_bom

if TYPE_CHECKING:
    from collections.abc import Mapping


_OPTION_KEYS = {
    "proxyjump": "proxy_jump",
    "port": "port",
    "user": "user",
    "identityfile": "identity_file",
    "hostname": "address",
}
_OPTIONS = {"-J": "proxyjump", "-p": "port", "-l": "user", "-i": "identityfile"}
# They change neither where a login leads nor who logs in.
_IGNORED_OPTIONS = frozenset(
    {
        *("controlmaster", "controlpersist", "controlpath", "serveraliveinterval", "serveralivecountmax", "loglevel"),
        *("connecttimeout", "connectionattempts", "compression", "batchmode", "tcpkeepalive", "requesttty"),
    }
)
_FLAGS = frozenset({"-C", "-q", "-T", "-x", "-n", "-tt", "-t"})


def parse_ssh_arguments(text: str) -> dict[str, str]:
    """Return the keys of a host that say the same as arguments of ssh.

    Raises:
        ValueError: One of them says what no key can, or is not known here.
    """
    found, rest = _parse_options(shlex.split(text))
    if rest:
        raise ValueError(f"`{rest[0][:60]}` is no option of ssh")
    return found


def _parse_options(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return what options say, and the words behind them."""
    found: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-"):
        word = words.pop(0)
        if word in _FLAGS:
            continue
        option, value = word[:2], word[2:]
        if option not in (*_OPTIONS, "-o") or not (value or words):
            raise ValueError(f"`{word[:60]}` is an option of ssh")
        value = value or words.pop(0)
        name = _OPTIONS.get(option)
        if name is None:
            name, value = [*re.split(r"\s*=\s*|\s+", value.strip(), maxsplit=1), ""][:2]
        found.update(_convert_option(name.lower(), value, f"{option} {name}" if option == "-o" else word))
    return found, words


def _convert_option(name: str, value: str, shown: str) -> dict[str, str]:
    if name == "proxycommand":
        return {"proxy_jump": _parse_jump_host(value)}
    if name in _OPTION_KEYS:
        return {_OPTION_KEYS[name]: value}
    if name in _IGNORED_OPTIONS:
        return {}
    raise ValueError(f"`{shown[:60]}` is an option of ssh")


def _parse_jump_host(command: str) -> str:
    """Return the jump host of a command that goes through one, such as `ssh -W %h:%p user@bastion`."""
    shown = ValueError(f"`ProxyCommand={command[:60]}` is no jump through another host")
    words = shlex.split(command)
    if not words or os.path.basename(words[0]) != "ssh":
        raise shown
    del words[0]
    forwards = [word for word in words if word in ("-W%h:%p", "%h:%p")]
    found, rest = _parse_words([word for word in words if word not in ("-W", *forwards)])
    through = bool(forwards) or [os.path.basename(word) for word in rest[1:]] in (
        ["nc", "%h", "%p"],
        ["netcat", "%h", "%p"],
    )
    if not through or len(rest) != (1 if forwards else 4) or not {"user", "port"} >= found.keys():
        raise shown
    user, _, host = rest[0].rpartition("@")
    user = found.get("user", user)
    before, behind = f"{user}@" if user else "", f":{found['port']}" if "port" in found else ""
    return f"{before}{host}{behind}"


def _parse_words(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Read options on either side of a host."""
    found, rest = _parse_options(words)
    if len(rest) > 1 and rest[1].startswith("-"):
        more, behind = _parse_options(rest[1:])
        return {**found, **more}, [rest[0], *behind]
    return found, rest


_SECTION = re.compile(r"^\s*\[(?P<group>[\w.-]+)(?::(?P<kind>children|vars))?\]\s*(?:[#;].*)?$")
_RANGE = re.compile(r"\[(\d+):(\d+)\]")
_HOST_AND_PORT = re.compile(r"((?:[^:\[\]]|\[[^\]]*\])+):([0-9]+)")
_TEXTS = {
    "address": ("ansible_host", "ansible_ssh_host"),
    "user": ("ansible_user", "ansible_ssh_user"),
    "port": ("ansible_port", "ansible_ssh_port"),
    "identity_file": ("ansible_private_key_file", "ansible_ssh_private_key_file"),
    "python": ("ansible_python_interpreter",),
}
_ARGUMENTS = ("ansible_ssh_args", "ansible_ssh_common_args", "ansible_ssh_extra_args")
_IGNORED_VALUES = {
    "ansible_connection": ("ssh", "smart", "paramiko", "paramiko_ssh"),
    "ansible_become": ("false", "no"),
    "ansible_python_interpreter": ("auto", "auto_silent", "auto_legacy", "auto_legacy_silent"),
}
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_password")
_MAX_DEPTH = 32


def is_ansible_inventory(text: str) -> bool:
    """Return whether a text is an inventory by its look: sections in brackets, or groups with `hosts:`."""
    lines = text.splitlines()
    if any(_SECTION.match(line) for line in lines):
        return True
    return bool(re.search(r"^\w[\w.-]*:\s*$", text, re.MULTILINE) and re.search(r"^\s+hosts:\s*$", text, re.MULTILINE))


def parse_ansible_inventory(text: str) -> list[ListedHost]:
    """Read the machines of an inventory, each once, in order, with how they are reached and their Python.

    Raises:
        ListingError: It cannot be read, names no machine, or says what no cluster file can.
    """
    inventory = _Inventory()
    text = strip_bom(text)
    try:
        if any(map(_SECTION.match, text.splitlines())):
            _parse_ini(text, inventory)
        else:
            _parse_yaml(yaml.safe_load(text), inventory, 0)
        resolved = inventory.resolved()
    except (yaml.YAMLError, ranges.HostRangeError, ValueError, RecursionError) as error:
        if isinstance(error, HostListError):
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise HostListError(f"this inventory cannot be read: {reason}", _PLAIN) from error
    if not resolved:
        raise HostListError("no host in this inventory", _PLAIN)
    return [_convert_host(name, values, text) for name, values in resolved.items()]


_PLAIN = "give a list of hosts, one a line, by `--from -`; `ansible-inventory --list --yaml` writes a plain inventory"


@dataclass
class _Group:
    variables: dict[str, Any] = field(default_factory=dict)
    hosts: dict[str, None] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)


@dataclass
class _Inventory:
    """What a file tells, in order; variables meet the hosts at the end, since a file tells both in any order."""

    groups: dict[str, _Group] = field(default_factory=dict)
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)

    def group(self, name: str) -> _Group:
        return self.groups.setdefault(name, _Group())

    def host(self, group: str, pattern: str, values: Mapping[str, Any]) -> None:
        ported = _HOST_AND_PORT.fullmatch(pattern)
        if ported is not None:
            pattern, values = ported[1], {"ansible_port": ported[2], **values}
        for name in _expand_pattern(pattern):
            self.group(group).hosts[name] = None
            self.hosts.setdefault(name, {}).update(values)

    def resolved(self) -> dict[str, dict[str, Any]]:
        """Give each host its variables: those of `all`, of its groups from the outermost inwards, then its own."""
        depths = self._depths()
        result: dict[str, dict[str, Any]] = {}
        for host, own in self.hosts.items():
            groups = sorted(self._groups_of(host), key=lambda name: (depths[name], name))
            result[host] = {}
            for name in ("all", *(name for name in groups if name != "all")):
                result[host].update(self.groups[name].variables if name in self.groups else {})
            result[host].update(own)
        return result

    def _depths(self) -> dict[str, int]:
        depths = dict.fromkeys(self.groups, 0)
        for _ in range(_MAX_DEPTH):
            deeper = [(child, depths[name] + 1) for name, group in self.groups.items() for child in group.children]
            changed = [(child, depth) for child, depth in deeper if depths.get(child, -1) < depth]
            if not changed:
                return depths
            for child, depth in changed:
                depths[child] = max(depth, depths.get(child, 0))
        raise ValueError("its groups are children of one another, or nested too deeply")

    def _groups_of(self, host: str) -> set[str]:
        found = {name for name, group in self.groups.items() if host in group.hosts}
        while more := {name for name, group in self.groups.items() if group.children.keys() & found} - found:
            found |= more
        return found


def _parse_ini(text: str, inventory: _Inventory) -> None:
    group, kind = "ungrouped", None
    for number, line in enumerate(text.splitlines(), 1):
        section = _SECTION.match(line)
        if section is not None:
            group, kind = section["group"], section["kind"]
            inventory.group(group)
            continue
        plain = re.split(r"(?:^|\s)[#;]", line, maxsplit=1)[0].strip()
        if not plain:
            continue
        match kind:
            case "vars":
                key, _, value = plain.partition("=")
                inventory.group(group).variables[key.strip()] = value.strip().strip("'\"")
            case "children":
                inventory.group(group).children[plain] = None
                inventory.group(plain)
            case _:
                _parse_host_line(plain, number, group, inventory)


def _parse_host_line(plain: str, number: int, group: str, inventory: _Inventory) -> None:
    try:
        name, *words = shlex.split(plain)
        bare = next((word for word in words if "=" not in word), None)
        if bare is not None:
            raise HostListError(f"line {number}: `{bare[:60]}` cannot be read", "a line is `HOST KEY=VALUE`", number)
        inventory.host(group, name, dict(word.split("=", 1) for word in words))
    except ranges.HostRangeError as error:
        raise HostListError(f"line {number}: {error}", _PLAIN, number) from error


def _parse_yaml(tree: object, inventory: _Inventory, depth: int) -> None:
    if not isinstance(tree, dict) or depth > _MAX_DEPTH:
        raise ValueError("groups with `hosts:` were expected")
    for name, group in tree.items():
        own = inventory.group(str(name))
        if group is None:
            continue
        if not isinstance(group, dict):
            raise ValueError(f"`{name}` is no group")
        unknown = next((key for key in group if key not in ("vars", "hosts", "children")), None)
        if unknown is not None:
            raise ValueError(f"`{unknown}` of the group `{name}` is none of `vars`, `hosts` and `children`")
        variables, hosts, children = (group.get(key) or {} for key in ("vars", "hosts", "children"))
        own.variables.update(variables if isinstance(variables, dict) else {})
        if not isinstance(hosts, dict):
            raise ValueError("`hosts:` must be a mapping")
        for pattern, values in hosts.items():
            inventory.host(str(name), str(pattern), values if isinstance(values, dict) else {})
        if children:
            _parse_yaml(children, inventory, depth + 1)
            own.children.update(dict.fromkeys(map(str, children)))


def _expand_pattern(pattern: str) -> list[str]:
    """Return the names of a pattern, in which Ansible puts a colon where we have a hyphen."""
    return list(ranges.expand_hosts(_RANGE.sub(r"[\1-\2]", pattern)))


def _convert_host(name: str, values: Mapping[str, Any], text: str) -> ListedHost:
    variables = {
        key: str(value) for key, value in values.items() if key.startswith("ansible_") and value not in (None, "")
    }
    for key, value in variables.items():
        _refuse_unknown(name, key, value, text)
    reached: dict[str, Any] = {}
    for key in (key for key in _ARGUMENTS if key in variables):
        try:
            reached.update(parse_ssh_arguments(variables[key]))
        except ValueError as error:
            raise _variable_error(name, key, f"{error}, which no cluster file can say", text, _IN_SSH_CONFIG) from error
    for key, names in _TEXTS.items():
        inventory = next(
            (variables[n] for n in names if n in variables and variables[n].lower() not in _IGNORED_VALUES.get(n, ())),
            None,
        )
        if inventory is not None:
            reached[key] = inventory
    port = reached.pop("port", None)
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise _variable_error(name, "ansible_port", f"`{port[:60]}` is no port", text)
    if reached.get("address") == name:
        del reached["address"]
    return ListedHost(name, port=None if port is None else int(port), **reached)


_IN_SSH_CONFIG = "let `~/.ssh/config` say it, and take it out here"


def _refuse_unknown(name: str, key: str, value: str, text: str) -> None:
    """Refuse a variable of Ansible that says what no cluster file can.

    Raises:
        ListingError: It is one.
    """
    if "{{" in value:
        hint = "`ansible-inventory --list --yaml` writes an inventory without templates"
        raise _variable_error(name, key, f"`{value[:60]}` is a template", text, hint)
    if key in _PASSWORDS:
        raise _variable_error(
            name, key, "passwords stand in no cluster file", text, "`clusterctl trust --login` asks for it"
        )
    known = key in _ARGUMENTS or any(key in names for names in _TEXTS.values())
    if not known and value.lower() not in _IGNORED_VALUES.get(key, ()):
        raise _variable_error(
            name, key, "no cluster file can say this", text, "take it out, if it does not matter here"
        )


def _variable_error(name: str, key: str, message: str, text: str, hint: str | None = None) -> HostListError:
    line = next((number for number, line in enumerate(text.splitlines(), 1) if key in line), 0)
    place = f"line {line}: " if line else ""
    return HostListError(f"{place}`{key}` of `{name}`: {message}", hint, line)
