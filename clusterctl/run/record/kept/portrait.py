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
class Key:
    """The name of a fact; `node`: the one that it is about, or `None`."""

    section: Section
    what: str
    node: str | None = None


@dataclass(frozen=True, slots=True)
class Said:
    """A fact. Two are the same where `mark` is: what is shown may hold a number that is never the same twice."""

    shown: str
    mark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Portrait:
    """A run. `looked_at`: its nodes were checked before it began, so that versions and health are known."""

    run: str
    facts: dict[Key, Said] = field(default_factory=dict)
    looked_at: bool = False


_OF_THE_RUN = ("CLUSTERCTL_", "MASTER_", "TORCHELASTIC_", "JAX_COORDINATOR")
"""Variables that each run has of its own."""
_OF_ITS_PLACE = ("RANK", "WORLD_SIZE", "ROLE_NAME")
"""Endings of names of variables that say again what `nodes` says."""
_NO_NEWS = ("PASS", "SKIP")


def portrait(run: RunDir, outcome: dict[str, str]) -> Portrait:
    """Return what is known of a run; what cannot be read is left out.

    Args:
        run: Which.
        outcome: How it ended, in words.
    """
    spec, health = _mapping(run.spec), _mapping(run.path / "health.json")
    facts: dict[Key, Said] = {}
    parts = (_origin(run), _code(run), _spec(spec), _environment(run, spec), _nodes(spec), _health(health))
    for part in parts:
        facts.update(part)
    facts.update((Key(Section.OUTCOME, what), Said(value)) for what, value in outcome.items())
    return Portrait(run=run.run, facts=facts, looked_at=bool(health))


def _origin(run: RunDir) -> Iterator[tuple[Key, Said]]:
    known = origin.read(run)
    if known is None:
        return
    for section, what, value in (
        (Section.COMMAND, "runs", known.command),
        (Section.COMMAND, "by", f"{known.user}@{known.host}"),
        (Section.COMMAND, "file", known.file),
        (Section.COMMAND, "folder", known.folder),
    ):
        yield Key(section, what), Said(value)
    if known.commit is not None:
        yield Key(Section.CODE, "commit"), Said(known.commit.commit)
        yield Key(Section.CODE, "branch"), Said(known.commit.branch)
        yield Key(Section.CODE, "files that differ from the commit"), Said(str(known.commit.changes))


def _code(run: RunDir) -> Iterator[tuple[Key, Said]]:
    """Give what was synced, by file."""
    for path, entry in _dict(_mapping(run.manifest).get("files")).items():
        if isinstance(entry, list) and len(entry) == 3:
            size, _, digest = entry
            yield Key(Section.CODE, path), Said(f"{size} bytes, {str(digest)[:10]}", str(entry[1:]))


def _spec(spec: dict[str, Any]) -> Iterator[tuple[Key, Said]]:
    for key, value in spec.items():
        if key not in ("hosts", "env", "path"):
            shown = _without_secrets(value) if key == "job" and isinstance(value, dict) else value
            for (what, leaf), (_, text) in zip(_leaves(value, key), _leaves(shown, key), strict=True):
                yield Key(Section.SPEC, what), Said(text, leaf)


def _without_secrets(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job whose arguments may be shown."""
    args, command = [str(word) for word in _list(job.get("args"))], job.get("command")
    return {
        **job,
        **({"args": redact_words(args)} if args else {}),
        **({"command": redact_text(command)} if isinstance(command, str) else {}),
    }


def _environment(run: RunDir, spec: dict[str, Any]) -> Iterator[tuple[Key, Said]]:
    """Give the environment of rank 0; where it was never planned, what the file says for all."""
    nodes = _list(_mapping(run.plan(0)).get("nodes"))
    workers = _list(_dict(nodes[0] if nodes else None).get("workers"))
    environment = _dict(_dict(workers[0] if workers else None).get("env")) or _dict(spec.get("env"))
    for name, value in environment.items():
        if not name.startswith(_OF_THE_RUN) and not name.endswith(_OF_ITS_PLACE):
            yield Key(Section.ENVIRONMENT, name), Said(str(value))


def _nodes(spec: dict[str, Any]) -> Iterator[tuple[Key, Said]]:
    for host in map(_dict, _list(spec.get("hosts"))):
        node = str(host.get("name"))
        yield Key(Section.NODES, "takes part", node), Said(str(host.get("role")))
        for name, value in host.items():
            if name not in ("name", "role"):
                for what, leaf in _leaves(value, name):
                    yield Key(Section.NODES, what, node), Said(leaf)


def _health(health: dict[str, Any]) -> Iterator[tuple[Key, Said]]:
    for node, facts in _dict(health.get("facts")).items():
        groups = _dict(_dict(facts).get("groups"))
        versions = _dict(_dict(groups.get("versions")).get("data"))
        host, library = (_dict(_dict(groups.get(group)).get("data")) for group in ("host", "nvml"))
        software = {
            **versions,
            "kernel": host.get("kernel"),
            "distro": host.get("distro"),
            "driver": library.get("driver"),
        }
        for name, value in software.items():
            for what, leaf in _leaves(value, name):
                yield Key(Section.VERSIONS, what.removeprefix("names."), node), Said(leaf)
    for finding in map(_dict, _list(health.get("findings"))):
        status = str(finding.get("status"))
        if status not in _NO_NEWS:
            place = finding.get("node")
            gpu = "" if finding.get("gpu") is None else f" (GPU {finding['gpu']})"
            key = Key(Section.HEALTH, f"{finding.get('check')}{gpu}", None if place is None else str(place))
            yield key, Said(f"{status}: {finding.get('message')}", status)


# --- values


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    """Give what is in a value that was JSON, each with its dotted name; what is not known is left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}")
    elif isinstance(value, list):
        if value:
            yield name, ", ".join(item if isinstance(item, str) else json.dumps(item) for item in value)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _mapping(path: Path) -> dict[str, Any]:
    try:
        return _dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):
        return {}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
