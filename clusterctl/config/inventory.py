"""Machines out of an Ansible inventory, as INI or as YAML. Text to values; who reads the file is the caller."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from clusterctl.config import hosts as ranges
from clusterctl.config.init import Machine
from clusterctl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

_SECTION = re.compile(r"^\s*\[(?P<group>[\w.-]+)(?::(?P<kind>children|vars))?\]\s*(?:[#;].*)?$")
_RANGE = re.compile(r"\[(\d+):(\d+)\]")
_NAMES = {"address": ("ansible_host", "ansible_ssh_host"), "user": ("ansible_user", "ansible_ssh_user"),
          "port": ("ansible_port", "ansible_ssh_port")}  # fmt: skip
_DEEPEST = 32


def looks_like_one(text: str) -> bool:
    """Return whether a text is an inventory by its look: sections in brackets, or groups with `hosts:`."""
    lines = text.splitlines()
    if any(_SECTION.match(line) for line in lines):
        return True
    return bool(re.search(r"^\w[\w.-]*:\s*$", text, re.MULTILINE) and re.search(r"^\s+hosts:\s*$", text, re.MULTILINE))


def from_inventory(path: str, text: str) -> list[Machine]:
    """Read the machines of an inventory, each once, in order, with address, user and port where it tells them.

    Args:
        path: For messages.
        text: The file.

    Raises:
        ConfigError: It cannot be read, or names no machine.
    """
    told = _Inventory()
    try:
        if any(map(_SECTION.match, text.splitlines())):
            _of_ini(text, told)
        else:
            _of_yaml(yaml.safe_load(text), told, 0)
        machines = [_machine(name, values) for name, values in told.resolved().items()]
    except (yaml.YAMLError, ranges.RangeError, ValueError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError([Problem(path, 0, 0, f"this inventory cannot be read: {reason}", _PLAIN)]) from error
    if not machines:
        raise ConfigError([Problem(path, 0, 0, "no host in this inventory", _PLAIN)])
    return machines


_PLAIN = "give a list of hosts, one a line, by `--from -`"


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
    for line in text.splitlines():
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
                name, *words = plain.split()
                values = dict(word.split("=", 1) for word in words if "=" in word)
                told.host(group, name, {key: value.strip("'\"") for key, value in values.items()})


def _of_yaml(tree: object, told: _Inventory, depth: int) -> None:
    if not isinstance(tree, dict) or depth > _DEEPEST:
        raise ValueError("groups with `hosts:` were expected")
    for name, group in tree.items():
        own = told.group(str(name))
        if not isinstance(group, dict):
            continue
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
    return list(ranges.expand(_RANGE.sub(r"[\1-\2]", pattern)))


def _machine(name: str, values: Mapping[str, Any]) -> Machine:
    reached = {key: next((str(values[n]) for n in names if values.get(n)), None) for key, names in _NAMES.items()}
    port, address = reached["port"], reached["address"]
    return Machine(
        name,
        address=address if address != name else None,
        user=reached["user"],
        port=int(port) if port is not None and port.isdigit() else None,
    )
