"""Normalization: short forms become long ones, so that validation knows one form only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.config.sections.section_fields import HOST, Section
from clusterctl.config.text.tree import Node, Path, Report, format_path
from clusterctl.config.value_parsers import describe_value

if TYPE_CHECKING:
    from clusterctl.config.text.tree import Mark


@dataclass(frozen=True)
class HostEntry:
    """One entry of `hosts`: a mapping with the key `host`, and where a person finds it."""

    path: Path
    node: Node
    mark: Mark


def normalize_hosts(hosts: Node, report: Report) -> list[HostEntry]:
    """Bring all forms of `hosts` into entries."""
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


_HOSTS_HINT = "write `gpu[01-02]: 8` below it"


def _build_entry_node(host: Node, rest: Node | None = None) -> Node:
    entries = {"host": host, **(rest.value if rest is not None else {})}
    keys = {"host": host.mark, **(rest.keys if rest is not None else {})}
    return Node(entries, host.mark, keys=keys)


def _parse_mapping_entry(hosts: Node, key: str, child: Node, report: Report) -> HostEntry | None:
    path, mark = ("hosts", key), hosts.key_mark(key)
    host = Node(key, mark, raw=key)
    if not isinstance(child.value, dict):
        if child.value is None:
            return HostEntry(path, _build_entry_node(host), mark)
        gpus = Node({"gpus": child}, child.mark, keys={"gpus": child.mark})
        return HostEntry(path, _build_entry_node(host, gpus), mark)
    if "host" in child.value:
        report.add(child.key_mark("host"), f"{format_path(path)}.host: the host is named by the key above already")
        return None
    return HostEntry(path, _build_entry_node(host, child), mark)


def _parse_list_entry(path: Path, child: Node, report: Report) -> HostEntry | None:
    if isinstance(child.value, str):
        return HostEntry(path, _build_entry_node(child), child.mark)
    if not isinstance(child.value, dict):
        report.add(child.mark, f"{format_path(path)}: must be a host or a mapping, not {describe_value(child.value)}")
        return None
    if len(child.value) == 1 and _is_short_form(child):
        key = next(iter(child.value))
        gpus = child.value[key].raw or "..."
        hint = f"write `- {{host: {_quote_for_flow(key)}, gpus: {gpus}}}`, or the entry without `- `"
        report.add(child.key_mark(key), f"{format_path(path)}: a list item cannot be `host: GPUs`", hint)
        return None
    return HostEntry(path, child, child.mark)


def _is_short_form(item: Node) -> bool:
    """Whether a list item looks like `gpu01: 8`: one key that is none of ours, and GPUs."""
    key, value = next(iter(item.value.items()))
    looks_like_gpus = isinstance(value.value, (int, list)) or value.value == "auto"
    return key not in HOST.keys and looks_like_gpus and any(c.isdigit() for c in key)


def _quote_for_flow(text: str) -> str:
    return f'"{text}"' if "[" in text else text


def normalize_section(node: Node, shape: Section) -> Node:
    """Leave out known keys without a value, and take environment and arguments as they were written."""
    if not isinstance(node.value, dict):
        return node
    entries: dict[str, Node] = {}
    for key, child in node.value.items():
        kind = shape.keys.get(key)
        if kind is None:
            entries[key] = child
        elif child.value is not None:
            below = normalize_section(child, kind.type) if isinstance(kind.type, Section) else child
            entries[key] = keep_scalars_as_text(child) if kind.kind.keep_text else below
    return node.with_entries(entries)


def keep_scalars_as_text(node: Node) -> Node:
    """Take the scalars of a mapping or list as written: `1e-3` stays `1e-3`, `yes` stays `yes`."""
    if isinstance(node.value, dict):
        return node.with_entries({key: _keep_text(child) for key, child in node.value.items()})
    if isinstance(node.value, list):
        return Node([_keep_text(child) for child in node.value], node.mark)
    return node


def _keep_text(node: Node) -> Node:
    if node.raw is None or node.value is None:
        return node
    return Node(node.raw, node.mark, raw=node.raw, quoted=node.quoted)
