"""Machines out of an Ansible inventory, as INI or as YAML. Text to values; who reads the file is the caller."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

from clusterctl.config import hosts as ranges
from clusterctl.config.init import Machine
from clusterctl.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
    hosts: dict[str, dict[str, Any]] = {}
    try:
        listed = _of_ini(text) if any(map(_SECTION.match, text.splitlines())) else _of_yaml(yaml.safe_load(text), 0)
        for name, values in listed:
            hosts.setdefault(name, {}).update(values)
        machines = [_machine(name, values) for name, values in hosts.items()]
    except (yaml.YAMLError, ranges.RangeError, ValueError, RecursionError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError([Problem(path, 0, 0, f"this inventory cannot be read: {reason}", _PLAIN)]) from error
    if not machines:
        raise ConfigError([Problem(path, 0, 0, "no host in this inventory", _PLAIN)])
    return machines


_PLAIN = "give a list of hosts, one a line, by `--from -`"


def _of_ini(text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    kind: str | None = None
    for line in text.splitlines():
        section = _SECTION.match(line)
        if section is not None:
            kind = section["kind"]
            continue
        words = re.split(r"\s[#;]", line, maxsplit=1)[0].split()
        if kind is not None or not words or words[0].startswith(("#", ";")):
            continue
        values = dict(word.split("=", 1) for word in words[1:] if "=" in word)
        for name in _expanded(words[0]):
            yield name, {key: value.strip("'\"") for key, value in values.items()}


def _of_yaml(tree: object, depth: int) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(tree, dict) or depth > _DEEPEST:
        raise ValueError("groups with `hosts:` were expected")
    for group in tree.values():
        if not isinstance(group, dict):
            continue
        shared = group.get("vars") if isinstance(group.get("vars"), dict) else {}
        hosts = group.get("hosts") or {}
        if not isinstance(hosts, dict):
            raise ValueError("`hosts:` must be a mapping")
        for pattern, values in hosts.items():
            for name in _expanded(str(pattern)):
                yield name, {**(shared or {}), **(values if isinstance(values, dict) else {})}
        if group.get("children"):
            yield from _of_yaml(group["children"], depth + 1)


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
