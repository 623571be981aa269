"""The definition of a check, and the input of a check: one node, or all nodes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from clusterctl.health.findings import NVIDIA, Action, Finding, Outcome, Status, unknown
from clusterctl.health.settings import HealthSettings, NodeDeclaration

Facts = dict[str, Any]
"""The facts of one node: the result of `clusterctl.agent.facts.collect_facts`, plus the key `controller` (see
`HealthSettings`)."""


class NotJudgedError(Exception):
    """A check cannot judge, because facts are missing or the check does not apply.

    Attributes:
        outcome: The outcome of the check, with the reason.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class FactGroup:
    """One group of facts of a node.

    Attributes:
        status: `ok`, `timeout`, `error`, `denied` or `absent`.
        reason: Why the status is not `ok`.
        facts: Name of a fact to its value.
        duration_ms: How long the agent took to collect the group.
    """

    status: str
    reason: str | None
    facts: dict[str, Any]
    duration_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedNode:
    """One node as the input of a check.

    Attributes:
        name: Name of the node.
        facts: All facts of the node.
        settings: The `health` section of the cluster file.
        check: The check that judges the node.
    """

    name: str
    facts: Facts
    settings: HealthSettings
    check: Check

    @property
    def declaration(self) -> NodeDeclaration:
        """The declaration of this node in the cluster file."""
        return self.settings.nodes.get(self.name, NodeDeclaration())

    @property
    def controller(self) -> dict[str, Any]:
        """Facts about this node that only the controller knows."""
        facts = self.facts.get("controller")
        return facts if isinstance(facts, dict) else {}

    def group(self, name: str | None = None) -> FactGroup:
        """Return a group of facts, by default the group of the check.

        The status of a group that was not requested is `absent`.
        """
        name = name or self.check.group or ""
        raw = (self.facts.get("groups") or {}).get(name)
        if not isinstance(raw, dict):
            return FactGroup(status="absent", reason=f"`{name}` was not requested", facts={}, duration_ms=None)
        return FactGroup(
            status=str(raw.get("status", "error")),
            reason=raw.get("reason"),
            facts=raw.get("data") or {},
            duration_ms=raw.get("ms"),
        )

    def read(self, name: str, if_missing: str) -> Any:
        """Return a fact from the group of the check.

        Raises:
            NotJudgedError: The fact is missing. The outcome is UNKNOWN with the message `if_missing`.
        """
        value = self.group().facts.get(name)
        if value is None:
            raise NotJudgedError(unknown(if_missing))
        return value

    def limit(self, name: str) -> float:
        """Return the threshold `name` of this check: the value of the cluster file, else the default."""
        return float(self.settings.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedCluster:
    """The nodes with facts, as the input of a check that compares nodes."""

    nodes: tuple[CheckedNode, ...]
    settings: HealthSettings
    check: Check

    def limit(self, name: str) -> float:
        """Return the threshold `name` of this check: the value of the cluster file, else the default."""
        return float(self.settings.thresholds.get(f"{self.check.name}.{name}", self.check.thresholds[name]))


Checked = TypeVar("Checked", CheckedNode, CheckedCluster)
NodeJudge = Callable[[CheckedNode], Outcome | Iterable[Outcome]]
ClusterJudge = Callable[[CheckedCluster], Outcome | Iterable[Outcome]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check. The page `docs/health.md` is generated from all checks.

    Attributes:
        name: Name of the check, such as `gpu.count`: the family, a dot, and what the check judges.
        family: The heading above the check in `docs/health.md`.
        source: A text that names the sources of the facts.
        threshold: A text that says which values are healthy.
        purpose: What the check is for, in one or two sentences.
        severity: The worst default status of the check: `FAIL` or `WARN`.
        remedy: The hint of findings whose outcome has no hint.
        group: The group of facts that the check needs. If the status of the group is not `ok`, the check is UNKNOWN.
            `None`: the judge selects the groups itself.
        gpu: The check concerns GPUs. The result is SKIP if the node has no GPU and none is declared.
        vendors: GPU vendors that the check supports. For GPUs of other vendors the result is SKIP.
        judges_by_vendor: Vendor to the function that replaces `node_judge` for GPUs of this vendor.
        without_root: A text that names the evidence of the check if only root can read the source. `None`: every user
            can read the source.
        judge_without_source: A function that judges a node by other facts if the source is unreadable. It returns
            `None` if these facts are not enough.
        action: The default action.
        thresholds: Default thresholds. `health.thresholds` overrides them as `CHECK.KEY`.
        node_judge: The function that judges one node; `None` if the check only compares nodes.
        cluster_judge: The function that compares all nodes; `None` if the check judges each node.
    """

    name: str
    family: str
    source: str
    threshold: str
    purpose: str
    severity: str = "FAIL"
    remedy: str = ""
    group: str | None = None
    gpu: bool = False
    vendors: tuple[str, ...] = (NVIDIA,)
    judges_by_vendor: Mapping[str, NodeJudge] = field(default_factory=dict)
    without_root: str | None = None
    judge_without_source: Callable[[CheckedNode], Outcome | None] | None = None
    action: Action = Action.NONE
    thresholds: Mapping[str, float] = field(default_factory=dict)
    node_judge: NodeJudge | None = None
    cluster_judge: ClusterJudge | None = None

    def make_finding(self, outcome: Outcome, *, node: str | None, duration_ms: float | None = None) -> Finding:
        """Return a finding: the outcome, with the defaults of this check."""
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
            override_key=outcome.override_key,
        )


def run_judge(judge: Callable[[Checked], Outcome | Iterable[Outcome]], checked: Checked) -> list[Outcome]:
    """Run a judge and return its outcomes as a list."""
    try:
        outcomes = judge(checked)
        return [outcomes] if isinstance(outcomes, Outcome) else list(outcomes)
    except NotJudgedError as stop:
        return [stop.outcome]


def node_check(name: str, family: str, **fields: Any) -> Callable[[NodeJudge], Check]:
    """Turn a function that judges one node into a check. The docstring of the function documents the check."""
    return lambda judge: Check(name=name, family=family, node_judge=judge, **parse_docstring(judge), **fields)


def cluster_check(name: str, family: str, **fields: Any) -> Callable[[ClusterJudge], Check]:
    """Turn a function that compares all nodes into a check. The docstring of the function documents the check."""
    return lambda judge: Check(name=name, family=family, cluster_judge=judge, **parse_docstring(judge), **fields)


def remedy(action: Action, text: str) -> Callable[[Check], Check]:
    """Set the default action and the default hint of a check."""
    return lambda check: replace(check, action=action, remedy=text)


_SECTIONS = {"Source": "source", "Healthy": "threshold"}


def parse_docstring(judge: Callable[..., object]) -> dict[str, Any]:
    """Return the fields `purpose`, `source` and `threshold` of a check from the docstring of its judge."""
    purpose, *sections = re.split(rf"\n *({'|'.join(_SECTIONS)}): ", judge.__doc__ or "")
    texts = {"purpose": purpose, **dict(zip(map(_SECTIONS.__getitem__, sections[::2]), sections[1::2], strict=True))}
    return {key: " ".join(text.split()) for key, text in texts.items()}
