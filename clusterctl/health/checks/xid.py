"""XID errors of NVIDIA GPUs in the kernel log, and their catalogue."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts, gpu_failures
from clusterctl.health.checks.machine_kernel_log import (
    describe_covered_time,
    describe_occurrences,
    report_unreadable_gpu_log,
)
from clusterctl.health.findings import Action, Outcome, Status, Symptom, fail, ok, warn


class XidCategory(Enum):
    """The cause of an XID."""

    APPLICATION = "application error, not hardware"
    NOTE = "no repair needed for this code alone"
    HARDWARE = "hardware error"
    UNUSED = "unused in NVIDIA's catalogue"


@dataclass(frozen=True, slots=True)
class Xid:
    """An entry of NVIDIA's catalogue of XIDs.

    Attributes:
        needs_confirmation: A program can cause the error too. During a run the XID counts as a hardware error only if
            the driver recommends a recovery action.
    """

    meaning: str
    category: XidCategory
    action: Action
    needs_confirmation: bool = False


def _rows(
    category: XidCategory, action: Action, *, needs_confirmation: bool = False, **meanings: str
) -> dict[int, Xid]:
    return {int(code[1:]): Xid(meaning, category, action, needs_confirmation) for code, meaning in meanings.items()}


def _range(category: XidCategory, action: Action, meaning: str, *codes: int) -> dict[int, Xid]:
    return {code: Xid(meaning, category, action) for code in codes}


CATALOGUE: dict[int, Xid] = {
    **_rows(
        XidCategory.APPLICATION,
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
        XidCategory.APPLICATION,
        Action.RESTART_APP,
        "copy engine exception",
        *(39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)),
    ),
    **_range(
        XidCategory.APPLICATION, Action.RESTART_APP, "video decoder exception", *(68, 83, 84, 88, 89, *range(96, 99))
    ),
    **_range(XidCategory.APPLICATION, Action.RESTART_APP, "JPEG engine exception", *(82, *range(99, 106))),
    **_range(XidCategory.APPLICATION, Action.RESTART_APP, "optical flow engine exception", 86, 139),
    **_rows(
        XidCategory.NOTE,
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
        XidCategory.NOTE,
        Action.CONTACT_SUPPORT,
        x157="memory could not be retired",
        x161="channel could not be retired",
        x165="power smoothing past its lifetime",
    ),
    **_rows(
        XidCategory.HARDWARE,
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
    **_rows(XidCategory.HARDWARE, Action.RESET_GPU, needs_confirmation=True, x109="context switch timed out"),
    **_rows(XidCategory.HARDWARE, Action.REBOOT_NODE, x79="GPU has fallen off the bus", x151="key rotation failed"),
    **_rows(XidCategory.HARDWARE, Action.CHECK_POWER_COOLING, x54="auxiliary power is not connected"),
}
"""XIDs with a fixed meaning. The meaning of 144 to 150 and of 154 depends on their text (`judge_xid`)."""
CATALOGUE |= _range(XidCategory.UNUSED, Action.CONTACT_SUPPORT, "not in use", *({*range(1, 144)} - CATALOGUE.keys()))


# --- XIDs in the kernel log, and XIDs during a run

NVLINK5 = range(144, 151)
RECOVERY_CHANGED = 154
_CONTAINED = 94
_RESETTING = (Action.RESET_GPU,)
"""Actions that repair the GPU but keep the kernel log. XIDs before such an action count less."""


@dataclass(frozen=True, slots=True)
class XidJudgement:
    """The meaning of an XID.

    Attributes:
        is_hardware: The XID is a hardware error.
        action: The repair.
        meaning: The meaning in words.
        needs_confirmation: See `Xid`.
    """

    is_hardware: bool
    action: Action
    meaning: str
    needs_confirmation: bool = False


def judge_xid(code: int, text: str = "", grade: str = "") -> XidJudgement | None:
    """Return the meaning of an XID; `None` if the XID reports that the GPU needs no recovery any more.

    Args:
        code: Number of the XID.
        text: Text of the XID in the kernel log.
        grade: `fatal` or another word, if the text of the XID has one.
    """
    if code == RECOVERY_CHANGED:
        value = gpu_failures.parse_new_action(text)
        if value == gpu_failures.NONE:
            return None
        if value is None:
            return XidJudgement(False, Action.CONTACT_SUPPORT, f"recovery action changed: {text[:80]}")
        recommended = gpu_failures.get_recovery(value)
        return XidJudgement(
            recommended.status_before_run is Status.FAIL,
            recommended.action,
            f"the driver recommends: {recommended.description}",
        )
    if code in NVLINK5:
        fatal = grade == "fatal"
        action = Action.RESET_GPU if fatal else Action.NONE
        return XidJudgement(fatal, action, f"NVLink error, {'fatal' if fatal else 'not fatal'}")
    entry = CATALOGUE.get(code)
    if entry is None:
        return XidJudgement(False, Action.CONTACT_SUPPORT, "not in the catalogue")
    hard = entry.category is XidCategory.HARDWARE
    meaning = entry.meaning if hard else f"{entry.meaning} ({entry.category.value})"
    return XidJudgement(hard, entry.action, meaning, entry.needs_confirmation)


@remedy(Action.RESET_GPU, "Follow the action; `severity: {xid.N: ignore}` silences one code")
@node_check(
    "gpu.xid",
    "XID and SXid",
    gpu=True,
    group="kernel_log",
    without_root="recovery action, ECC counters and remapped rows are evidence; during a run the driver reports XIDs",
    judge_without_source=report_unreadable_gpu_log,
    thresholds={"lookback": 86400.0, "fail_contained": 3.0},
)
def check_xids(node: CheckedNode) -> Outcome | list[Outcome]:
    """The driver reported no hardware error of a GPU since the boot.

    NVIDIA's catalogue says which XIDs are hardware errors. An error of an application is only WARN.

    Source: kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by GPU and code
    Healthy: no XID of a hardware error. If a reset repairs the error: FAIL within `lookback` seconds, WARN once the GPU
        is healthy again. A GPU is healthy again if a later XID 154 reports the action None, or if the recovery action
        is none, every call succeeds and there is no uncorrected memory error. If the error requires a reboot: FAIL
        until the next boot. Application errors are WARN; `fail_contained` XIDs 94 on one GPU within `lookback` seconds
        are FAIL
    """
    events = _list_events(node)
    outcomes = [outcome for event in events if (outcome := _judge_code(node, event, events)) is not None]
    return outcomes or ok(f"no XID {describe_covered_time(node)}")


def _list_events(node: CheckedNode) -> list[dict[str, Any]]:
    events = node.group("kernel_log").facts.get("events") or []
    return [event for event in events if event["kind"] == "xid"]


def find_gpus_with_xids(node: CheckedNode, codes: Collection[int]) -> set[int]:
    """Return the indices of the run's GPUs with one of these XIDs in the kernel log."""
    gpus = {_find_gpu(node, event["device"])[0] for event in _list_events(node) if event["code"] in codes}
    return {index for index in gpus if index is not None}


def _judge_code(node: CheckedNode, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> Outcome | None:
    """Judge all events of one code on one GPU by the newest event."""
    index, of_node = _find_gpu(node, event["device"])
    judgement = judge_xid(event["code"], event["text"], event["grade"])
    if judgement is None or (of_node and index is None):
        return None  # The GPU is healthy again, or the run does not use this GPU of the node.
    lookback = node.limit("lookback")
    age = event["last_age_s"]
    hard, action = judgement.is_hardware, judgement.action
    if event["code"] == _CONTAINED and sum(a <= lookback for a in event["ages"]) >= node.limit("fail_contained"):
        hard, action = True, Action.RESET_GPU
    repaired = hard and _is_repaired(node, index, event, events)
    if repaired and event["code"] == RECOVERY_CHANGED:
        return None  # The driver does not recommend the action any more.
    repaired = repaired and action in _RESETTING
    lasts = action is Action.REBOOT_NODE or age is None or age <= lookback
    say = fail if hard and lasts and not repaired else warn
    place = f"GPU {index}" if index is not None else f"GPU at {_bus_id(event['device'])}"
    times = f"{describe_occurrences(event)}{', repaired since' if repaired else ''}"
    return say(
        f"{place}: XID {event['code']}, {judgement.meaning}{times}",
        gpu=index,
        value={"xid": event["code"], "count": event["count"], "last_age_s": age, "text": event["text"]},
        action=Action.NONE if repaired else action,
        hint=_REPAIRED if repaired else _HINTS.get(action),
        override_key=f"xid.{event['code']}",
    )


def _is_repaired(node: CheckedNode, index: int | None, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> bool:
    """Return whether a GPU was repaired after an XID: a later XID 154 reports no action, or the facts are healthy."""
    for later in (one for one in events if one["code"] == RECOVERY_CHANGED and one["order"] > event["order"]):
        needs_nothing = gpu_failures.parse_new_action(later["text"]) == gpu_failures.NONE
        if needs_nothing and _bus_id(later["device"]) == _bus_id(event["device"]):
            return True
    device = next((d for d in gpu_facts.list_used_gpus(node) if d["index"] == index), None)
    return device is not None and has_recovered(device)


def has_recovered(device: gpu_facts.Device) -> bool:
    """Return whether the facts of a GPU show no effect of a fatal XID."""
    recommended, uncorrected = gpu_facts.read_value(device, "recovery_action"), gpu_facts.read_value(device, "ecc_unc")
    return recommended == gpu_failures.NONE and not uncorrected and gpu_failures.is_answering(device)


_REPAIRED = "Nothing to do: the GPU was reset after the XID; if the XID returns, have the hardware examined"
_HINTS = {
    **gpu_failures.HINTS,
    Action.RESTART_APP: "The program that used the GPU caused this error; nothing to repair",
    Action.NONE: "This XID alone needs no repair; see the other findings of this GPU",
    Action.CONTACT_SUPPORT: "NVIDIA's catalogue names no remedy; ask your vendor if the XID returns",
}


def _bus_id(address: str) -> str:
    """Return a PCI address as domain:bus:device, with a domain of four digits and without the function."""
    parts = address.split(".", maxsplit=1)[0].split(":")
    domain = int(parts[0], 16) if len(parts) == 3 else 0
    return f"{domain:04x}:{':'.join(parts[-2:])}".lower()


def _find_gpu(node: CheckedNode, pci: str) -> tuple[int | None, bool]:
    """Return the index of the run's GPU at a PCI address, and whether any GPU of the node has the address."""
    mine = {d["index"] for d in gpu_facts.list_used_gpus(node)}
    for device in gpu_facts.list_gpus(node):
        address = gpu_facts.read_value(device, "pci")
        if address and _bus_id(address) == _bus_id(pci):
            return (device["index"] if device["index"] in mine else None), True
    return None, False


def find_xid_symptom(gpu: int | None, code: int) -> Symptom | None:
    """Return the symptom of an XID that the driver reports during a run, or `None`.

    The driver does not report the text of an XID. The meaning of XID 154 depends on its text, so XID 154 is no symptom.
    The recovery action of the GPU is a symptom instead (`gpu_failures.find_recovery_symptom`).
    """
    judgement = judge_xid(code) if code != RECOVERY_CHANGED else None
    if judgement is None:
        return None
    hard = judgement.is_hardware and not judgement.needs_confirmation
    status, action = Status.FAIL if hard else Status.WARN, judgement.action
    words = f"XID {code}, {'NVLink error' if code in NVLINK5 else judgement.meaning}"
    repaired_by_reset, key = hard and action in _RESETTING, f"xid.{code}"
    return Symptom(
        f"gpu.xid {code}",
        status,
        words,
        action,
        gpu=gpu,
        is_event=True,
        repaired_by_reset=repaired_by_reset,
        override_key=key,
    )


def is_sample_healthy(gpu: Mapping[str, Any]) -> bool:
    """Return whether a sample shows a healthy GPU: no recovery action, failed call, memory error or lost link."""
    recommended = gpu.get("recovery_action")
    harmed = gpu.get("ecc_unc") or gpu.get("links_lost")
    return recommended == gpu_failures.NONE and gpu_failures.is_answering(gpu) and not harmed
