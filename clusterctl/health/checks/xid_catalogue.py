"""What an XID means for a launcher, after NVIDIA's catalogue of immediate actions.

Source of codes: `nverror.h` of NVIDIA's open-gpu-kernel-modules, driver 595. Source of actions: NVIDIA, "XID errors",
analyzing the XID catalog (docs.nvidia.com/deploy/xid-errors), as of October 2025; codes that are newer than it are
weighed by their name. Codes that the catalogue calls unused, and such as it says to ignore, never fail a node here,
although several tools do.
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
    UNUSED = "unused in NVIDIA's catalogue"


@dataclass(frozen=True, slots=True)
class Xid:
    """One code of the catalogue.

    Attributes:
        confirmed: A program can bring it about too: during a run the driver's recovery action has to confirm it.
    """

    meaning: str
    weight: Weight
    action: Action
    confirmed: bool = False


def _rows(weight: Weight, action: Action, *, confirmed: bool = False, **meanings: str) -> dict[int, Xid]:
    return {int(code[1:]): Xid(meaning, weight, action, confirmed) for code, meaning in meanings.items()}


def _range(weight: Weight, action: Action, meaning: str, *codes: int) -> dict[int, Xid]:
    return {code: Xid(meaning, weight, action) for code in codes}


CATALOGUE: dict[int, Xid] = {
    **_rows(
        Weight.APPLICATION,
        Action.RESTART_APP,
        x8="GPU stopped processing",
        x11="corrupted push buffer",
        x13="graphics engine exception",
        x25="illegal push buffer",
        x31="GPU memory page fault",
        x32="corrupted push buffer",
        x43="GPU stopped processing",
        x45="cleanup after another error",
        x60="security processor exception",
        x69="graphics engine class error",
        x80="corrupted data sent to the GPU",
        x94="contained memory error",
    ),
    **_range(
        Weight.APPLICATION,
        Action.RESTART_APP,
        "copy engine exception",
        *(39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    ),
    **_range(Weight.APPLICATION, Action.RESTART_APP, "video decoder exception", *(68, 83, 84, 88, 89, *range(96, 99))),
    **_range(Weight.APPLICATION, Action.RESTART_APP, "JPEG engine exception", *(82, *range(99, 106))),
    **_range(Weight.APPLICATION, Action.RESTART_APP, "optical flow engine exception", 86, 139),
    **_rows(
        Weight.NOTE,
        Action.NONE,
        x14="test message",
        x37="driver firmware error",
        x38="driver firmware error",
        x44="graphics fault during a context switch",
        x63="row remapping recorded",
        x66="illegal access by the driver",
        x67="illegal access by the driver",
        x78="vGPU start error",
        x92="high rate of corrected memory errors",
        x93="infoROM written too often",
        x106="test message of the management bus",
        x107="test message of the management bus",
        x108="NVLink translation error",
        x121="corrected C2C error",
        x137="NVLink privilege error: an illegal access to a peer",
        x141="CUDA fast path error",
        x142="video encoder error",
        x152="DLA memory error",
        x153="DLA timed out",
        x159="coherent access error",
        x160="channel retired",
        x162="power smoothing engaged again",
        x163="power smoothing disengaged",
        x164="power smoothing near its lifetime",
        x166="NVLink encryption error",
        x169="security processor halted",
        x170="NVLink interrupt in confidential computing",
        x174="channel reset, its process ended",
        x176="corrected PCIe errors",
        x185="memory spared",
    ),
    **_rows(
        Weight.NOTE,
        Action.CONTACT_SUPPORT,
        x157="memory could not be retired",
        x161="channel could not be retired",
        x165="power smoothing past its lifetime",
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
        x156="memory retired",
        x158="GPU fatal timeout",
        x167="PCIe fatal timeout",
        x168="reduced memory",
        x171="uncorrectable memory error in DRAM",
        x172="uncorrectable memory error in SRAM",
        x173="C2C link failed",
        x175="memory subsystem error",
    ),
    **_rows(Weight.HARDWARE, Action.RESET_GPU, confirmed=True, x109="context switch timed out"),
    **_rows(Weight.HARDWARE, Action.REBOOT_NODE, x79="GPU has fallen off the bus", x151="key rotation failed"),
    **_rows(Weight.HARDWARE, Action.CHECK_POWER_COOLING, x54="auxiliary power is not connected"),
    **_range(
        Weight.UNUSED,
        Action.CONTACT_SUPPORT,
        "not in use",
        *(
            *range(1, 8),
            9,
            10,
            12,
            *range(15, 25),
            *range(26, 31),
            *range(33, 37),
            42,
            47,
            *range(49, 54),
            *range(55, 60),
        ),
        *(61, 65, 73, 81, 87, 90, 91, *range(111, 119), *range(122, 126), 138),
    ),
}
"""Codes with a fixed meaning; 144-150 and 154 depend on their text (see `xid.judge_event`)."""
