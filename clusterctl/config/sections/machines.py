"""The `hosts` section: ranges expanded, defaults merged, names made unique."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from clusterctl.config import host_ranges as ranges
from clusterctl.config import value_parsers
from clusterctl.config.sections import normal
from clusterctl.config.sections.check import validate
from clusterctl.config.sections.declared import HOST
from clusterctl.config.spec import HostSpec, Role, TransportKind
from clusterctl.config.text.tree import label
from clusterctl.config.value_parsers import describe_value
from clusterctl.suggestion import similar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.sections.normal import HostEntry
    from clusterctl.config.text.tree import Mark, Node, Report


@dataclass(frozen=True, slots=True)
class Machine:
    """A host, where it was listed, and the defaults that hold for it."""

    spec: HostSpec
    entry: HostEntry
    mark: Mark


def build(root: Node, defaults: Mapping[str, Any], report: Report) -> list[Machine]:
    """Give the hosts in order of node rank."""
    node = root.child("hosts")
    if node is None:
        return []
    if node.value is None or node.value in ("", {}, []):
        mark = node.mark if node.value is not None else root.key_mark("hosts")
        report.add(mark, "hosts: there is none", "write `gpu01: 8` below it: host and GPUs")
        return []
    machines: list[Machine] = []
    for entry in normal.host_entries(node, report):
        values = validate(HOST, entry.node, entry.path, report)
        if values is not None:
            machines += _expanded(_merged(defaults, values), entry, report)
        if len(machines) > ranges.MAX_HOSTS:
            report.add(entry.mark, f"hosts: more than {ranges.MAX_HOSTS} hosts")
            return []
    _check_roles(machines, node, root, report)
    return _named(machines, report)


def _expanded(values: dict[str, Any], entry: HostEntry, report: Report) -> list[Machine]:
    node = entry.node.value["host"]
    names = _names(node, f"{label(entry.path)}", report)
    addresses = _spread(values.pop("address", None), len(names), "address", entry, report)
    internal = _spread(values.pop("internal_ip", None), len(names), "internal_ip", entry, report)
    machines = []
    for name, address, internal_ip in zip(names, addresses, internal, strict=True):
        if _usable(name, node, label(entry.path), report):
            spec = HostSpec(name=name, host=name, address=address, internal_ip=internal_ip, **values)
            machines.append(Machine(spec, entry, node.mark))
    return machines


def _names(node: Node, where: str, report: Report) -> list[str]:
    # An IPv6 address is written as it is; brackets always mean a range.
    try:
        return ranges.expand_hosts(node.value)
    except ranges.HostRangeError as error:
        report.add(node.inside(error.offset, error.length), f"{where}: {error}", error.hint)
        return []


def _merged(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    values = {**defaults, **own, "env": defaults.get("env", {}) | own.get("env", {})}
    del values["host"]
    return values


def _spread(text: str | None, count: int, key: str, entry: HostEntry, report: Report) -> list[str | None]:
    """One address for one host; a range of as many addresses for a range of hosts."""
    if text is None:
        return [None] * count
    node = entry.node.child(key)
    mark = node.mark if node is not None else entry.mark
    where = f"{label(entry.path)}.{key}"
    try:
        addresses = ranges.expand_hosts(text) if "[" in text or "," in text else [text]
    except ranges.HostRangeError as error:
        report.add(mark, f"{where}: {error}", error.hint)
        return [None] * count
    if len(addresses) != count and count:
        text = f"{where}: {len(addresses)} address{'es' if len(addresses) > 1 else ''} for {count} hosts"
        report.add(mark, text, "list the hosts one by one, or write a range such as `10.0.0.[1-4]`")
        return [None] * count
    wrong = next((address for address in addresses if not value_parsers.is_host_name(address)), None)
    if wrong is not None:
        report.add(
            mark, f"{where}: {describe_value(wrong)} is not the name or the address of a host", value_parsers.HOST_HINT
        )
        return [None] * count
    return [*addresses[:count]]


def _usable(name: str, node: Node, where: str, report: Report) -> bool:
    """Whether a name may be handed to ssh and used as a folder."""
    text, hint = None, None
    user, at, host = name.rpartition("@")
    if at and user and host:
        text, hint = f"`{name}` holds a user", f"write `host: {host}` and `user: {user}`"
    elif name.startswith("-"):
        text = f"a host cannot begin with `-`: `{name}`"
    elif name.count(":") == 1:
        host, _, port = name.partition(":")
        hint = f"write `host: {host}` and `port: {port}`" if port.isdigit() else "a blank must follow a colon"
        text = f"`{name}` holds a port" if port.isdigit() else f"`{name}` is not a host name"
    elif not value_parsers.is_host_name(name):
        text = f"`{name[:60]}` is not a host name"
    if text is not None:
        report.add(node.mark, f"{where}: {text}", hint)
    return text is None


def _check_roles(machines: list[Machine], node: Node, root: Node, report: Report) -> None:
    if machines and all(machine.spec.role is Role.SPARE for machine in machines) and not report.problems:
        mark = root.key_mark("hosts") if "hosts" in root.keys else node.mark
        report.add(mark, "hosts: every host is a spare", "at least one must have `role: worker`")


def _named(machines: list[Machine], report: Report) -> list[Machine]:
    """Number the copies of local hosts, and refuse every other repetition."""
    copies = Counter(m.spec.host for m in machines)
    _check_repeated(machines, copies, report)
    numbers: Counter[str] = Counter()
    named = []
    for machine in machines:
        host = machine.spec.host
        if copies[host] > 1:
            named.append(replace(machine, spec=replace(machine.spec, name=f"{host}.{numbers[host]}")))
            numbers[host] += 1
        else:
            named.append(machine)
    _check_names(named, report)
    return named


def _check_repeated(machines: list[Machine], copies: Counter[str], report: Report) -> None:
    seen: dict[str, Machine] = {}
    by_address: dict[tuple[str, int | None], Machine] = {}
    for machine in machines:
        spec = machine.spec
        first = seen.setdefault(spec.host, machine)
        local = spec.transport is first.spec.transport is TransportKind.LOCAL
        if first is not machine and not local:
            hint = f"first {_place(first, machine)}; only hosts with `transport: local` may repeat"
            report.add(machine.mark, f"{label(machine.entry.path)}: `{spec.host}` is listed twice", hint)
        elif spec.transport is not TransportKind.LOCAL and copies[spec.host] == 1:
            other = by_address.setdefault((spec.address or spec.host, spec.port), machine)
            if other is not machine:
                at = machine.entry.node.child("address") or machine.entry.node
                text = f"{label(machine.entry.path)}: `{spec.host}` and `{other.spec.host}` have one address"
                report.add(at.mark, text, f"`{spec.address or spec.host}` is taken {_place(other, machine)}")


def _place(first: Machine, second: Machine) -> str:
    if not first.mark.document.places:
        return f"by {first.mark.document.path}"
    if first.mark.document is second.mark.document:
        return f"on line {first.mark.line}" if first.mark.line != second.mark.line else "in the same line"
    return f"in {first.mark.place}"


def _check_names(machines: list[Machine], report: Report) -> None:
    names: set[str] = set()
    for machine in machines:
        name = machine.spec.name
        if name in names and machine.spec.name != machine.spec.host:
            report.add(machine.mark, f"`{name}` names two nodes", "rename the host that is called so")
        names.add(name)


def suggestion(word: str, words: list[str]) -> str | None:
    """A hint that names the closest word."""
    close = similar(word, words)
    return f"did you mean `{close}`?" if close else None
