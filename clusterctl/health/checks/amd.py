"""What holds for AMD's GPUs alone: those joined by XGMI are one hive, which is reset as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.health.checks import gpus
from clusterctl.health.model import Action

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.health.check import View

_HINTS = {
    Action.REBOOT_NODE: "Reboot the node; twice the same on one serial number means a replacement",
    Action.CHECK_POWER_COOLING: "Check the power supply and the cooling of the node",
    Action.RMA: "Have the GPU replaced; give its serial number and the kernel log",
}


def hive_of(view: View, device: gpus.Device) -> list[int]:
    """Return the GPUs of the node that are reset together with one, itself among them, used by the run or not."""
    own = gpus.value(device, "hive")
    members = [d["index"] for d in gpus.all_gpus(view) if own and gpus.value(d, "hive") == own]
    return members or [device["index"]]


def reset_hint(view: View, device: gpus.Device, action: Action) -> str | None:
    """Return the remedy of an action for one GPU."""
    if action is not Action.RESET_GPU:
        return _HINTS.get(action)
    members = hive_of(view, device)
    if len(members) == 1:
        target = gpus.value(device, "pci") or device["index"]
        return f"Stop all jobs that use it, then `sudo amd-smi reset -G -g {target}`, or reboot"
    return f"{describe_joint_reset(members)}: an XGMI hive is reset as one"


def describe_joint_reset(members: Sequence[int]) -> str:
    """Return how some GPUs are reset at once."""
    named = gpus.gpu_names(members)
    return f"Stop all jobs on the node, then reset {named} together (`sudo amd-smi reset -G -g all`), or reboot"
