"""Results of health checks (status, action, outcome, finding, symptom), and the GPU vendors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """The result of a check.

    SKIP: the check does not apply here. UNKNOWN: the check applies, but its facts are missing.
    UNKNOWN never counts as PASS.
    """

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    UNKNOWN = "UNKNOWN"


class Action(str, Enum):
    """The kind of repair that a finding asks for. clusterctl prints the action and leaves it to the user."""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check for one node, for one GPU, or for the whole cluster (`node` is `None`).

    Attributes:
        check: Name of the check, such as `gpu.count`.
        hint: The remedy in one line; `None` if the finding needs no remedy.
        action: The value of an `Action`.
        value: The observed value, as JSON.
        expected: The expected value, as JSON.
        gpu: Index of the GPU on its node, or `None`.
        duration_ms: How long the agent took to collect the facts, or `None`.
        ignored: The cluster file ignores this finding. The status is SKIP; the message contains the original status.
        needs_root: Only root can read the source, and all readable facts are healthy. The status is SKIP. The report
            shows such findings once per node, with the command that would allow the access. If
            `health.required` lists the check, the status is FAIL instead.
        override_key: A finer name that `health.severity` and `health.ignore` accept besides `check`, such as `xid.31`.
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
    needs_root: bool = False
    override_key: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as an object of `health --json`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "override_key"}
        return {**fields, "status": self.status.value}


def finding_from_json(value: Mapping[str, Any]) -> Finding:
    """Return a finding from its JSON (`Finding.to_json`)."""
    fields = {key: value[key] for key in Finding.__dataclass_fields__ if key in value}
    return Finding(**{**fields, "status": Status(value["status"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a judge. `Check.make_finding` adds the name of the check, the node and the default remedy."""

    status: Status
    message: str
    gpu: int | None = None
    value: Any = None
    expected: Any = None
    hint: str | None = None
    action: Action | None = None
    override_key: str | None = None
    node: str | None = None
    needs_root: bool = False


def ok(message: str, **more: Any) -> Outcome:
    """Return a PASS."""
    return Outcome(status=Status.PASS, message=message, **more)


def warn(message: str, **more: Any) -> Outcome:
    """Return a WARN: a problem that does not prevent a run."""
    return Outcome(status=Status.WARN, message=message, **more)


def fail(message: str, **more: Any) -> Outcome:
    """Return a FAIL: a problem that should prevent a run on this node."""
    return Outcome(status=Status.FAIL, message=message, **more)


def skip(message: str, **more: Any) -> Outcome:
    """Return a SKIP: the check does not apply."""
    return Outcome(status=Status.SKIP, message=message, **more)


def unknown(message: str, **more: Any) -> Outcome:
    """Return an UNKNOWN: the check applies, but its facts are missing."""
    return Outcome(status=Status.UNKNOWN, message=message, **more)


def skip_without_root(message: str, **more: Any) -> Outcome:
    """Return a SKIP with `needs_root`: only root can read the source, and all readable facts are healthy."""
    return Outcome(status=Status.SKIP, message=message, needs_root=True, **more)


@dataclass(frozen=True, slots=True)
class Symptom:
    """One sign of a health problem in one sample of a running node.

    Attributes:
        check: The check that finds the same problem before a run. A finer name may follow after a space, as in
            `host.disk /`.
        status: FAIL if the run must stop.
        description: The problem, without node and GPU.
        action: The repair.
        gpu: Index of the GPU; `None` for a symptom of the node.
        min_duration_s: Seconds that the symptom must last before clusterctl reports it.
        detail: Additional text after `description`.
        is_event: The symptom is a single event; later samples do not show it.
        repaired_by_reset: A reset repairs the GPU: the problem ends once the GPU has been healthy for a while.
        override_key: A finer name that `health.ignore` and `health.severity` accept.
        drains_node: The run continues, but the next attempt should avoid the node.
    """

    check: str
    status: Status
    description: str
    action: Action
    gpu: int | None = None
    min_duration_s: float = 0.0
    detail: str = ""
    is_event: bool = False
    repaired_by_reset: bool = False
    override_key: str | None = None
    drains_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A GPU vendor.

    Attributes:
        name: Name for messages.
        group: The group of facts about GPUs of the vendor; `None` if clusterctl cannot check them.
        source: Name of the library or driver that gives the facts, for messages.
        error_codes: The kind of error codes in the facts: `nvml` or `errno`.
    """

    name: str
    group: str | None = None
    source: str = ""
    error_codes: str = ""


NVIDIA, AMD = "nvidia", "amd"
VENDORS: dict[str, Vendor] = {
    NVIDIA: Vendor(name="NVIDIA", group="nvml", source="NVML", error_codes="nvml"),
    AMD: Vendor(name="AMD", group="amdgpu", source="the amdgpu driver", error_codes="errno"),
    "ascend": Vendor(name="Huawei Ascend"),
    "intel": Vendor(name="Intel"),
}
"""Vendors by their key in facts. If a node has GPUs of several vendors, the first vendor in this order counts."""

JUDGED = tuple(key for key, vendor in VENDORS.items() if vendor.group is not None)
"""Keys of the vendors whose GPUs clusterctl can check."""
