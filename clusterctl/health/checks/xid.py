"""XID errors of NVIDIA GPUs in the kernel log, and their catalogue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterctl.health.check import NodeView, node_check, remedy
from clusterctl.health.checks import device_errors, gpus
from clusterctl.health.checks.machine_kernel_log import describe_reach, describe_recurrence, report_closed_gpu_log
from clusterctl.health.model import Action, Outcome, Status, Symptom, fail, ok, warn


class Weight(Enum):
    """Whether an XID is a fault of the hardware."""

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
}
"""Codes with a fixed meaning; 144-150 and 154 depend on their text (see `xid.judge_event`)."""
CATALOGUE |= _range(Weight.UNUSED, Action.CONTACT_SUPPORT, "not in use", *({*range(1, 144)} - CATALOGUE.keys()))


# --- XIDs: errors that NVIDIA's driver reports of a GPU, as the kernel log counts them and as a running job meets them.

NVLINK5 = range(144, 151)
RECOVERY_CHANGED = 154
_CONTAINED = 94
_RESETTING = (Action.RESET_GPU,)
"""Actions that repair the GPU itself: after them its XIDs are history. A reboot begins a new log."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """The meaning of an XID.

    Attributes:
        hard: It speaks of hardware.
        action: What to do.
        meaning: What it means, in words.
        confirmed: Whether it is hard has to be said by the driver's recovery action too.
    """

    hard: bool
    action: Action
    meaning: str
    confirmed: bool = False


def judge_event(code: int, text: str = "", grade: str = "") -> Judgement | None:
    """Return the meaning of an XID in NVIDIA's catalogue; `None` if it reports that the GPU is healthy again."""
    if code == RECOVERY_CHANGED:
        value = device_errors.parse_changed_action(text)
        if value == device_errors.NONE:
            return None
        if value is None:
            return Judgement(False, Action.CONTACT_SUPPORT, f"recovery action changed: {text[:80]}")
        recommended = device_errors.describe_action(value)
        return Judgement(
            recommended.before is Status.FAIL, recommended.action, f"the driver asks for {recommended.words}"
        )
    if code in NVLINK5:
        fatal = grade == "fatal"
        action = Action.RESET_GPU if fatal else Action.NONE
        return Judgement(fatal, action, f"NVLink error, {'fatal' if fatal else 'not fatal'}")
    entry = CATALOGUE.get(code)
    if entry is None:
        return Judgement(False, Action.CONTACT_SUPPORT, "not in the catalogue")
    hard = entry.weight is Weight.HARDWARE
    meaning = entry.meaning if hard else f"{entry.meaning} ({entry.weight.value})"
    return Judgement(hard, entry.action, meaning, entry.confirmed)


@remedy(Action.RESET_GPU, "Follow the action; `severity: {xid.N: ignore}` silences one code")
@node_check(
    "gpu.xid",
    "XID and SXid",
    gpu=True,
    group="kernel_log",
    root="recovery action, ECC counters and remapped rows speak for the GPUs; during a run the driver reports XIDs",
    witness=report_closed_gpu_log,
    thresholds={"lookback": 86400.0, "fail_contained": 3.0},
)
def check_xids(view: NodeView) -> Outcome | list[Outcome]:
    """Errors that the driver reported since boot, weighed by NVIDIA's catalogue.

    An application's fault never fails a node.

    Source: kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by GPU and code
    Healthy: no hardware XID. One that a reset repairs: FAIL within `lookback` seconds, WARN once the GPU is healthy
        again (XID 154 to None after it; or recovery action none, every call answered, no uncorrected memory error). One
        that requires a reboot: FAIL until the next boot. Application errors are WARN; `fail_contained` XIDs 94 on one
        GPU within `lookback` FAIL
    """
    events = _events(view)
    outcomes = [outcome for event in events if (outcome := _weigh(view, event, events)) is not None]
    return outcomes or ok(f"no XID {describe_reach(view)}")


def _events(view: NodeView) -> list[dict[str, Any]]:
    events = view.group("kernel_log").data.get("events") or []
    return [event for event in events if event["kind"] == "xid"]


def find_gpus_with_xids(view: NodeView, codes: Collection[int]) -> set[int]:
    """Return the indices of the run's GPUs with one of these XIDs in the kernel log."""
    gpus = {_gpu_of(view, event["device"])[0] for event in _events(view) if event["code"] in codes}
    return {index for index in gpus if index is not None}


def _weigh(view: NodeView, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> Outcome | None:
    """Judge all events of one code on one GPU, by the newest of them."""
    index, of_node = _gpu_of(view, event["device"])
    judgement = judge_event(event["code"], event["text"], event["grade"])
    if judgement is None or (of_node and index is None):
        return None  # all is well again, or it is a GPU of the node that this run does not use
    lookback = view.limit("lookback")
    age = event["last_age_s"]
    hard, action = judgement.hard, judgement.action
    if event["code"] == _CONTAINED and sum(a <= lookback for a in event["ages"]) >= view.limit("fail_contained"):
        hard, action = True, Action.RESET_GPU
    mended = hard and _mended(view, index, event, events)
    if mended and event["code"] == RECOVERY_CHANGED:
        return None  # the value itself says that nothing is asked for any more
    mended = mended and action in _RESETTING
    lasts = action is Action.REBOOT_NODE or age is None or age <= lookback
    say = fail if hard and lasts and not mended else warn
    place = f"GPU {index}" if index is not None else f"GPU at {_bus(event['device'])}"
    times = f"{describe_recurrence(event)}{', since repaired' if mended else ''}"
    return say(
        f"{place}: XID {event['code']}, {judgement.meaning}{times}",
        gpu=index,
        value={"xid": event["code"], "count": event["count"], "last_age_s": age, "text": event["text"]},
        action=Action.NONE if mended else action,
        hint=_MENDED if mended else _HINTS.get(action),
        key=f"xid.{event['code']}",
    )


def _mended(view: NodeView, index: int | None, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> bool:
    """Return whether a GPU was repaired after an XID: the driver withdrew its request, or all values are healthy."""
    for later in events:
        taken_back = (
            later["code"] == RECOVERY_CHANGED
            and device_errors.parse_changed_action(later["text"]) == device_errors.NONE
        )
        if taken_back and later["order"] > event["order"] and _bus(later["device"]) == _bus(event["device"]):
            return True
    device = next((d for d in gpus.list_used_gpus(view) if d["index"] == index), None)
    return device is not None and is_recovered(device)


def is_recovered(device: gpus.Device) -> bool:
    """Return whether no value of a GPU shows the effect of a fatal XID."""
    recommended, uncorrected = gpus.read_value(device, "recovery_action"), gpus.read_value(device, "ecc_unc")
    return recommended == device_errors.NONE and not uncorrected and device_errors.is_answering(device)


_MENDED = "Nothing to do: the GPU has been reset since; if it comes again, have the hardware looked at"
_HINTS = {
    **device_errors.HINTS,
    Action.RESTART_APP: "An error of the program that used the GPU; nothing to repair",
    Action.NONE: "Nothing to do by itself; look at the other findings of this GPU",
    Action.CONTACT_SUPPORT: "NVIDIA's catalogue names no cure; ask your vendor if it repeats",
}


def _bus(address: str) -> str:
    """Return domain:bus:device without leading zeros of the domain and without the function."""
    parts = address.split(".", maxsplit=1)[0].split(":")
    domain = int(parts[0], 16) if len(parts) == 3 else 0
    return f"{domain:04x}:{':'.join(parts[-2:])}".lower()


def _gpu_of(view: NodeView, pci: str) -> tuple[int | None, bool]:
    """Return the index of the declared GPU at an address, and whether any GPU of the node has the address."""
    mine = {d["index"] for d in gpus.list_used_gpus(view)}
    for device in gpus.list_gpus(view):
        address = gpus.read_value(device, "pci")
        if address and _bus(address) == _bus(pci):
            return (device["index"] if device["index"] in mine else None), True
    return None, False


# --- during a run


def find_xid_symptom(gpu: int | None, code: int) -> Symptom | None:
    """Return the symptom of an XID that the driver reports during a run.

    Its text is only in the kernel log; where the text decides, the recovery action is a sign of its own.
    """
    judgement = judge_event(code) if code != RECOVERY_CHANGED else None
    if judgement is None:
        return None
    hard = judgement.hard and not judgement.confirmed
    status, action = Status.FAIL if hard else Status.WARN, judgement.action
    words = f"XID {code}, {'NVLink error' if code in NVLINK5 else judgement.meaning}"
    mends, rule = hard and action in _RESETTING, f"xid.{code}"
    return Symptom(f"gpu.xid {code}", status, words, action, gpu=gpu, event=True, mends=mends, rule=rule)


def is_sample_healthy(gpu: Mapping[str, Any]) -> bool:
    """Return whether a GPU is healthy in a sample after an XID: recovery action, calls, memory and links."""
    recommended = gpu.get("recovery_action")
    harmed = gpu.get("ecc_unc") or gpu.get("links_lost")
    return recommended == device_errors.NONE and device_errors.is_answering(gpu) and not harmed
