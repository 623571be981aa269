"""What AMD's driver has reported in the kernel log: errors, hangs, resets, and how they ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.health.check import node_check
from clusterctl.health.checks import amd, gpus
from clusterctl.health.checks.kernel_reach import describe_reach, format_age, report_closed_log
from clusterctl.health.model import Action, Outcome, fail, ok, warn
from clusterctl.health.vendors import AMD

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.health.check import View

Event = dict[str, Any]
_ENDED = ("done", "failed")


@dataclass(frozen=True, slots=True)
class _Meaning:
    """What a kind of event says.

    Attributes:
        hard: It speaks of hardware.
        mends: A reset of the GPU repairs it.
    """

    words: str
    hard: bool
    action: Action
    mends: bool = False


_MEANINGS: dict[tuple[str, str], _Meaning] = {
    ("lost", ""): _Meaning("GPU is lost", True, Action.REBOOT_NODE),
    ("init", ""): _Meaning("the driver could not start the GPU", True, Action.REBOOT_NODE),
    ("worn", ""): _Meaning("more bad memory pages than the driver accepts", True, Action.RMA),
    ("reset", "failed"): _Meaning("a reset of the GPU failed", True, Action.REBOOT_NODE),
    ("reset", "done"): _Meaning("the GPU was reset", False, Action.NONE),
    ("hang", ""): _Meaning("a queue of work hung", False, Action.RESTART_APP),
}


def was_reset_since(view: View, device: gpus.Device, kind: str) -> bool:
    """Tell whether a GPU was reset after the last event of a kind, as far as the kernel log says."""
    own = [event for event in _events(view) if event["device"] == gpus.value(device, "pci")]
    of_kind = [event["order"] for event in own if event["kind"] == kind]
    resets = [event["order"] for event in own if (event["kind"], event["grade"]) == ("reset", "done")]
    return bool(of_kind and resets) and max(resets) > max(of_kind)


def _events(view: View) -> list[Event]:
    events = view.group("kernel_log").data.get("events") or []
    return [event for event in events if event.get("vendor") == AMD]


def _witness(view: View) -> Outcome | None:
    return report_closed_log(view, gpus_speak=True)


@node_check(
    name="gpu.driver_log",
    family="XID and SXid",
    source="lines of amdgpu in the kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted",
    threshold=(
        "no GPU lost, none that the driver could not start, no reset that failed or did not end within `unended` "
        "seconds, no more bad pages than the driver accepts; an uncorrected error FAIL within `lookback` seconds, WARN "
        "once the GPU was reset; resets and hung queues, which programs cause too, WARN within `lookback`"
    ),
    severity="FAIL",
    remedy="Follow the action; `severity: {amdgpu.reset: ignore}` silences a kind (ras, hang, reset, lost, worn, init)",
    action=Action.REBOOT_NODE,
    gpu=True,
    vendors=(AMD,),
    group="kernel_log",
    root="counts of errors and bad pages, and that the GPUs answer, speak for them",
    witness=_witness,
    thresholds={"lookback": 86400.0, "unended": 120.0},
)
def driver_log(view: View) -> Iterator[Outcome]:
    """Errors, hangs and resets that AMD's driver reported since boot."""
    events = _events(view)
    outcomes = [outcome for event in events if (outcome := _weigh(view, event, events)) is not None]
    yield from outcomes or [ok(f"no trouble of amdgpu {describe_reach(view)}")]


def _weigh(view: View, event: Event, events: list[Event]) -> Outcome | None:
    device, index, mine = _place(view, event["device"])
    age = event["last_age_s"]
    recent = age is None or age <= view.limit("lookback")
    meaning = _meaning(view, event, events)
    if not mine or meaning is None or not (recent or meaning.hard):
        return None
    mended = meaning.mends and _mended(event, events)
    say = fail if meaning.hard and not mended and (recent or not meaning.mends) else warn
    times = f", {event['count']} times" if event["count"] > 1 else ""
    when = f", {format_age(age)}" if age is not None else ""
    action = Action.NONE if mended else meaning.action
    return say(
        f"{_label(index, event['device'])}: {meaning.words}{times}{when}{', since reset' if mended else ''}",
        gpu=index,
        value={"kind": event["kind"], "count": event["count"], "last_age_s": age, "text": event["text"]},
        action=action,
        hint=_hint(view, device, action),
        key=f"amdgpu.{event['kind']}",
    )


def _meaning(view: View, event: Event, events: list[Event]) -> _Meaning | None:
    kind, grade = event["kind"], event["grade"]
    if kind == "ras":
        return _Meaning(f"uncorrected errors in {grade}", True, Action.RESET_GPU, mends=True)
    if (kind, grade) == ("reset", "begin"):
        ended = any(e["order"] > event["order"] and e["grade"] in _ENDED for e in _of(event, events, "reset"))
        age = event["last_age_s"]
        if ended or (age is not None and age < view.limit("unended")):
            return None
        return _Meaning("a reset of the GPU has not ended", True, Action.REBOOT_NODE)
    return _MEANINGS.get((kind, grade))


def _mended(event: Event, events: list[Event]) -> bool:
    return any(e["order"] > event["order"] and e["grade"] == "done" for e in _of(event, events, "reset"))


def _of(event: Event, events: list[Event], kind: str) -> list[Event]:
    return [other for other in events if other["device"] == event["device"] and other["kind"] == kind]


def _place(view: View, address: str) -> tuple[gpus.Device | None, int | None, bool]:
    """Return the GPU at an address, its index, and whether the run uses it; of one without address nobody knows."""
    device = next((d for d in gpus.all_gpus(view) if gpus.value(d, "pci") == address), None)
    if device is None:
        return None, None, True
    return device, device["index"], device in gpus.used_gpus(view)


def _label(index: int | None, address: str) -> str:
    if index is not None:
        return f"GPU {index}"
    return f"GPU at {address}" if address else "a GPU"


def _hint(view: View, device: gpus.Device | None, action: Action) -> str:
    if action is Action.RESTART_APP:
        return "A program may have caused it; if it comes again with others, have the hardware looked at"
    if action is Action.NONE:
        return "Nothing to do: the GPU has been reset; look at what came before it if it was not on purpose"
    remedy = amd.reset_hint(view, device or {"index": 0}, action)
    return remedy or "Look at the lines of amdgpu around it in the kernel log (`dmesg -T`)"


CHECKS = (driver_log,)
