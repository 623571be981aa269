"""The `hosts` section: it loads hosts from other sources, expands ranges, merges defaults and gives unique names."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clusterctl.config import host_ranges as ranges
from clusterctl.config import value_parsers
from clusterctl.config.file_trust import UnsafePermissionsError
from clusterctl.config.sections import hostfiles_and_slurm
from clusterctl.config.sections.build_context import BuildContext
from clusterctl.config.sections.foreign_host_lists import parse_host_list
from clusterctl.config.sections.hostfiles_and_slurm import HostListError, ListedHost
from clusterctl.config.sections.section_declarations import HOST
from clusterctl.config.sections.section_validation import validate_section
from clusterctl.config.spec import HostSpec, Role, TransportKind
from clusterctl.config.text.tree import KeyPath, Mark, Problems, TreeNode, format_path
from clusterctl.config.value_parsers import describe_value
from clusterctl.suggestion import find_similar


@dataclass(frozen=True)
class HostEntry:
    """An entry of `hosts` as a mapping with the key `host`; `path` and `mark` are the entry's position in the file."""

    path: KeyPath
    node: TreeNode
    mark: Mark


def convert_hosts_to_entries(hosts: TreeNode, report: Problems) -> list[HostEntry]:
    """Convert `hosts` from any form (text, mapping or list) to a list of entries."""
    if isinstance(hosts.value, str):
        return [HostEntry(("hosts",), _build_entry_node(hosts), hosts.mark)]
    if isinstance(hosts.value, dict):
        items = [_parse_mapping_entry(hosts, key, child, report) for key, child in hosts.value.items()]
        return [item for item in items if item is not None]
    if isinstance(hosts.value, list):
        listed = [_parse_list_entry(("hosts", i), child, report) for i, child in enumerate(hosts.value)]
        return [item for item in listed if item is not None]
    report.add(hosts.mark, f"hosts: must be text, a mapping or a list, not {describe_value(hosts.value)}", _HOSTS_HINT)
    return []


_HOSTS_HINT = "write `gpu[01-02]: 8` below `hosts`"


def _build_entry_node(host: TreeNode, rest: TreeNode | None = None) -> TreeNode:
    entries = {"host": host, **(rest.value if rest is not None else {})}
    keys = {"host": host.mark, **(rest.keys if rest is not None else {})}
    return TreeNode(entries, host.mark, keys=keys)


def _parse_mapping_entry(hosts: TreeNode, key: str, child: TreeNode, report: Problems) -> HostEntry | None:
    path, mark = ("hosts", key), hosts.key_mark(key)
    host = TreeNode(key, mark, raw=key)
    if not isinstance(child.value, dict):
        if child.value is None:
            return HostEntry(path, _build_entry_node(host), mark)
        gpus = TreeNode({"gpus": child}, child.mark, keys={"gpus": child.mark})
        return HostEntry(path, _build_entry_node(host, gpus), mark)
    if "host" in child.value:
        report.add(child.key_mark("host"), f"{format_path(path)}.host: the key above already names the host")
        return None
    return HostEntry(path, _build_entry_node(host, child), mark)


def _parse_list_entry(path: KeyPath, child: TreeNode, report: Problems) -> HostEntry | None:
    if isinstance(child.value, str):
        return HostEntry(path, _build_entry_node(child), child.mark)
    if not isinstance(child.value, dict):
        report.add(child.mark, f"{format_path(path)}: must be a host or a mapping, not {describe_value(child.value)}")
        return None
    if len(child.value) == 1 and _is_short_form(child):
        key = next(iter(child.value))
        gpus = child.value[key].raw or "..."
        host = f'"{key}"' if "[" in key else key
        hint = f"write `- {{host: {host}, gpus: {gpus}}}`, or a mapping without `- `"
        report.add(child.key_mark(key), f"{format_path(path)}: a list item must not be `host: GPUs`", hint)
        return None
    return HostEntry(path, child, child.mark)


def _is_short_form(item: TreeNode) -> bool:
    """Return whether a list item looks like `gpu01: 8`: one unknown key with GPUs as its value."""
    key, value = next(iter(item.value.items()))
    looks_like_gpus = isinstance(value.value, (int, list)) or value.value == "auto"
    return key not in HOST.keys and looks_like_gpus and any(c.isdigit() for c in key)


@dataclass(frozen=True, slots=True)
class DeclaredHost:
    """A host, the entry of the cluster file that lists it, and the position of its name."""

    spec: HostSpec
    entry: HostEntry
    mark: Mark


def build_hosts(root: TreeNode, defaults: Mapping[str, Any], context: BuildContext) -> list[DeclaredHost]:
    """Validate the `hosts` section; return its hosts in order of node rank."""
    report = context.report
    node = root.child("hosts")
    if node is None:
        return []
    if node.value is None or node.value in ("", {}, []):
        mark = node.mark if node.value is not None else root.key_mark("hosts")
        report.add(mark, "hosts: the list is empty", "write `gpu01: 8` below `hosts`: the host and its GPUs")
        return []
    machines: list[DeclaredHost] = []
    for entry in convert_hosts_to_entries(node, report):
        values = validate_section(HOST, entry.node, entry.path, report)
        if values is not None:
            merged = {**defaults, **values, "env": defaults.get("env", {}) | values.get("env", {})}
            if merged.get("identity_file") is not None:
                merged["identity_file"] = context.resolve_for_ssh(merged["identity_file"])
            del merged["host"]
            machines += _expand_entry(merged, entry, report)
        if len(machines) > ranges.MAX_HOSTS:
            report.add(entry.mark, f"hosts: more than {ranges.MAX_HOSTS} hosts")
            return []
    if machines and all(machine.spec.role is Role.SPARE for machine in machines) and not report.problems:
        mark = root.key_mark("hosts") if "hosts" in root.keys else node.mark
        report.add(mark, "hosts: every host is a spare", "at least one host must have `role: worker`")
    return _name_copies(machines, report)


def _expand_entry(values: dict[str, Any], entry: HostEntry, report: Problems) -> list[DeclaredHost]:
    node = entry.node.value["host"]
    names = _expand_names(node, f"{format_path(entry.path)}", report)
    addresses = _assign_addresses(values.pop("address", None), len(names), "address", entry, report)
    internal = _assign_addresses(values.pop("internal_ip", None), len(names), "internal_ip", entry, report)
    machines = []
    for name, address, internal_ip in zip(names, addresses, internal, strict=True):
        if _check_host_name(name, node, format_path(entry.path), report):
            spec = HostSpec(name=name, host=name, address=address, internal_ip=internal_ip, **values)
            machines.append(DeclaredHost(spec, entry, node.mark))
    return machines


def _expand_names(node: TreeNode, where: str, report: Problems) -> list[str]:
    # An IPv6 address has no brackets, because brackets always mean a range.
    try:
        return ranges.expand_hosts(node.value)
    except ranges.HostRangeError as error:
        report.add(node.mark_substring(error.offset, error.length), f"{where}: {error}", error.hint)
        return []


def _assign_addresses(text: str | None, count: int, key: str, entry: HostEntry, report: Problems) -> list[str | None]:
    """Return one address for each host. A range of hosts needs a range with the same number of addresses."""
    if text is None:
        return [None] * count
    node = entry.node.child(key)
    mark = node.mark if node is not None else entry.mark
    where = f"{format_path(entry.path)}.{key}"
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
        report.add(mark, f"{where}: {describe_value(wrong)} is not a host name or an address", value_parsers.HOST_HINT)
        return [None] * count
    return [*addresses[:count]]


def _check_host_name(name: str, node: TreeNode, where: str, report: Problems) -> bool:
    """Return whether a name is safe as an argument of ssh and as a folder name; report a name that is not."""
    text, hint = None, None
    user, at, host = name.rpartition("@")
    if at and user and host:
        text, hint = f"`{name}` contains a user", f"write `host: {host}` and `user: {user}`"
    elif name.startswith("-"):
        text = f"a host name must not begin with `-`: `{name}`"
    elif name.count(":") == 1:
        host, _, port = name.partition(":")
        hint = f"write `host: {host}` and `port: {port}`" if port.isdigit() else "write a blank after the colon"
        text = f"`{name}` contains a port" if port.isdigit() else f"`{name}` is not a host name"
    elif not value_parsers.is_host_name(name):
        text = f"`{name[:60]}` is not a host name"
    if text is not None:
        report.add(node.mark, f"{where}: {text}", hint)
    return text is None


def _name_copies(machines: list[DeclaredHost], report: Problems) -> list[DeclaredHost]:
    """Number the names of a local host that is listed more than once; report any other such host as an error."""
    copies = Counter(m.spec.host for m in machines)
    _check_repeated_hosts(machines, copies, report)
    numbers: Counter[str] = Counter()
    named = []
    for machine in machines:
        host = machine.spec.host
        if copies[host] > 1:
            named.append(replace(machine, spec=replace(machine.spec, name=f"{host}.{numbers[host]}")))
            numbers[host] += 1
        else:
            named.append(machine)
    names = Counter(machine.spec.name for machine in named)
    for machine in named:
        if names[machine.spec.name] > 1 and machine.spec.name != machine.spec.host:
            report.add(machine.mark, f"two nodes have the name `{machine.spec.name}`", "rename the host with this name")
    return named


def _check_repeated_hosts(machines: list[DeclaredHost], copies: Counter[str], report: Problems) -> None:
    first_by_host: dict[str, DeclaredHost] = {}
    by_address: dict[tuple[str, int | None], DeclaredHost] = {}
    for machine in machines:
        spec = machine.spec
        first = first_by_host.setdefault(spec.host, machine)
        local = spec.transport is first.spec.transport is TransportKind.LOCAL
        if first is not machine and not local:
            hint = f"first listed at {first.mark.place}; only hosts with `transport: local` may repeat"
            report.add(machine.mark, f"{format_path(machine.entry.path)}: `{spec.host}` is listed twice", hint)
        elif spec.transport is not TransportKind.LOCAL and copies[spec.host] == 1:
            other = by_address.setdefault((spec.address or spec.host, spec.port), machine)
            if other is not machine:
                at = machine.entry.node.child("address") or machine.entry.node
                text = f"{format_path(machine.entry.path)}: `{spec.host}` and `{other.spec.host}` have the same address"
                report.add(at.mark, text, f"`{spec.address or spec.host}` is also at {other.mark.place}")


def suggest_similar_word(word: str, words: list[str]) -> str | None:
    """Return a hint with the most similar word, or `None`."""
    close = find_similar(word, words)
    return f"did you mean `{close}`?" if close else None


_FROM_HINT = "write `{from: slurm}`, `{from: {file: PATH}}` or `{from: {command: [PROGRAM, ARGUMENT]}}`"


def load_external_hosts_into_tree(root: TreeNode, context: BuildContext) -> TreeNode:
    """Replace `from` in `hosts` by the hosts that `from` describes; report a problem if they cannot be read."""
    hosts = root.child("hosts")
    if hosts is None or not isinstance(hosts.value, dict) or not _is_host_source(hosts.child("from")):
        return root
    source = hosts.value["from"]
    if len(hosts.value) > 1:
        other = next(key for key in hosts.value if key != "from")
        context.report.add(hosts.key_mark(other), "hosts: `from` must be the only key", "move it to `defaults`")
        return _replace_hosts(root, [], hosts)
    try:
        listed = _load_listed_hosts(source, context)
    except HostListError as error:
        context.report.add(source.mark, f"hosts.from: {error}", error.hint)
        listed = []
    has_transport = root.find("defaults", "transport") is not None
    return _replace_hosts(root, [_build_host_node(host, source, has_transport=has_transport) for host in listed], hosts)


def _is_host_source(node: TreeNode | None) -> bool:
    """Return whether a key `from` names a source of hosts, not a host called "from" (`from: 8`, `from: {gpus: 8}`)."""
    if node is None:
        return False
    return (isinstance(node.value, str) and node.value != "auto") or (
        isinstance(node.value, dict) and bool({"file", "command"} & node.value.keys())
    )


def _load_listed_hosts(source: TreeNode, context: BuildContext) -> list[ListedHost]:
    if source.value == "slurm":
        return hostfiles_and_slurm.list_slurm_hosts(context.environ)
    if not isinstance(source.value, dict) or len(source.value) > 1:
        raise HostListError("unknown source", _FROM_HINT)
    ((kind, node),) = source.value.items()
    if kind == "file":
        return parse_host_list(_read_host_list(node.to_plain_value(), context))
    argv = node.to_plain_value()
    if isinstance(argv, list) and None in argv:
        # Interpolation has already reported an error of this item.
        return []
    if not isinstance(argv, list) or not argv or not all(isinstance(w, str) and w.isprintable() for w in argv):
        raise HostListError("the command must be a list of texts", _FROM_HINT)
    if "/" in argv[0] and not argv[0].startswith("/"):
        raise HostListError("the program must be a name on PATH or an absolute path", _FROM_HINT)
    if context.run_host_command is None:
        raise HostListError("this subcommand does not run the command")
    return parse_host_list(context.run_host_command(tuple(argv)))


def _read_host_list(path: object, context: BuildContext) -> str:
    if not isinstance(path, str) or not path:
        raise HostListError("the file must be a path", _FROM_HINT)
    try:
        return context.files.read_trusted(context.resolve(path)).decode("utf-8", "replace")
    except UnsafePermissionsError as error:
        raise HostListError(str(error), error.hint) from error
    except OSError as error:
        raise HostListError(f"{os.path.basename(path)} cannot be read: {error.strerror or error}") from error


_LISTED_KEYS = ("gpus", "workers", "address", "user", "port", "identity_file", "proxy_jump", "python")


def _build_host_node(listed: ListedHost, source: TreeNode, *, has_transport: bool) -> TreeNode:
    def node(value: Any) -> TreeNode:
        return TreeNode(value, source.mark, raw=str(value), quoted=True)

    values = {key: getattr(listed, key) for key in ("host", *_LISTED_KEYS)}
    entries = {key: node(value) for key, value in values.items() if value is not None}
    if listed.transport is not None and not has_transport:
        words = TreeNode([node(word) for word in listed.transport], source.mark)
        entries["transport"] = TreeNode({"command": words}, source.mark)
    return TreeNode(entries, source.mark, keys=dict.fromkeys(entries, source.mark))


def _replace_hosts(root: TreeNode, entries: list[TreeNode], hosts: TreeNode) -> TreeNode:
    value = {**root.value, "hosts": TreeNode(entries, hosts.mark)}
    if not entries:
        # A problem has been reported. Remove `hosts`, so that the empty section is not reported too.
        del value["hosts"]
    return root.replace_entries(value)
