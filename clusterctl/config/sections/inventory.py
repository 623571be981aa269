"""Machines out of an Ansible inventory, as INI or as YAML. Text to values; who reads the file is the caller.

What a cluster file can say is taken, variables that are nobody's but the playbooks' are passed over, and every other
one that Ansible itself reads is refused: a machine would be reached in another way than its owner thinks.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from clusterctl.config import host_ranges as ranges
from clusterctl.config.sections import ssh_arguments
from clusterctl.config.sections.listing import ListingError, Machine, without_mark

if TYPE_CHECKING:
    from collections.abc import Mapping

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
_WITHOUT_EFFECT = {
    "ansible_connection": ("ssh", "smart", "paramiko", "paramiko_ssh"),
    "ansible_become": ("false", "no"),
    "ansible_python_interpreter": ("auto", "auto_silent", "auto_legacy", "auto_legacy_silent"),
}
_PASSWORDS = ("ansible_password", "ansible_ssh_pass", "ansible_ssh_password", "ansible_become_password")
_DEEPEST = 32


def looks_like_one(text: str) -> bool:
    """Return whether a text is an inventory by its look: sections in brackets, or groups with `hosts:`."""
    lines = text.splitlines()
    if any(_SECTION.match(line) for line in lines):
        return True
    return bool(re.search(r"^\w[\w.-]*:\s*$", text, re.MULTILINE) and re.search(r"^\s+hosts:\s*$", text, re.MULTILINE))


def machines_of(text: str) -> list[Machine]:
    """Read the machines of an inventory, each once, in order, with how they are reached and their Python.

    Raises:
        ListingError: It cannot be read, names no machine, or says what no cluster file can.
    """
    told = _Inventory()
    text = without_mark(text)
    try:
        if any(map(_SECTION.match, text.splitlines())):
            _of_ini(text, told)
        else:
            _of_yaml(yaml.safe_load(text), told, 0)
        resolved = told.resolved()
    except (yaml.YAMLError, ranges.HostRangeError, ValueError, RecursionError) as error:
        if isinstance(error, ListingError):
            raise
        reason = next(iter(str(error).splitlines()), "")
        raise ListingError(f"this inventory cannot be read: {reason}", _PLAIN) from error
    if not resolved:
        raise ListingError("no host in this inventory", _PLAIN)
    return [_machine(name, values, text) for name, values in resolved.items()]


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
        for name in _expanded(pattern):
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
        for _ in range(_DEEPEST):
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


def _of_ini(text: str, told: _Inventory) -> None:
    group, kind = "ungrouped", None
    for number, line in enumerate(text.splitlines(), 1):
        section = _SECTION.match(line)
        if section is not None:
            group, kind = section["group"], section["kind"]
            told.group(group)
            continue
        plain = re.split(r"(?:^|\s)[#;]", line, maxsplit=1)[0].strip()
        if not plain:
            continue
        match kind:
            case "vars":
                key, _, value = plain.partition("=")
                told.group(group).variables[key.strip()] = value.strip().strip("'\"")
            case "children":
                told.group(group).children[plain] = None
                told.group(plain)
            case _:
                _host_line(plain, number, group, told)


def _host_line(plain: str, number: int, group: str, told: _Inventory) -> None:
    try:
        name, *words = shlex.split(plain)
        bare = next((word for word in words if "=" not in word), None)
        if bare is not None:
            raise ListingError(f"line {number}: `{bare[:60]}` cannot be read", "a line is `HOST KEY=VALUE`", number)
        told.host(group, name, dict(word.split("=", 1) for word in words))
    except ranges.HostRangeError as error:
        raise ListingError(f"line {number}: {error}", _PLAIN, number) from error


def _of_yaml(tree: object, told: _Inventory, depth: int) -> None:
    if not isinstance(tree, dict) or depth > _DEEPEST:
        raise ValueError("groups with `hosts:` were expected")
    for name, group in tree.items():
        own = told.group(str(name))
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
            told.host(str(name), str(pattern), values if isinstance(values, dict) else {})
        if children:
            _of_yaml(children, told, depth + 1)
            own.children.update(dict.fromkeys(map(str, children)))


def _expanded(pattern: str) -> list[str]:
    """Return the names of a pattern, in which Ansible puts a colon where we have a hyphen."""
    return list(ranges.expand_hosts(_RANGE.sub(r"[\1-\2]", pattern)))


def _machine(name: str, values: Mapping[str, Any], text: str) -> Machine:
    said = {key: str(value) for key, value in values.items() if key.startswith("ansible_") and value not in (None, "")}
    for key, value in said.items():
        _refuse_unknown(name, key, value, text)
    reached: dict[str, Any] = {}
    for key in (key for key in _ARGUMENTS if key in said):
        try:
            reached.update(ssh_arguments.read(said[key]))
        except ValueError as error:
            raise _error(name, key, f"{error}, which no cluster file can say", text, _IN_SSH_CONFIG) from error
    for key, names in _TEXTS.items():
        told = next((said[n] for n in names if n in said and said[n].lower() not in _WITHOUT_EFFECT.get(n, ())), None)
        if told is not None:
            reached[key] = told
    port = reached.pop("port", None)
    if port is not None and not (re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 65536):
        raise _error(name, "ansible_port", f"`{port[:60]}` is no port", text)
    if reached.get("address") == name:
        del reached["address"]
    return Machine(name, port=None if port is None else int(port), **reached)


_IN_SSH_CONFIG = "let `~/.ssh/config` say it, and take it out here"


def _refuse_unknown(name: str, key: str, value: str, text: str) -> None:
    """Refuse a variable of Ansible that says what no cluster file can.

    Raises:
        ListingError: It is one.
    """
    if "{{" in value:
        hint = "`ansible-inventory --list --yaml` writes an inventory without templates"
        raise _error(name, key, f"`{value[:60]}` is a template", text, hint)
    if key in _PASSWORDS:
        raise _error(name, key, "passwords stand in no cluster file", text, "`clusterctl trust --login` asks for it")
    known = key in _ARGUMENTS or any(key in names for names in _TEXTS.values())
    if not known and value.lower() not in _WITHOUT_EFFECT.get(key, ()):
        raise _error(name, key, "no cluster file can say this", text, "take it out, if it does not matter here")


def _error(name: str, key: str, message: str, text: str, hint: str | None = None) -> ListingError:
    line = next((number for number, line in enumerate(text.splitlines(), 1) if key in line), 0)
    place = f"line {line}: " if line else ""
    return ListingError(f"{place}`{key}` of `{name}`: {message}", hint, line)
