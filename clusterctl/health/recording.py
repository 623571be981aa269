"""Facts of nodes as one file that anybody can send, to be judged anywhere. Pure.

    {"recording": 1, "version": of the clusterctl that wrote it, "framework", "expect", "ignore", "severity",
     "required", "thresholds",
     "nodes": [{"node", "gpus", "workdir", "workers", "env": [name], "spare",
                "facts": {...} | null: was not looked at}]}

Nothing in it tells whose nodes they are (`anonymizer.py`); what the cluster file promises and tolerates is
in it, for verdicts depend on that.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from clusterctl._version import __version__
from clusterctl.errors import RefusedError
from clusterctl.health.anonymizer import Anonymizer
from clusterctl.health.context import Context, Expectation
from clusterctl.health.judge import judge_all

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from clusterctl.health.check import Facts
    from clusterctl.health.model import Finding

FORMAT = 1
_KEY = "recording"


def make_recording(facts: Mapping[str, Facts], context: Context, reached_as: Iterable[str] = ()) -> dict[str, Any]:
    """Return the recording of some nodes.

    Args:
        facts: Of each node that was looked at.
        context: What the cluster file promises and tolerates, of these nodes and maybe more.
        reached_as: Names under which the nodes are reached, where they may stand in messages.
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
    """Return `check@node` patterns of a cluster file, with a rule for each node in place of wildcards."""
    rules = []
    for rule in ignore:
        check, at, where = rule.partition("@")
        rules += [f"{check}@{other}" for node, other in nodes.items() if fnmatchcase(node, where)] if at else [rule]
    return rules


def replay(value: Any, checks: Collection[str] | None = None) -> tuple[dict[str, Facts], list[Finding]]:
    """Return the facts of a recording, and what is to be said of them.

    Args:
        value: What the file holds.
        checks: Names to judge; `None` for all.

    Raises:
        RefusedError: It is no recording, or of a kind that this version does not know.
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
        # Judges rely on the shape that the agent gives to facts; a file may hold anything.
        raise RefusedError(f"a damaged recording ({type(error).__name__}: {error})") from error


def read_recording(value: Mapping[str, Any]) -> tuple[dict[str, Facts], Context]:
    """Return the facts of a recording, and what they are judged by.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: Something is missing, or is not what it should be.
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
