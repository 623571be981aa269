"""What a check is, and the view that it has of one node or of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clusterctl.health.context import Context, Expectation
from clusterctl.health.model import Action, Finding, Outcome, Status
from clusterctl.health.vendors import NVIDIA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

Facts = dict[str, Any]
"""What `clusterctl.agent.facts.collect` returned, plus the key `controller` (see `Context`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of facts as its child left it: status is ok, timeout, error, denied or absent."""

    status: str
    reason: str | None
    data: dict[str, Any]
    ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a node's check may look at."""

    node: str
    facts: Facts
    context: Context
    check: Check

    @property
    def expected(self) -> Expectation:
        """What was declared for this node."""
        return self.context.nodes.get(self.node, Expectation())

    @property
    def controller(self) -> dict[str, Any]:
        """What the controller knows about this node."""
        told = self.facts.get("controller")
        return told if isinstance(told, dict) else {}

    def group(self, name: str | None = None) -> Group:
        """Return a group of facts; one that was not asked for is `absent`."""
        name = name or self.check.group or ""
        raw = (self.facts.get("groups") or {}).get(name)
        if not isinstance(raw, dict):
            return Group(status="absent", reason=f"`{name}` was not looked at", data={}, ms=None)
        return Group(
            status=str(raw.get("status", "error")),
            reason=raw.get("reason"),
            data=raw.get("data") or {},
            ms=raw.get("ms"),
        )

    def limit(self, name: str) -> float:
        """Return the number `name` of this check, as the cluster file or the registry has it."""
        return float(self.context.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterView:
    """What a check over all nodes may look at: one view a node that gave facts."""

    views: tuple[View, ...]
    context: Context
    check: Check

    def limit(self, name: str) -> float:
        """Return the number `name` of this check, as the cluster file or the registry has it."""
        return float(self.context.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that is looked at; the registry of them is also the reference page.

    Attributes:
        name: `family.thing`.
        family: Under which heading it stands in the documentation.
        source: Where the facts come from.
        threshold: In words, what is healthy.
        severity: The worst that it says by itself: `FAIL` or `WARN`.
        remedy: The standing hint.
        doc: What it is for, one or two sentences.
        group: The group of facts it needs, UNKNOWN where that is not ok; `None` where the judge asks by itself.
        gpu: It concerns GPUs: SKIP where none is declared or there.
        vendors: Whose GPUs it can judge; SKIP on those of others.
        by_vendor: Vendor to what judges a node with its GPUs, where that is not `node_judge`; `vendors` names it too.
        root: Its source may be closed to ordinary users; what then covers it, in words. `None`: anybody may look.
        witness: Given a node whose source is closed, says whether what anybody may see covers it: an outcome, or `None`
            where it does not.
        action: The standing action.
        thresholds: Numbers that `health.thresholds` may override as `name.key`.
        node_judge: Judges one node, or `None`.
        cluster_judge: Judges all nodes, or `None`.
    """

    name: str
    family: str
    source: str
    threshold: str
    severity: str
    remedy: str
    doc: str
    group: str | None = None
    gpu: bool = False
    vendors: tuple[str, ...] = (NVIDIA,)
    by_vendor: Mapping[str, Callable[[View], Iterable[Outcome]]] = field(default_factory=dict)
    root: str | None = None
    witness: Callable[[View], Outcome | None] | None = None
    action: Action = Action.NONE
    thresholds: Mapping[str, float] = field(default_factory=dict)
    node_judge: Callable[[View], Iterable[Outcome]] | None = None
    cluster_judge: Callable[[ClusterView], Iterable[Outcome]] | None = None

    def finding(self, outcome: Outcome, *, node: str | None, duration_ms: float | None = None) -> Finding:
        """Fill in what every finding of this check shares."""
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


def node_check(**fields: Any) -> Callable[[Callable[[View], Iterable[Outcome]]], Check]:
    """Make a check of a function that judges one node; the function's docstring is the check's `doc`."""

    def make(judge: Callable[[View], Iterable[Outcome]]) -> Check:
        return Check(name=fields.pop("name"), doc=_sentence(judge), node_judge=judge, **fields)

    return make


def cluster_check(**fields: Any) -> Callable[[Callable[[ClusterView], Iterable[Outcome]]], Check]:
    """Make a check of a function that judges all nodes together."""

    def make(judge: Callable[[ClusterView], Iterable[Outcome]]) -> Check:
        return Check(name=fields.pop("name"), doc=_sentence(judge), cluster_judge=judge, **fields)

    return make


def _sentence(judge: Callable[..., object]) -> str:
    return " ".join((judge.__doc__ or "").split())
