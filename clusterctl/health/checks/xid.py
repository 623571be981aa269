"""XIDs: errors that NVIDIA's driver reports of a GPU, as the kernel log counts them and as a running job meets them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import devices, gpus, recovery
from clusterctl.health.checks.kernel_reach import describe_reach, format_age, report_closed_log
from clusterctl.health.checks.xid_catalogue import CATALOGUE, Weight
from clusterctl.health.model import Action, Outcome, Status, fail, ok, warn
from clusterctl.health.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from clusterctl.health.check import View

NVLINK5 = range(144, 151)
RECOVERY_CHANGED = 154
_CONTAINED = 94
_RESETTING = (Action.RESET_GPU,)
"""Actions that repair the GPU itself: after them its XIDs are history. A reboot begins a new log."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an XID says.

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
    """Return what one XID says, by NVIDIA's catalogue; `None` where it says that all is well again."""
    if code == RECOVERY_CHANGED:
        value = recovery.parse_changed_action(text)
        if value == recovery.NONE:
            return None
        if value is None:
            return Judgement(False, Action.CONTACT_SUPPORT, f"recovery action changed: {text[:80]}")
        recommended = recovery.describe_action(value)
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


def _witness(view: View) -> Outcome | None:
    return report_closed_log(view, gpus_speak=True)


@node_check(
    name="gpu.xid",
    family="XID and SXid",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted by GPU and code",
    threshold=(
        "no hardware XID. One that a reset repairs: within `lookback` seconds FAIL, WARN once the GPU is well again "
        "(XID 154 to None after it; or recovery action none, every call answered, no uncorrected memory error). One "
        "that asks for a reboot: FAIL for the rest of this boot. Application errors WARN; `fail_contained` XIDs 94 on "
        "one GPU within `lookback` FAIL"
    ),
    severity="FAIL",
    remedy="Follow the action; `severity: {xid.N: ignore}` silences one code",
    action=Action.RESET_GPU,
    gpu=True,
    group="kernel_log",
    root="recovery action, ECC counters and remapped rows speak for the GPUs; during a run the driver reports XIDs",
    witness=_witness,
    thresholds={"lookback": 86400.0, "fail_contained": 3.0},
)
def xid(view: View) -> Iterator[Outcome]:
    """Errors that the driver reported since boot, weighed by NVIDIA's catalogue.

    An application's fault never fails a node.
    """
    events = _events(view)
    outcomes = [outcome for event in events if (outcome := _weigh(view, event, events)) is not None]
    yield from outcomes or [ok(f"no XID {describe_reach(view)}")]


def _events(view: View) -> list[dict[str, Any]]:
    events = view.group("kernel_log").data.get("events") or []
    return [event for event in events if event["kind"] == "xid"]


def gpus_with(view: View, codes: Collection[int]) -> set[int]:
    """Return the indices of the run's GPUs of which the kernel log has one of these XIDs."""
    gpus = {_gpu_of(view, event["device"])[0] for event in _events(view) if event["code"] in codes}
    return {index for index in gpus if index is not None}


def _weigh(view: View, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> Outcome | None:
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
    times = f", {event['count']} times" if event["count"] > 1 else ""
    when = f", {format_age(age)}" if age is not None else ""
    return say(
        f"{place}: XID {event['code']}, {judgement.meaning}{times}{when}{', since repaired' if mended else ''}",
        gpu=index,
        value={"xid": event["code"], "count": event["count"], "last_age_s": age, "text": event["text"]},
        action=Action.NONE if mended else action,
        hint=_MENDED if mended else _HINTS.get(action),
        key=f"xid.{event['code']}",
    )


def _mended(view: View, index: int | None, event: dict[str, Any], events: Sequence[dict[str, Any]]) -> bool:
    """Tell whether a GPU was repaired after an XID: the driver took its wish back, or everything reads well."""
    for later in events:
        taken_back = later["code"] == RECOVERY_CHANGED and recovery.parse_changed_action(later["text"]) == recovery.NONE
        if taken_back and later["order"] > event["order"] and _bus(later["device"]) == _bus(event["device"]):
            return True
    device = next((d for d in gpus.used_gpus(view) if d["index"] == index), None)
    return device is not None and is_well(device)


def is_well(device: gpus.Device) -> bool:
    """Tell whether a GPU reads well in all that a fatal XID would leave behind."""
    recommended, uncorrected = gpus.value(device, "recovery_action"), gpus.value(device, "ecc_unc")
    return recommended == recovery.NONE and not uncorrected and devices.is_answering(device)


_MENDED = "Nothing to do: the GPU has been reset since; if it comes again, have the hardware looked at"
_HINTS = {
    **recovery.HINTS,
    Action.RESTART_APP: "An error of the program that used the GPU; nothing to repair",
    Action.NONE: "Nothing to do by itself; look at the other findings of this GPU",
    Action.CONTACT_SUPPORT: "NVIDIA's catalogue names no cure; ask your vendor if it repeats",
}


def _bus(address: str) -> str:
    """Return domain:bus:device without leading zeros of the domain and without the function."""
    parts = address.split(".", maxsplit=1)[0].split(":")
    domain = int(parts[0], 16) if len(parts) == 3 else 0
    return f"{domain:04x}:{':'.join(parts[-2:])}".lower()


def _gpu_of(view: View, pci: str) -> tuple[int | None, bool]:
    """Return the index of the declared GPU at an address, and whether any GPU of the node has the address."""
    mine = {d["index"] for d in gpus.used_gpus(view)}
    for device in gpus.all_gpus(view):
        address = gpus.value(device, "pci")
        if address and _bus(address) == _bus(pci):
            return (device["index"] if device["index"] in mine else None), True
    return None, False


# --- during a run


def sign(gpu: int | None, code: int) -> Symptom | None:
    """Return what an XID says that the driver reports during a run.

    Its text is only in the kernel log; where the text decides, the recovery action is a sign of its own.
    """
    if code == RECOVERY_CHANGED:
        return None
    judgement = judge_event(code)
    if judgement is None:
        return None
    hard = judgement.hard and not judgement.confirmed
    meaning = "NVLink error" if code in NVLINK5 else judgement.meaning
    return Symptom(
        gpu=gpu,
        check=f"gpu.xid {code}",
        status=Status.FAIL if hard else Status.WARN,
        words=f"XID {code}, {meaning}",
        action=judgement.action,
        event=True,
        mends=hard and judgement.action in _RESETTING,
        rule=f"xid.{code}",
    )


def reads_well(gpu: Mapping[str, Any]) -> bool:
    """Tell whether a GPU of a sample is well after an XID: what the driver asks for, its answers, memory and links."""
    recommended = gpu.get("recovery_action")
    harmed = gpu.get("ecc_unc") or gpu.get("links_lost")
    return recommended == recovery.NONE and devices.is_answering(gpu) and not harmed


CHECKS = (xid,)
