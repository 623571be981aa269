"""All that two runs may differ in, from the files of a run on the head: flat, each fact under its name."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from clusterctl.config.secret_redaction import redact_text, redact_words
from clusterctl.run.record import origin

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clusterctl.run.record.rundir import RunDir


class Section(str, Enum):
    """What a fact is about, in the order in which people read."""

    COMMAND = "command"
    CODE = "code"
    SPEC = "spec"
    ENVIRONMENT = "environment"
    NODES = "nodes"
    VERSIONS = "versions"
    HEALTH = "health"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True)
class FactKey:
    """The name of a fact; `node`: the one that it is about, or `None`."""

    section: Section
    what: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact. Two are the same where `mark` is: what is shown may hold a number that is never the same twice."""

    shown: str
    compare_key: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run. `looked_at`: its nodes were checked before it began, so that versions and health are known."""

    run: str
    facts: dict[FactKey, Fact] = field(default_factory=dict)
    has_health: bool = False


_RUN_VARIABLES = ("CLUSTERCTL_", "MASTER_", "TORCHELASTIC_", "JAX_COORDINATOR")
"""Variables that each run has of its own."""
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "ROLE_NAME")
"""Endings of names of variables that say again what `nodes` says."""
_GOOD_STATUSES = ("PASS", "SKIP")


def read_run_facts(run: RunDir, outcome: dict[str, str]) -> RunFacts:
    """Return what is known of a run; what cannot be read is left out.

    Args:
        run: Which.
        outcome: How it ended, in words.
    """
    spec, health = _read_mapping(run.spec), _read_mapping(run.path / "health.json")
    facts: dict[FactKey, Fact] = {}
    parts = (
        _list_origin_facts(run),
        _list_code_facts(run),
        _list_spec_facts(spec),
        _list_environment_facts(run, spec),
        _list_node_facts(spec),
        _list_health_facts(health),
    )
    for part in parts:
        facts.update(part)
    facts.update((FactKey(Section.OUTCOME, what), Fact(value)) for what, value in outcome.items())
    return RunFacts(run=run.run, facts=facts, has_health=bool(health))


def _list_origin_facts(run: RunDir) -> Iterator[tuple[FactKey, Fact]]:
    known = origin.read_origin(run)
    if known is None:
        return
    for section, what, value in (
        (Section.COMMAND, "runs", known.command),
        (Section.COMMAND, "by", f"{known.user}@{known.host}"),
        (Section.COMMAND, "file", known.file),
        (Section.COMMAND, "folder", known.folder),
    ):
        yield FactKey(section, what), Fact(value)
    if known.commit is not None:
        yield FactKey(Section.CODE, "commit"), Fact(known.commit.commit)
        yield FactKey(Section.CODE, "branch"), Fact(known.commit.branch)
        yield FactKey(Section.CODE, "files that differ from the commit"), Fact(str(known.commit.changes))


def _list_code_facts(run: RunDir) -> Iterator[tuple[FactKey, Fact]]:
    """Give what was synced, by file."""
    for path, entry in _as_dict(_read_mapping(run.manifest).get("files")).items():
        if isinstance(entry, list) and len(entry) == 3:
            size, _, digest = entry
            yield FactKey(Section.CODE, path), Fact(f"{size} bytes, {str(digest)[:10]}", str(entry[1:]))


def _list_spec_facts(spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    for key, value in spec.items():
        if key not in ("hosts", "env", "path"):
            shown = _hide_job_secrets(value) if key == "job" and isinstance(value, dict) else value
            for (what, leaf), (_, text) in zip(_flatten(value, key), _flatten(shown, key), strict=True):
                yield FactKey(Section.SPEC, what), Fact(text, leaf)


def _hide_job_secrets(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose arguments may be shown."""
    args, command = [str(word) for word in _as_list(job.get("args"))], job.get("command")
    return {
        **job,
        **({"args": redact_words(args)} if args else {}),
        **({"command": redact_text(command)} if isinstance(command, str) else {}),
    }


def _list_environment_facts(run: RunDir, spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    """Give the environment of rank 0; where it was never planned, what the file says for all."""
    nodes = _as_list(_read_mapping(run.plan(0)).get("nodes"))
    workers = _as_list(_as_dict(nodes[0] if nodes else None).get("workers"))
    environment = _as_dict(_as_dict(workers[0] if workers else None).get("env")) or _as_dict(spec.get("env"))
    for name, value in environment.items():
        if not name.startswith(_RUN_VARIABLES) and not name.endswith(_RANK_VARIABLES):
            yield FactKey(Section.ENVIRONMENT, name), Fact(str(value))


def _list_node_facts(spec: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
    for host in map(_as_dict, _as_list(spec.get("hosts"))):
        node = str(host.get("name"))
        yield FactKey(Section.NODES, "takes part", node), Fact(str(host.get("role")))
        for name, value in host.items():
            if name not in ("name", "role"):
                for what, leaf in _flatten(value, name):
                    yield FactKey(Section.NODES, what, node), Fact(leaf)


def _list_health_facts(health: dict[str, Any]) -> Iterator[tuple[FactKey, Fact]]:
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
                yield FactKey(Section.VERSIONS, what.removeprefix("names."), node), Fact(leaf)
    for finding in map(_as_dict, _as_list(health.get("findings"))):
        status = str(finding.get("status"))
        if status not in _GOOD_STATUSES:
            place = finding.get("node")
            gpu = "" if finding.get("gpu") is None else f" (GPU {finding['gpu']})"
            key = FactKey(Section.HEALTH, f"{finding.get('check')}{gpu}", None if place is None else str(place))
            yield key, Fact(f"{status}: {finding.get('message')}", status)


# --- values


def _flatten(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Give what is in a value that was JSON, each with its dotted name; what is not known is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, f"{name}.{key}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        return _as_dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
