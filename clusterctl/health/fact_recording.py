"""Makes and judges recordings: files with the facts of nodes, so that checks can run on another machine.

No function does I/O.

    {"recording": 1, "version": of the clusterctl that wrote it, "framework", "expect", "ignore", "severity",
     "required", "thresholds",
     "nodes": [{"node", "gpus", "workdir", "workers", "env": [name], "spare",
                "facts": {...} | null: not collected}]}

The file does not identify the nodes (`anonymizer.py`). The file contains the `health` section of the cluster file,
because findings depend on this section.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from clusterctl._version import __version__
from clusterctl.errors import RefusedError
from clusterctl.health.anonymizer import Anonymizer
from clusterctl.health.check import Facts
from clusterctl.health.findings import Finding
from clusterctl.health.judge import judge_all
from clusterctl.health.settings import HealthSettings, NodeDeclaration

FORMAT = 1
_KEY = "recording"


def make_recording(
    facts: Mapping[str, Facts], settings: HealthSettings, addresses: Iterable[str] = ()
) -> dict[str, Any]:
    """Return the recording of some nodes.

    Args:
        facts: Facts by node.
        settings: The `health` section of the cluster file. This section may name more nodes than `facts`.
        addresses: Addresses of the nodes, which may occur in the facts and are replaced too.
    """
    disguise = Anonymizer(settings.nodes, addresses, list(facts.values()))
    names = {node: disguise.anonymize_text(node) for node in settings.nodes}
    return {
        _KEY: FORMAT,
        "version": __version__,
        "framework": settings.framework,
        "expect": disguise.anonymize(dict(settings.expect)),
        "ignore": _expand_ignore_rules(settings.ignore, names),
        "severity": dict(settings.severity),
        "required": list(settings.required),
        "thresholds": dict(settings.thresholds),
        "nodes": [
            {
                "node": names[node],
                "gpus": declared.gpus,
                "workdir": disguise.anonymize(declared.workdir),
                "workers": declared.workers,
                "env": sorted(declared.env),
                "spare": node in settings.spares,
                "facts": disguise.anonymize(dict(facts[node])) if node in facts else None,
            }
            for node, declared in settings.nodes.items()
        ],
    }


def _expand_ignore_rules(ignore: Iterable[str], nodes: Mapping[str, str]) -> list[str]:
    """Return the rules of `health.ignore` with the new node names: one rule for each node that a pattern matches."""
    rules = []
    for rule in ignore:
        check, at, where = rule.partition("@")
        rules += [f"{check}@{other}" for node, other in nodes.items() if fnmatchcase(node, where)] if at else [rule]
    return rules


def judge_recording(value: Any, checks: Collection[str] | None = None) -> tuple[dict[str, Facts], list[Finding]]:
    """Judge a recording; return its facts and the findings.

    Args:
        value: The content of the file as JSON.
        checks: Names of the checks to run; `None` for all.

    Raises:
        RefusedError: The file is no recording, or its format is unknown.
    """
    if not isinstance(value, dict) or _KEY not in value:
        raise RefusedError("not a recording", hint="`clusterctl health --record FILE` writes one")
    if value[_KEY] != FORMAT:
        raise RefusedError(
            f"a recording of format {value[_KEY]}, written by clusterctl {value.get('version')}",
            hint=f"this is clusterctl {__version__}, which reads format {FORMAT}; use a newer clusterctl",
        )
    try:
        facts, settings = read_recording(value)
        return facts, judge_all(facts, settings, checks)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Checks assume facts in the agent's format, but the file may contain anything.
        raise RefusedError(f"a damaged recording ({type(error).__name__}: {error})") from error


def read_recording(value: Mapping[str, Any]) -> tuple[dict[str, Facts], HealthSettings]:
    """Return the facts and the settings of a recording.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: A field is missing or invalid.
    """
    entries = value["nodes"]
    settings = HealthSettings(
        nodes={entry["node"]: _parse_declaration(entry) for entry in entries},
        spares=frozenset(entry["node"] for entry in entries if entry["spare"]),
        expect=dict(value["expect"]),
        ignore=tuple(value["ignore"]),
        severity=dict(value["severity"]),
        required=tuple(value["required"]),
        thresholds={name: float(number) for name, number in value["thresholds"].items()},
        framework=value["framework"],
    )
    return {entry["node"]: dict(entry["facts"]) for entry in entries if entry["facts"] is not None}, settings


def _parse_declaration(entry: Mapping[str, Any]) -> NodeDeclaration:
    env, workers = frozenset(map(str, entry.get("env") or ())), entry.get("workers")
    return NodeDeclaration(gpus=_parse_gpus(entry["gpus"]), workdir=entry["workdir"], workers=workers, env=env)


def _parse_gpus(value: Any) -> int | tuple[int, ...] | None:
    return tuple(map(int, value)) if isinstance(value, list) else value
