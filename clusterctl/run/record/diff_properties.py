"""Reads the properties of a run that `diff` compares, from the files of the run on the head."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.run.record.run_origin import read_json_object, read_origin
from clusterctl.run.record.rundir import RunDir


class Topic(str, Enum):
    """The topics of properties, in the order in which `diff` prints the topics."""

    COMMAND = "command"
    CODE = "code"
    SPEC = "spec"
    ENVIRONMENT = "environment"
    NODES = "nodes"
    VERSIONS = "versions"
    HEALTH = "health"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class PropertyKey:
    """Identifies a property; `node` is `None` if the property is not about one node."""

    topic: Topic
    name: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class PropertyValue:
    """The value of a property. Values with the same `compare_key` count as equal, even if the shown texts differ."""

    shown: str
    compare_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProperties:
    """The properties of a run. If `has_health` is true, the nodes were checked, so software versions are known."""

    run: str
    properties: dict[PropertyKey, PropertyValue] = field(default_factory=dict)
    has_health: bool = False


_RUN_VARIABLES = ("CLUSTERCTL_", "MASTER_", "TORCHELASTIC_", "JAX_COORDINATOR")
"""Variables whose values differ in every run."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "ROLE_NAME")
"""Suffixes of variables whose values follow from the properties of nodes."""
_GOOD_STATUSES = ("PASS", "SKIP")


def read_run_properties(run: RunDir, outcome: dict[str, str]) -> RunProperties:
    """Return the properties of a run. Files that cannot be read give no properties.

    Args:
        run: The run.
        outcome: The outcome of the run: texts by name.
    """
    spec, health = read_json_object(run.spec), read_json_object(run.path / "health.json")
    properties: dict[PropertyKey, PropertyValue] = {}
    parts = (
        _list_origin_properties(run),
        _list_code_properties(run),
        _list_spec_properties(spec),
        _list_environment_properties(run, spec),
        _list_node_properties(spec),
        _list_health_properties(health),
    )
    for part in parts:
        properties.update(part)
    properties.update((PropertyKey(Topic.OUTCOME, what), PropertyValue(value)) for what, value in outcome.items())
    return RunProperties(run=run.run, properties=properties, has_health=bool(health))


def _list_origin_properties(run: RunDir) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    known = read_origin(run)
    if known is None:
        return
    for section, what, value in (
        (Topic.COMMAND, "runs", known.command),
        (Topic.COMMAND, "by", f"{known.user}@{known.host}"),
        (Topic.COMMAND, "file", known.file),
        (Topic.COMMAND, "folder", known.folder),
    ):
        yield PropertyKey(section, what), PropertyValue(value)
    if known.commit is not None:
        yield PropertyKey(Topic.CODE, "commit"), PropertyValue(known.commit.commit)
        yield PropertyKey(Topic.CODE, "branch"), PropertyValue(known.commit.branch)
        yield PropertyKey(Topic.CODE, "files that differ from the commit"), PropertyValue(str(known.commit.changes))


def _list_code_properties(run: RunDir) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    """Yield a property for each synced file."""
    for path, entry in _as_dict(read_json_object(run.manifest).get("files")).items():
        if isinstance(entry, list) and len(entry) == 3:
            size, _, digest = entry
            yield PropertyKey(Topic.CODE, path), PropertyValue(f"{size} bytes, {str(digest)[:10]}", str(entry[1:]))


def _list_spec_properties(spec: dict[str, Any]) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    for key, value in spec.items():
        if key not in ("hosts", "env", "path"):
            shown = _hide_job_secrets(value) if key == "job" and isinstance(value, dict) else value
            for (what, leaf), (_, text) in zip(_flatten(value, key), _flatten(shown, key), strict=True):
                yield PropertyKey(Topic.SPEC, what), PropertyValue(text, leaf)


def _hide_job_secrets(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job without secrets in its arguments."""
    args, command = [str(word) for word in _as_list(job.get("args"))], job.get("command")
    return {
        **job,
        **({"args": redact_words(args)} if args else {}),
        **({"command": redact_text(command)} if isinstance(command, str) else {}),
    }


def _list_environment_properties(run: RunDir, spec: dict[str, Any]) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    """Yield the environment of rank 0. Without a launch plan, yield the environment in the cluster file."""
    nodes = _as_list(read_json_object(run.plan(0)).get("nodes"))
    workers = _as_list(_as_dict(nodes[0] if nodes else None).get("workers"))
    environment = _as_dict(_as_dict(workers[0] if workers else None).get("env")) or _as_dict(spec.get("env"))
    for name, value in environment.items():
        if not name.startswith(_RUN_VARIABLES) and not name.endswith(_RANK_VARIABLES):
            yield PropertyKey(Topic.ENVIRONMENT, name), PropertyValue(str(value))


def _list_node_properties(spec: dict[str, Any]) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    for host in map(_as_dict, _as_list(spec.get("hosts"))):
        node = str(host.get("name"))
        yield PropertyKey(Topic.NODES, "takes part", node), PropertyValue(str(host.get("role")))
        for name, value in host.items():
            if name not in ("name", "role"):
                for what, leaf in _flatten(value, name):
                    yield PropertyKey(Topic.NODES, what, node), PropertyValue(leaf)


def _list_health_properties(health: dict[str, Any]) -> Iterator[tuple[PropertyKey, PropertyValue]]:
    for node, facts in _as_dict(health.get("facts")).items():
        groups = _as_dict(_as_dict(facts).get("groups"))
        versions = _as_dict(_as_dict(groups.get("versions")).get("data"))
        host, library = (_as_dict(_as_dict(groups.get(group)).get("data")) for group in ("host", "nvml"))
        software = {
            **versions,
            "kernel": host.get("kernel"),
            "distro": host.get("distro"),
            "driver": library.get("driver"),
        }
        for name, value in software.items():
            for what, leaf in _flatten(value, name):
                yield PropertyKey(Topic.VERSIONS, what.removeprefix("names."), node), PropertyValue(leaf)
    for finding in map(_as_dict, _as_list(health.get("findings"))):
        status = str(finding.get("status"))
        if status not in _GOOD_STATUSES:
            place = finding.get("node")
            gpu = "" if finding.get("gpu") is None else f" (GPU {finding['gpu']})"
            key = PropertyKey(Topic.HEALTH, f"{finding.get('check')}{gpu}", None if place is None else str(place))
            yield key, PropertyValue(f"{status}: {finding.get('message')}", status)


# --- values


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield the values in decoded JSON, each with its dotted name. Nulls are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
