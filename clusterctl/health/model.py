"""Values that health is spoken in: status, finding, what was promised, and the view that a check has of one node."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from clusterctl.config.spec import ClusterSpec, HealthSpec

NOT_SYNCED = "not synced"
"""The `code_hash` of a node whose code does not come by sync."""

Facts = dict[str, Any]
"""What `clusterctl.agent.facts.collect` returned, plus the key `controller` (see `Context`)."""


class Status(str, Enum):
    """What a check says.

    SKIP: it does not apply here. UNKNOWN: it applies, but we could not look; never a pass.
    """

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    UNKNOWN = "UNKNOWN"


class Action(str, Enum):
    """What a person should do. clusterctl prints it and never does it by itself."""

    NONE = "NONE"
    RESTART_APP = "RESTART_APP"
    KILL_PROCS = "KILL_PROCS"
    FIX_CONFIG = "FIX_CONFIG"
    FIX_LIMITS = "FIX_LIMITS"
    FREE_SPACE = "FREE_SPACE"
    CHECK_MOUNT = "CHECK_MOUNT"
    CHECK_LINK = "CHECK_LINK"
    CHECK_POWER_COOLING = "CHECK_POWER_COOLING"
    RESTART_FABRICMANAGER = "RESTART_FABRICMANAGER"
    RESET_GPU = "RESET_GPU"
    REBOOT_NODE = "REBOOT_NODE"
    RMA = "RMA"
    CONTACT_SUPPORT = "CONTACT_SUPPORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check's answer about one node, one GPU of it, or (node is `None`) the cluster.

    Attributes:
        check: Name in the registry, such as `gpu.count`.
        hint: The remedy, one line; `None` where nothing is wrong.
        action: An `Action` value, `NONE` where nothing is to be done.
        value: What was seen, as JSON.
        expected: What was wanted, as JSON.
        gpu: Index of the GPU on its node, or `None`.
        duration_ms: How long the facts behind it took to read, or `None`.
        ignored: The cluster file tells to ignore it; the status is SKIP and the message says what it was.
        key: A finer name that `severity` and `ignore` may use too, such as `xid.31`.
    """

    check: str
    status: Status
    message: str
    hint: str | None = None
    action: str = Action.NONE.value
    value: Any = None
    expected: Any = None
    node: str | None = None
    gpu: int | None = None
    duration_ms: float | None = None
    ignored: bool = False
    key: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the shape of a finding in `health --json`."""
        return {
            "check": self.check,
            "status": self.status.value,
            "message": self.message,
            "hint": self.hint,
            "action": self.action,
            "value": self.value,
            "expected": self.expected,
            "node": self.node,
            "gpu": self.gpu,
            "duration_ms": self.duration_ms,
            "ignored": self.ignored,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the cluster file says about one node.

    Attributes:
        gpus: Declared count or indices; `None` for "what the node turns out to have".
        workdir: Where the code will lie; `None` where only the node can tell.
    """

    gpus: int | tuple[int, ...] | None = None
    workdir: str | None = None

    @property
    def count(self) -> int | None:
        """How many GPUs are declared, or `None`."""
        return len(self.gpus) if isinstance(self.gpus, tuple) else self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that a verdict depends on beside the facts.

    Facts that only the controller knows stand in `facts["controller"]` of each node, every key optional:

        clock        {"offset": s, "error": s}     the node's clock minus the controller's, and the bound of the error
        rendezvous   {"address", "port", "role": "listen" | "connect", "ok": bool, "error": str | None, "ms": number,
                     "listener": node}; of the listener "peers" and "reached_by", how many tried and came through
        code_hash    the content hash of the synced code on that node, "" where none was synced yet, `NOT_SYNCED`
        live_runs    ids of runs of clusterctl that are meant to be alive on that node
        strange_runs ids of runs found there of which neither that node nor this head knows anything
        own_run      the id of the run on whose behalf we look: what it holds is not foreign
        connect_ms   how long the connection took to open

    A node that gave no facts is `{"unreachable": "why"}`, its facts empty otherwise.

    Attributes:
        nodes: What is declared for each node, in order of node rank.
        expect: `health.expect`: facts that the user promises (`EXPECT_KEYS`).
        ignore: `check` or `check@node`, both with shell wildcards.
        severity: Check to `fail`, `warn` or `ignore`.
        required: Checks whose UNKNOWN counts as FAIL.
        thresholds: Overrides of the numbers in the registry, such as `host.disk.warn`.
        framework: What `job.framework` says, or `None`.
    """

    nodes: Mapping[str, Expectation] = field(default_factory=dict)
    expect: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    framework: str | None = None

    @property
    def multi_node(self) -> bool:
        """More than one node takes part."""
        return len(self.nodes) > 1

    @classmethod
    def from_spec(cls, spec: ClusterSpec) -> Context:
        """Read the promises and tolerances of a cluster file. Spares are judged like everybody else."""
        health: HealthSpec = spec.health
        return cls(
            nodes={host.name: Expectation(gpus=host.gpus, workdir=host.workdir) for host in spec.hosts},
            expect=health.expect,
            ignore=health.ignore,
            severity=health.severity,
            required=health.required,
            thresholds=health.thresholds,
            framework=spec.job.framework.value if spec.job else None,
        )


EXPECT_KEYS: dict[str, str] = {
    "gpu_model": "name of every GPU, shell wildcards allowed",
    "driver": "NVIDIA driver version, shell wildcards allowed",
    "python": "Python version of the job, shell wildcards allowed",
    "torch": "torch version of the job, shell wildcards allowed",
    "cuda": "CUDA version that torch was built for, shell wildcards allowed",
    "nccl": "NCCL package version, shell wildcards allowed",
    "mig": "true where MIG is meant to be on",
    "nvlinks": "active NVLinks of each GPU",
    "pcie_width": "PCIe lanes of each GPU",
    "ib_ports": "active InfiniBand or RoCE ports of each node",
    "mounts": "paths that must answer on every node",
    "allowed_procs": "names of processes that may hold a GPU, beside the monitoring agents known to us",
}
"""Keys of `health.expect`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One group of facts as its child left it: status is ok, timeout, error, denied or absent."""

    status: str
    reason: str | None
    data: dict[str, Any]
    ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a judge says, before the check's name, node and standing remedy are filled in."""

    status: Status
    message: str
    gpu: int | None = None
    value: Any = None
    expected: Any = None
    hint: str | None = None
    action: Action | None = None
    key: str | None = None
    node: str | None = None


def passed(message: str, **more: Any) -> Outcome:
    """Say that all is well."""
    return Outcome(status=Status.PASS, message=message, **more)


def warned(message: str, **more: Any) -> Outcome:
    """Say that something deserves a look."""
    return Outcome(status=Status.WARN, message=message, **more)


def failed(message: str, **more: Any) -> Outcome:
    """Say that a run should not start here."""
    return Outcome(status=Status.FAIL, message=message, **more)


def skipped(message: str, **more: Any) -> Outcome:
    """Say that the check does not apply."""
    return Outcome(status=Status.SKIP, message=message, **more)


def unknown(message: str, **more: Any) -> Outcome:
    """Say that we could not look."""
    return Outcome(status=Status.UNKNOWN, message=message, **more)


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
        known = self.facts.get("controller")
        return known if isinstance(known, dict) else {}

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
