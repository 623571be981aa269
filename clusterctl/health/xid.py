"""XID and SXid events in the kernel log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.health import gpus
from clusterctl.health.check import View, node_check
from clusterctl.health.model import Action, Outcome, failed, passed, warned
from clusterctl.health.xid_catalogue import CATALOGUE, Weight

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\).*?: (\d+),\s*(.*)")
_OFF_BUS = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus")
_SXID = re.compile(r"nvidia-nvswitch(\d*).*?: SXid \(PCI:([^)]+)\): (\d+), (Fatal|Non-fatal)?\s*,?\s*(.*)")
NVLINK5 = range(144, 151)
_SILENT = (12021, 12023)
"""SXids of the ECC rate limit of a switch: data may be corrupted without a word."""

_RECOVERY_TEXT = (
    ("node reboot", Action.REBOOT_NODE),
    ("system reboot", Action.REBOOT_NODE),
    ("gpu reset", Action.RESET_GPU),
    ("drain and reset", Action.RESET_GPU),
    ("drain p2p", Action.RESET_GPU),
)


@dataclass(frozen=True, slots=True)
class Event:
    """One XID. `age_s` is seconds before the look, or `None`; `pci` is bus:device as the log writes it."""

    code: int
    pci: str
    text: str
    age_s: float | None


def parse(lines: Iterable[dict[str, object]]) -> list[Event]:
    """Return the XIDs among lines of the kernel log, the oldest first."""
    events = []
    for line in lines:
        text, age = str(line.get("text", "")), line.get("age_s")
        seconds = float(age) if isinstance(age, (int, float)) else None
        if found := _XID.search(text):
            events.append(Event(int(found.group(2)), found.group(1).lower(), found.group(3), seconds))
        elif found := _OFF_BUS.search(text):
            events.append(Event(79, found.group(1).lower(), "GPU has fallen off the bus", seconds))
    return events


@node_check(
    name="gpu.xid",
    family="XID and SXid",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log)",
    threshold=(
        "no hardware XID within `lookback` seconds; older ones and application errors WARN; "
        "`fail_contained` XIDs 94 on one GPU FAIL"
    ),
    severity="FAIL",
    remedy="Follow the action; `severity: {xid.N: ignore}` silences one code",
    action=Action.RESET_GPU,
    gpu=True,
    group="kernel_log",
    thresholds={"lookback": 86400.0, "fail_contained": 3.0},
)
def xid(view: View) -> Iterator[Outcome]:
    """Errors that the driver reported since boot, weighed by NVIDIA's catalogue.

    An application's fault never fails a node.
    """
    events = parse(view.group().data.get("lines") or [])
    folded: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        folded.setdefault((_bus(event.pci), event.code), []).append(event)
    count = 0
    for (pci, code), same in folded.items():
        outcome = _weigh(view, pci, code, same)
        if outcome is not None:
            count += 1
            yield outcome
    if not count:
        yield passed("no XID since boot")


def _weigh(view: View, pci: str, code: int, same: list[Event]) -> Outcome | None:
    """Judge all events of one code on one GPU, by the newest of them."""
    newest = same[-1]
    index, known = _gpu_of(view, pci)
    if known and index is None:
        return None  # a GPU of the node that this run does not use
    hard, action, meaning = judge_event(newest)
    if code == 154 and not hard:
        return None
    ages = [event.age_s for event in same if event.age_s is not None]
    recent = newest.age_s is None or newest.age_s <= view.limit("lookback")
    if code == 94 and len([a for a in ages if a <= view.limit("lookback")]) >= view.limit("fail_contained"):
        hard, action = True, Action.RESET_GPU
    if code == 109:
        hard = _asks_for_action(view, index)
    place = f"GPU {index}" if index is not None else f"GPU at {pci}"
    times = f", {len(same)} times" if len(same) > 1 else ""
    when = f", {_ago(newest.age_s)}" if newest.age_s is not None else ""
    say = failed if hard and recent else warned
    return say(
        f"{place}: XID {code}, {meaning}{times}{when}",
        gpu=index,
        value={"xid": code, "count": len(same), "last_age_s": newest.age_s, "text": newest.text[:200]},
        action=action,
        hint=_HINTS.get(action),
        key=f"xid.{code}",
    )


def judge_event(event: Event) -> tuple[bool, Action, str]:
    """Return whether an XID speaks of hardware, what to do, and what it means."""
    if event.code == 154:
        for words, action in _RECOVERY_TEXT:
            if words in event.text.lower():
                return True, action, f"recovery action changed to {words}"
        return False, Action.NONE, "recovery action cleared"
    if event.code == 109:
        return False, Action.RESET_GPU, "context switch timed out"
    if event.code in NVLINK5:
        fatal = re.search(r"(?<!non-)\bfatal\b", event.text, re.IGNORECASE) is not None
        return (
            fatal,
            Action.RESET_GPU if fatal else Action.NONE,
            "NVLink error" + (", fatal" if fatal else ", not fatal"),
        )
    known = CATALOGUE.get(event.code)
    if known is None:
        return False, Action.CONTACT_SUPPORT, "not in the catalogue"
    meaning = known.meaning if known.weight is Weight.HARDWARE else f"{known.meaning} ({known.weight.value})"
    return known.weight is Weight.HARDWARE, known.action, meaning


_HINTS = {
    Action.REBOOT_NODE: "Reboot the node; twice the same on one serial number means a replacement",
    Action.RESET_GPU: "Stop all jobs on the node, then `sudo nvidia-smi -r -i N`, or reboot where there is an NVSwitch",
    Action.RESTART_APP: "An error of the program that used the GPU; nothing to repair",
    Action.NONE: "Nothing to do by itself; look at the other findings of this GPU",
    Action.CHECK_POWER_COOLING: "Check the power cables of the GPU",
    Action.CONTACT_SUPPORT: "Not in NVIDIA's catalogue as we know it; ask your vendor if it repeats",
}


@node_check(
    name="gpu.sxid",
    family="XID and SXid",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log)",
    threshold="no fatal SXid within `lookback` seconds; others WARN",
    severity="FAIL",
    remedy="Restart the fabric manager and reset the GPUs of the node, or reboot it",
    action=Action.RESTART_FABRICMANAGER,
    gpu=True,
    group="kernel_log",
    thresholds={"lookback": 86400.0},
)
def sxid(view: View) -> Iterator[Outcome]:
    """Errors that an NVSwitch reported since boot."""
    seen: dict[tuple[str, int], tuple[bool, str, float | None]] = {}
    for line in view.group().data.get("lines") or []:
        found = _SXID.search(str(line.get("text", "")))
        if found:
            seen[found.group(2), int(found.group(3))] = (found.group(4) == "Fatal", found.group(5), line.get("age_s"))
    for (pci, code), (fatal, text, age) in seen.items():
        silent = ", data may be corrupted silently" if code in _SILENT else ""
        recent = age is None or age <= view.limit("lookback")
        say = failed if fatal and recent else warned
        kind = "fatal" if fatal else "not fatal"
        when = f", {_ago(age)}" if age is not None else ""
        yield say(
            f"NVSwitch {pci}: SXid {code}, {kind}{silent}{when}",
            value={"sxid": code, "text": text[:200]},
            key=f"sxid.{code}",
        )
    if not seen:
        yield passed("no SXid since boot")


def _bus(address: str) -> str:
    """Return domain:bus:device without leading zeros of the domain and without the function."""
    parts = address.split(".", maxsplit=1)[0].split(":")
    domain = int(parts[0], 16) if len(parts) == 3 else 0
    return f"{domain:04x}:{':'.join(parts[-2:])}".lower()


def _gpu_of(view: View, pci: str) -> tuple[int | None, bool]:
    """Return the index of the declared GPU at an address, and whether any GPU of the node has the address."""
    everyone = view.group("nvml").data.get("devices") or []
    mine = {d["index"] for d in gpus.devices(view)}
    for device in everyone:
        address = device.get("v", {}).get("pci")
        if address and _bus(address) == pci:
            return (device["index"] if device["index"] in mine else None), True
    return None, False


def _asks_for_action(view: View, index: int | None) -> bool:
    return any(d.get("v", {}).get("recovery_action") for d in gpus.devices(view) if index in (None, d["index"]))


def _ago(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


CHECKS = (xid, sxid)
