"""The resolved cluster file: the spec written as a cluster file with all defaults, and the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from typing_extensions import override

from clusterctl.config.secret_redaction import REDACTED
from clusterctl.config.sections.section_declarations import CLUSTER_FILE, HOST
from clusterctl.config.sections.spec_builder import BuiltSpec
from clusterctl.config.spec import ClusterSpec
from clusterctl.config.text.interpolation import escape_variables, is_shell_text_key, list_shell_text_indices
from clusterctl.config.text.tree import KeyPath, format_path
from clusterctl.config.text.yaml_parser import parse_scalar


def build_resolved_document(spec: ClusterSpec) -> dict[str, Any]:
    """Return a cluster file with all defaults, as dicts. Parsing it gives the same spec, except for the secrets."""
    document: dict[str, Any] = {"version": 1}
    for name, key in CLUSTER_FILE.keys.items():
        if hasattr(spec, name):
            document[name] = key.format_value(getattr(spec, name))
    document["hosts"] = [{"host": host.host} | HOST.format_value(host) for host in spec.hosts]
    document["secrets"] = dict.fromkeys(spec.secrets, REDACTED)
    return {key: value for key, value in document.items() if value is not None}


class _Dumper(yaml.SafeDumper):
    """A YAML writer that quotes texts which YAML 1.2 would read as another type."""

    @override
    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values repeatedly instead of as YAML aliases."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if not isinstance(parse_scalar(text), str) else "|" if "\n" in text.rstrip("\n") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def render_yaml(document: Mapping[str, Any]) -> str:
    """Return the YAML of a resolved document; it is a valid cluster file."""
    text: str = yaml.dump(
        _escape_variables(document),
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
        default_flow_style=False,
    )
    return text


def _escape_variables(value: Any, path: KeyPath = ()) -> Any:
    """Escape `$` in all texts: the values are already interpolated, and the loader will interpolate them again."""
    if isinstance(value, str):
        return escape_variables(value, is_shell=is_shell_text_key(path))
    if isinstance(value, list):
        shell = list_shell_text_indices(path, value)
        return [
            escape_variables(v, is_shell=True) if i in shell else _escape_variables(v, (*path, i))
            for i, v in enumerate(value)
        ]
    return {key: _escape_variables(v, (*path, key)) for key, v in value.items()} if isinstance(value, dict) else value


def iterate_leaves(document: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield path and value of each leaf of a document; a list is a leaf, except for `hosts`."""
    if isinstance(document, dict) and document:
        for key, value in document.items():
            yield from iterate_leaves(value, (*path, key))
    elif isinstance(document, list) and path == ("hosts",):
        for index, value in enumerate(document):
            yield from iterate_leaves(value, (*path, index))
    else:
        yield path, document


def list_value_origins(spec: ClusterSpec, built: BuiltSpec) -> dict[str, str]:
    """Return the origin of each leaf of the resolved file."""
    places: dict[str, str] = {}
    for path, _ in iterate_leaves(build_resolved_document(spec)):
        if path[0] == "hosts" and len(path) > 1:
            node = built.declared_hosts[int(path[1])].entry.node.find(*path[2:])
            node = node if node is not None and node.value is not None else built.root.find("defaults", *path[2:])
        elif path[0] == "env" and len(path) > 1:
            node = built.env_node.child(path[1])
        else:
            node = built.root.find(*path)
        places[format_path(path)] = node.mark.place if node is not None and node.value is not None else "default"
    return places
