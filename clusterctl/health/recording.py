"""Stores the facts of nodes in one file that can be judged on another machine. Pure.

    {"recording": 1, "version": of the clusterctl that wrote it, "framework", "expect", "ignore", "severity",
     "required", "thresholds",
     "nodes": [{"node", "gpus", "workdir", "workers", "env": [name], "spare",
                "facts": {...} | null: not collected}]}

The file does not identify the nodes (`anonymizer.py`). It contains the `health` section of the cluster file, because
verdicts depend on it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from clusterctl._version import __version__
from clusterctl.errors import RefusedError
from clusterctl.health.anonymizer import Anonymizer
from clusterctl.health.check import Facts
from clusterctl.health.context import Context, Expectation
from clusterctl.health.judge import judge_all
from clusterctl.health.model import Finding

FORMAT = 1
_KEY = "recording"


def make_recording(facts: Mapping[str, Facts], context: Context, reached_as: Iterable[str] = ()) -> dict[str, Any]:
    """Return the recording of some nodes.

    Args:
        facts: Facts by node.
        context: The `health` section for these nodes and maybe more.
        reached_as: Addresses of the nodes, which may appear in messages.
    """
    disguise = Anonymizer(context.nodes, reached_as, list(facts.values()))
    names = {node: disguise.anonymize_text(node) for node in context.nodes}
    return {
        _KEY: FORMAT,
        "version": __version__,
        "framework": context.framework,
        "expect": disguise.anonymize(dict(context.expect)),
        "ignore": _rules(context.ignore, names),
        "severity": dict(context.severity),
        "required": list(context.required),
        "thresholds": dict(context.thresholds),
        "nodes": [
            {
                "node": names[node],
                "gpus": expected.gpus,
                "workdir": disguise.anonymize(expected.workdir),
                "workers": expected.workers,
                "env": sorted(expected.env),
                "spare": node in context.spares,
                "facts": disguise.anonymize(dict(facts[node])) if node in facts else None,
            }
            for node, expected in context.nodes.items()
        ],
    }


def _rules(ignore: Iterable[str], nodes: Mapping[str, str]) -> list[str]:
    """Return the `check@node` patterns of a cluster file with one rule per node in place of wildcards."""
    rules = []
    for rule in ignore:
        check, at, where = rule.partition("@")
        rules += [f"{check}@{other}" for node, other in nodes.items() if fnmatchcase(node, where)] if at else [rule]
    return rules


def judge_recording(value: Any, checks: Collection[str] | None = None) -> tuple[dict[str, Facts], list[Finding]]:
    """Judge a recording; return its facts and the findings.

    Args:
        value: The content of the file.
        checks: Names to judge; `None` for all.

    Raises:
        RefusedError: It is no recording, or its format is unknown.
    """
    if not isinstance(value, dict) or _KEY not in value:
        raise RefusedError("not a recording", hint="`clusterctl health --record FILE` writes one")
    if value[_KEY] != FORMAT:
        raise RefusedError(
            f"a recording of format {value[_KEY]}, written by clusterctl {value.get('version')}",
            hint=f"this is clusterctl {__version__}, which reads format {FORMAT}; use a newer one",
        )
    try:
        facts, context = read_recording(value)
        return facts, judge_all(facts, context, checks)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        # Judges rely on the shape of the agent's facts; a file may contain anything.
        raise RefusedError(f"a damaged recording ({type(error).__name__}: {error})") from error


def read_recording(value: Mapping[str, Any]) -> tuple[dict[str, Facts], Context]:
    """Return the facts and the context of a recording.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: A field is missing or invalid.
    """
    entries = value["nodes"]
    context = Context(
        nodes={entry["node"]: _expectation(entry) for entry in entries},
        spares=frozenset(entry["node"] for entry in entries if entry["spare"]),
        expect=dict(value["expect"]),
        ignore=tuple(value["ignore"]),
        severity=dict(value["severity"]),
        required=tuple(value["required"]),
        thresholds={name: float(number) for name, number in value["thresholds"].items()},
        framework=value["framework"],
    )
    return {entry["node"]: dict(entry["facts"]) for entry in entries if entry["facts"] is not None}, context


def _expectation(entry: Mapping[str, Any]) -> Expectation:
    env, workers = frozenset(map(str, entry.get("env") or ())), entry.get("workers")
    return Expectation(gpus=_gpus(entry["gpus"]), workdir=entry["workdir"], workers=workers, env=env)


def _gpus(value: Any) -> int | tuple[int, ...] | None:
    return tuple(map(int, value)) if isinstance(value, list) else value
