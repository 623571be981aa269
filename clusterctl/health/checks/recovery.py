"""What the driver itself recommends to do with a GPU: its recovery action, as a value, in the kernel log, in a sample.

Values are those of `nvmlDeviceGpuRecoveryAction_t` in NVIDIA's `nvml.h`: NVML field 230, driver 570 and later.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import gpus
from clusterctl.health.model import Action, Outcome, Status
from clusterctl.health.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.health.check import View


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery action.

    Attributes:
        words: What the driver asks for.
        action: What a person should do.
        before: How grave it is where a run is to start.
        during: How grave it is while one goes on.
    """

    words: str
    action: Action
    before: Status = Status.FAIL
    during: Status = Status.FAIL


NONE = 0
_DRAINED = "a GPU that works on with less: NVIDIA lets work go on and be moved away later"
RECOVERIES: dict[int, Recovery] = {
    1: Recovery("GPU reset", Action.RESET_GPU),
    2: Recovery("node reboot", Action.REBOOT_NODE),
    3: Recovery("drain P2P", Action.RESET_GPU, Status.WARN, Status.WARN),
    4: Recovery("drain and reset", Action.RESET_GPU, Status.FAIL, Status.WARN),
    5: Recovery("recover IMEX domain", Action.RESTART_FABRICMANAGER, Status.WARN, Status.WARN),
    6: Recovery("bus reset", Action.RESET_GPU),
    7: Recovery("system reboot", Action.REBOOT_NODE),
}
_NEWER = Recovery("an action that is newer than we are", Action.CONTACT_SUPPORT, Status.FAIL, Status.WARN)

HINTS: dict[Action, str] = {
    Action.RESET_GPU: "Stop all jobs on the node, then `sudo nvidia-smi -r -i N`, or reboot where there is an NVSwitch",
    Action.REBOOT_NODE: "Reboot the node; twice the same on one serial number means a replacement",
    Action.RESTART_FABRICMANAGER: "`sudo systemctl restart nvidia-imex` on all nodes of the NVLink domain",
    Action.CONTACT_SUPPORT: "Ask your vendor; `nvidia-smi -q` names the action under `GPU Recovery Action`",
    Action.CHECK_POWER_COOLING: "Check the power cables of the GPU and the power supply of the node",
}
"""The remedy of each action that a GPU or its driver may ask for."""

_CHANGED = re.compile(r"\bto\s+(?:0x([0-9a-fA-F]+))?\s*(?:\(?([A-Za-z0-9 ]+)\)?)?\s*$")
_WORDS = {
    "none": 0,
    "gpu reset required": 1,
    "gpu reset": 1,
    "node reboot required": 2,
    "node reboot": 2,
    "drain p2p": 3,
    "drain and reset": 4,
    "recover imex domain": 5,
    "bus reset": 6,
    "system reboot": 7,
}


def describe_action(value: int) -> Recovery:
    """Return what a recovery action means; one that is not known asks for something all the same."""
    return RECOVERIES.get(value, _NEWER)


def parse_changed_action(text: str) -> int | None:
    """Return what the driver asks for after an XID 154, by the end of its text; `None` where it cannot be read.

    The number counts: it has stayed, while the words behind it change (driver 610 writes `0x2 (OS Reboot)` where others
    write `0x2 (Node Reboot Required)`).
    """
    match = _CHANGED.search(text.strip())
    if match is None:
        return None
    number, words = match.groups()
    return int(number, 16) if number else _WORDS.get((words or "").strip().lower())


@node_check(
    name="gpu.recovery_action",
    family="GPU state",
    source="NVML field 230 (driver 570 and later)",
    threshold=f"none; drain P2P and recover IMEX domain WARN ({_DRAINED})",
    severity="FAIL",
    remedy="Do what the driver recommends: stop all jobs, then `sudo nvidia-smi -r -i N` or reboot",
    action=Action.RESET_GPU,
    gpu=True,
)
def recovery_action(view: View) -> Iterable[Outcome]:
    """The driver's own verdict: it recommends no reset and no reboot.

    Needs no root, unlike the kernel log.
    """

    def judge(device: gpus.Device, value: Any) -> Outcome | None:
        if value == NONE:
            return None
        recommended = describe_action(value)
        return Outcome(
            status=recommended.before,
            message=f"{gpus.label(device)}: the driver asks for {recommended.words}",
            gpu=device["index"],
            value=value,
            expected=NONE,
            action=recommended.action,
            hint=HINTS[recommended.action],
        )

    return gpus.judge_each(view, "recovery_action", judge, "no recovery action on {n} GPUs")


def sign(gpu: int, value: int | None) -> Symptom | None:
    """Return what a sample's recovery action says of a GPU in a run."""
    if not value:
        return None
    recommended = describe_action(value)
    return Symptom(
        gpu=gpu,
        check="gpu.recovery_action",
        status=recommended.during,
        words=f"the driver asks for {recommended.words}",
        action=recommended.action,
        leave_out=recommended.during is Status.WARN,
    )


CHECKS = (recovery_action,)
