"""A check, and its view of one node or of all nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from clusterctl.health.context import Context, Expectation
from clusterctl.health.model import NVIDIA, Action, Finding, Outcome, Status, unknown

Facts = dict[str, Any]
"""The result of `clusterctl.agent.facts.collect` plus the key `controller` (see `Context`)."""


class NotJudgedError(Exception):
    """A check has nothing to judge.

    Attributes:
        outcome: Why.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FactGroup:
    """One group of facts. The status is ok, timeout, error, denied or absent."""

    status: str
    reason: str | None
    data: dict[str, Any]
    ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The view of a check on one node."""

    node: str
    facts: Facts
    context: Context
    check: Check

    @property
    def expected(self) -> Expectation:
        """The declaration of this node in the cluster file."""
        return self.context.nodes.get(self.node, Expectation())

    @property
    def controller(self) -> dict[str, Any]:
        """Facts that only the controller knows about this node."""
        facts = self.facts.get("controller")
        return facts if isinstance(facts, dict) else {}

    def group(self, name: str | None = None) -> FactGroup:
        """Return a group of facts; `absent` if it was not requested."""
        name = name or self.check.group or ""
        raw = (self.facts.get("groups") or {}).get(name)
        if not isinstance(raw, dict):
            return FactGroup(status="absent", reason=f"`{name}` was not looked at", data={}, ms=None)
        return FactGroup(
            status=str(raw.get("status", "error")),
            reason=raw.get("reason"),
            data=raw.get("data") or {},
            ms=raw.get("ms"),
        )

    def read(self, name: str, if_missing: str) -> Any:
        """Return a value of the check's group of facts.

        Raises:
            NotJudgedError: The value is missing; the check is UNKNOWN for the reason `if_missing`.
        """
        value = self.group().data.get(name)
        if value is None:
            raise NotJudgedError(unknown(if_missing))
        return value

    def limit(self, name: str) -> float:
        """Return the threshold `name` of this check from the cluster file, else from the registry."""
        return float(self.context.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """The view of a check on all nodes: one `NodeView` per node that gave facts."""

    views: tuple[NodeView, ...]
    context: Context
    check: Check

    def limit(self, name: str) -> float:
        """Return the threshold `name` of this check from the cluster file, else from the registry."""
        return float(self.context.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


AnyView = TypeVar("AnyView", NodeView, ClusterView)
NodeJudge = Callable[[NodeView], Outcome | Iterable[Outcome]]
ClusterJudge = Callable[[ClusterView], Outcome | Iterable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. The reference page is generated from the registry of checks.

    Attributes:
        name: `family.thing`.
        family: The heading in the documentation.
        source: Where the facts come from.
        threshold: What is healthy, in words.
        doc: What the check is for, one or two sentences.
        severity: The worst status that the check gives by default: `FAIL` or `WARN`.
        remedy: The default hint.
        group: The group of facts that the check needs; UNKNOWN if that is not ok. `None`: the judge asks for groups
            itself.
        gpu: The check concerns GPUs: SKIP if none is declared or present.
        vendors: GPU vendors that the check supports; SKIP for the others.
        by_vendor: Vendor to the judge of a node with its GPUs, if that is not `node_judge`; `vendors` lists it, too.
        root: If ordinary users may be unable to read the source: what covers the check instead, in words. `None`:
            anybody can.
        witness: For a node whose source is not readable: judges by what everybody can read; `None` if that is not
            enough.
        action: The default action.
        thresholds: Numbers that `health.thresholds` may override as `name.key`.
        node_judge: Judges one node, or `None`.
        cluster_judge: Judges all nodes, or `None`.
    """

    name: str
    family: str
    source: str
    threshold: str
    doc: str
    severity: str = "FAIL"
    remedy: str = ""
    group: str | None = None
    gpu: bool = False
    vendors: tuple[str, ...] = (NVIDIA,)
    by_vendor: Mapping[str, NodeJudge] = field(default_factory=dict)
    root: str | None = None
    witness: Callable[[NodeView], Outcome | None] | None = None
    action: Action = Action.NONE
    thresholds: Mapping[str, float] = field(default_factory=dict)
    node_judge: NodeJudge | None = None
    cluster_judge: ClusterJudge | None = None

    def finding(self, outcome: Outcome, *, node: str | None, duration_ms: float | None = None) -> Finding:
        """Make a finding from an outcome and the defaults of this check."""
        adverse = outcome.status in (Status.WARN, Status.FAIL)
        hint = outcome.hint or (self.remedy if adverse else None)
        action = outcome.action or (self.action if adverse else Action.NONE)
        return Finding(
            check=self.name,
            status=outcome.status,
            message=outcome.message,
            hint=hint,
            action=action.value,
            value=outcome.value,
            expected=outcome.expected,
            node=outcome.node or node,
            gpu=outcome.gpu,
            duration_ms=duration_ms,
            needs_root=outcome.needs_root,
            key=outcome.key,
        )


def run_judge(judge: Callable[[AnyView], Outcome | Iterable[Outcome]], view: AnyView) -> list[Outcome]:
    """Return the outcomes of a judge."""
    try:
        outcomes = judge(view)
        return [outcomes] if isinstance(outcomes, Outcome) else list(outcomes)
    except NotJudgedError as stop:
        return [stop.outcome]


def node_check(name: str, family: str, **fields: Any) -> Callable[[NodeJudge], Check]:
    """Make a check from a function that judges one node; its docstring documents the check."""
    return lambda judge: Check(name=name, family=family, node_judge=judge, **read_docstring(judge), **fields)


def cluster_check(name: str, family: str, **fields: Any) -> Callable[[ClusterJudge], Check]:
    """Make a check from a function that judges all nodes together; its docstring documents the check."""
    return lambda judge: Check(name=name, family=family, cluster_judge=judge, **read_docstring(judge), **fields)


def remedy(action: Action, text: str) -> Callable[[Check], Check]:
    """Give a check its default action and hint."""
    return lambda check: replace(check, action=action, remedy=text)


_SECTIONS = {"Source": "source", "Healthy": "threshold"}


def read_docstring(judge: Callable[..., object]) -> dict[str, Any]:
    """Return the documentation of a check: the text of a docstring, and its sections `Source` and `Healthy`."""
    doc, *sections = re.split(rf"\n *({'|'.join(_SECTIONS)}): ", judge.__doc__ or "")
    texts = {"doc": doc, **dict(zip(map(_SECTIONS.__getitem__, sections[::2]), sections[1::2], strict=True))}
    return {key: " ".join(text.split()) for key, text in texts.items()}
