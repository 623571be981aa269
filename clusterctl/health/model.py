"""Values that health is spoken in: status, action, outcome, finding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


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
        needs_root: Only the administrator may look, and nothing that anybody may see speaks against the node: SKIP,
            told once a node, with the line that would allow it. `required` makes a failure of it.
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
    needs_root: bool = False
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
            "needs_root": self.needs_root,
        }


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
    needs_root: bool = False


def ok(message: str, **more: Any) -> Outcome:
    """Say that all is well."""
    return Outcome(status=Status.PASS, message=message, **more)


def warn(message: str, **more: Any) -> Outcome:
    """Say that something deserves a look."""
    return Outcome(status=Status.WARN, message=message, **more)


def fail(message: str, **more: Any) -> Outcome:
    """Say that a run should not start here."""
    return Outcome(status=Status.FAIL, message=message, **more)


def skip(message: str, **more: Any) -> Outcome:
    """Say that the check does not apply."""
    return Outcome(status=Status.SKIP, message=message, **more)


def unknown(message: str, **more: Any) -> Outcome:
    """Say that we could not look."""
    return Outcome(status=Status.UNKNOWN, message=message, **more)


def needs_root(message: str, **more: Any) -> Outcome:
    """Say that only the administrator may look, and that what anybody may see is well."""
    return Outcome(status=Status.SKIP, message=message, needs_root=True, **more)
