"""What an XID means for a launcher, after NVIDIA's catalogue of immediate actions.

Source of codes and actions: NVIDIA, "XID errors", analyzing the XID catalog (docs.nvidia.com/deploy/xid-errors). Codes
that the catalogue calls unused, and such as it says to ignore, never fail a node here, although several tools do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from clusterctl.health.model import Action


class Weight(Enum):
    """How much an XID says about the hardware."""

    APPLICATION = "application error, not hardware"
    NOTE = "no action needed by itself"
    HARDWARE = "hardware error"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code of the catalogue."""

    meaning: str
    weight: Weight
    action: Action


def _rows(weight: Weight, action: Action, **meanings: str) -> dict[int, Xid]:
    return {int(code[1:]): Xid(meaning, weight, action) for code, meaning in meanings.items()}


CATALOGUE: dict[int, Xid] = {
    **_rows(
        Weight.APPLICATION,
        Action.RESTART_APP,
        x13="graphics engine exception",
        x31="GPU memory page fault",
        x43="GPU stopped processing",
        x45="cleanup after another error",
        x68="video decoder exception",
        x69="graphics engine class error",
        x80="corrupted data sent to the GPU",
        x94="contained memory error",
    ),
    **_rows(
        Weight.NOTE,
        Action.NONE,
        x63="row remapping recorded",
        x78="vGPU start error",
        x92="high rate of corrected memory errors",
        x121="corrected C2C error",
        x137="NVLink privilege error",
        x141="fast path error",
        x142="video encoder error",
        x152="DLA error",
        x153="fast path error",
        x157="row retirement recorded",
        x160="channel retirement recorded",
        x161="retirement recorded",
        x162="power smoothing message",
        x163="power smoothing message",
        x164="power smoothing message",
        x165="confidential computing message",
        x166="confidential computing message",
        x169="security processor message",
        x170="security processor message",
    ),
    **_rows(
        Weight.HARDWARE,
        Action.RESET_GPU,
        x46="GPU stopped processing",
        x48="uncorrectable memory error",
        x62="internal micro-controller halt",
        x64="row remapping failed",
        x74="NVLink error",
        x95="uncontained memory error",
        x110="security fault",
        x119="GSP call timed out",
        x120="GSP error",
        x136="NVLink training failed",
        x140="unrecovered memory error",
        x143="GPU initialisation error",
        x155="NVLink software error",
        x156="resource retirement",
        x158="GPU fatal timeout",
        x167="PCIe fatal timeout",
        x168="reduced memory",
        x171="uncorrectable memory error in DRAM",
        x172="uncorrectable memory error in SRAM",
    ),
    **_rows(Weight.HARDWARE, Action.REBOOT_NODE, x79="GPU has fallen off the bus", x151="key rotation failed"),
    **_rows(Weight.HARDWARE, Action.CHECK_POWER_COOLING, x54="auxiliary power is not connected"),
}
"""Codes with a fixed meaning; 109, 144-150 and 154 depend on their text or neighbours (see `xid.judge_event`)."""
