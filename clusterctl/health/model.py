"""The values of health checks: vendor, status, action, outcome, finding, symptom."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Status(str, Enum):
    """The result of a check.

    SKIP: the check does not apply here. UNKNOWN: it applies but could not be done; this is never a pass.
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


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check for one node, one GPU, or (node is `None`) the cluster.

    Attributes:
        check: Name in the registry, such as `gpu.count`.
        hint: The remedy, one line; `None` if nothing is wrong.
        action: An `Action` value; `NONE` if there is nothing to do.
        value: The observed value, as JSON.
        expected: The expected value, as JSON.
        gpu: Index of the GPU on its node, or `None`.
        duration_ms: How long reading the facts took, or `None`.
        ignored: The cluster file ignores this finding; the status is SKIP and the message contains the original status.
        needs_root: Only root can read the source, and nothing readable speaks against the node: SKIP, shown once per
            node
            with the command that would allow it. `required` makes a failure of it.
        key: A finer name for `severity` and `ignore`, such as `xid.31`.
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
    key: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the shape of a finding in `health --json`."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "key"}
        return {**fields, "status": self.status.value}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a judge, before the check adds its name, the node and the default remedy."""

    status: Status
    message: str
    gpu: int | None = None
    value: Any = None
    expected: Any = None
    hint: str | None = None
    action: Action | None = None
    key: str | None = None
    node: str | None = None
    needs_root: bool = False


def ok(message: str, **more: Any) -> Outcome:
    """Return an outcome for a healthy value."""
    return Outcome(status=Status.PASS, message=message, **more)


def warn(message: str, **more: Any) -> Outcome:
    """Return an outcome that deserves attention."""
    return Outcome(status=Status.WARN, message=message, **more)


def fail(message: str, **more: Any) -> Outcome:
    """Return an outcome that should prevent a run here."""
    return Outcome(status=Status.FAIL, message=message, **more)


def skip(message: str, **more: Any) -> Outcome:
    """Return the outcome of a check that does not apply."""
    return Outcome(status=Status.SKIP, message=message, **more)


def unknown(message: str, **more: Any) -> Outcome:
    """Return the outcome of a check that could not be done."""
    return Outcome(status=Status.UNKNOWN, message=message, **more)


def skip_for_root(message: str, **more: Any) -> Outcome:
    """Return the outcome of a check whose source only root can read, while everything readable is healthy."""
    return Outcome(status=Status.SKIP, message=message, needs_root=True, **more)


@dataclass(frozen=True, slots=True)
class Symptom:
    """One symptom in one sample.

    Attributes:
        check: The check that finds the same problem before a run, with a finer part after a blank.
        status: FAIL if the run must not go on.
        words: What is wrong, without the place.
        action: What to do.
        gpu: Index of the GPU; `None` for a symptom of the node.
        lasting: Seconds that it must last before it is reported.
        detail: Additional text after `words`.
        event: It happened once: later samples do not show it.
        mends: An event that is over once the GPU has been healthy for a while, because a reset repairs it.
        rule: A finer name for `health.ignore` and `health.severity`.
        leave_out: No reason to stop a run, but the next attempt should avoid the node.
    """

    check: str
    status: Status
    words: str
    action: Action
    gpu: int | None = None
    lasting: float = 0.0
    detail: str = ""
    event: bool = False
    mends: bool = False
    rule: str | None = None
    leave_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A GPU vendor.

    Attributes:
        name: The usual spelling.
        group: The group of facts about its GPUs; `None` if its GPUs are only recognised.
        source: Name of the source, for messages.
        codes: The codes beside `err` are file errors (`errno`), not library errors.
    """

    name: str
    group: str | None = None
    source: str = ""
    codes: str = ""


NVIDIA, AMD = "nvidia", "amd"
VENDORS: dict[str, Vendor] = {
    NVIDIA: Vendor(name="NVIDIA", group="nvml", source="NVML", codes="nvml"),
    AMD: Vendor(name="AMD", group="amdgpu", source="the amdgpu driver", codes="errno"),
    "ascend": Vendor(name="Huawei Ascend"),
    "intel": Vendor(name="Intel"),
}
"""Vendors by their key in facts. If a node has GPUs of several, the first vendor counts."""

JUDGED = tuple(key for key, vendor in VENDORS.items() if vendor.group is not None)
"""Vendors whose GPUs are judged."""
