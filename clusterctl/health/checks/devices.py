"""Whether each GPU answers, before a run and during it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.formatting import plural
from clusterctl.health import driver_errors
from clusterctl.health.check import node_check
from clusterctl.health.checks import amd, gpus
from clusterctl.health.checks.recovery import HINTS
from clusterctl.health.model import Action, Outcome, Status, fail, ok, warn
from clusterctl.health.symptom import Symptom
from clusterctl.health.vendors import AMD, JUDGED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from clusterctl.health.check import View

Streaks = dict[tuple[int, str], int]
"""GPU and call to the number of looks in a row that gave it an answer which may be chance."""


@node_check(
    name="gpu.lost",
    family="GPU state",
    source=(
        "the answers of every NVML call on the GPU, or of every file of amdgpu and the card's configuration space; "
        "what may be chance is asked three times"
    ),
    threshold=(
        f"no call answers lost or reset required; none answers unknown error, timed out, interrupt problem, being "
        f"reset or insufficient power {driver_errors.READINGS} times in a row; once WARN"
    ),
    severity="FAIL",
    remedy="Reboot the node; if it happens again to the same serial number, have the GPU replaced",
    action=Action.REBOOT_NODE,
    gpu=True,
    vendors=JUDGED,
)
def judge_lost(view: View) -> Iterator[Outcome]:
    """Every GPU answers. A lost GPU has fallen off the bus or needs a reset."""
    blocked = gpus.why_library_not_judged(view)
    if blocked is not None:
        yield blocked
        return
    sick = False
    for device in gpus.used_gpus(view):
        outcome = _judge(view, device)
        if outcome is not None:
            sick = True
            yield outcome
    if not sick:
        yield ok(
            f"{plural(len(gpus.used_gpus(view)), 'GPU')} {'answers' if len(gpus.used_gpus(view)) == 1 else 'answer'}"
        )


def _judge(view: View, device: gpus.Device) -> Outcome | None:
    gravest = driver_errors.find_worst(device.get("err", {}))
    if gravest is not None:
        word, calls = gravest
        action, text = driver_errors.MEANINGS[word].action, driver_errors.describe_missing_value(device, calls[0])
        looks = "" if driver_errors.MEANINGS[word].at_once else f", {driver_errors.READINGS} looks in a row"
        message = f"{gpus.label(device)}: {text} ({driver_errors.join_calls(calls)}){looks}"
        code = (device.get("codes") or {}).get(calls[0])
        hint = amd.reset_hint(view, device, action) if device.get("vendor") == AMD else HINTS.get(action)
        return fail(message, gpu=device["index"], value=code, action=action, hint=hint)
    odd = device.get("odd") or {}
    if odd:
        text = driver_errors.code_name(device, next(iter(odd.values())))
        message = f"{gpus.label(device)}: {text} ({driver_errors.join_calls(odd)}), then well"
        return warn(message, gpu=device["index"], value=odd, action=Action.NONE, hint=_ONCE)
    return None


_ONCE = "Once may be chance; if it comes again, look at the kernel log around it (`dmesg -T`)"


def is_answering(gpu: Mapping[str, Any]) -> bool:
    """Tell whether a GPU, of facts or of a sample, answered every call as far as the calls speak of it."""
    return driver_errors.find_worst(gpu.get("err") or {}) is None


def count_streaks(before: Streaks, gpu: Mapping[str, Any]) -> Streaks:
    """Count on, for one GPU of a sample, how often each call has given an answer that may be chance."""
    index = int(gpu["gpu"])
    doubtful = [call for call, word in (gpu.get("err") or {}).items() if word in driver_errors.MEANINGS]
    return {(index, call): before.get((index, call), 0) + 1 for call in doubtful}


def sign(gpu: Mapping[str, Any], counted: Streaks) -> Symptom | None:
    """Return what a sample's answers say of a GPU in a run: one odd answer says nothing."""
    index = int(gpu["gpu"])
    certain = {
        call: word
        for call, word in (gpu.get("err") or {}).items()
        if word in driver_errors.MEANINGS
        and (driver_errors.MEANINGS[word].at_once or counted.get((index, call), 0) >= driver_errors.READINGS)
    }
    gravest = driver_errors.find_worst(certain)
    if gravest is None:
        return None
    word, calls = gravest
    return Symptom(
        gpu=index,
        check="gpu.lost",
        status=Status.FAIL,
        words=driver_errors.describe_missing_value(gpu, calls[0]),
        action=driver_errors.MEANINGS[word].action,
        detail="" if driver_errors.MEANINGS[word].at_once else driver_errors.join_calls(calls),
    )


@node_check(
    name="gpu.inforom",
    family="GPU state",
    source="NVML nvmlDeviceValidateInforom, and `corrupted infoROM` from any other call",
    threshold="valid",
    severity="FAIL",
    remedy="Ask your vendor to flash the infoROM (DCGM's advice); if it is corrupted again, have the GPU replaced",
    action=Action.CONTACT_SUPPORT,
    gpu=True,
)
def inforom(view: View) -> Iterator[Outcome]:
    """The configuration memory of every GPU is intact."""
    corrupted = [d for d in gpus.used_gpus(view) if driver_errors.CORRUPTED in d.get("err", {}).values()]
    for device in corrupted:
        yield fail(f"{gpus.label(device)}: corrupted infoROM", gpu=device["index"], value=14)
    if not corrupted:
        yield from gpus.judge_each(view, "inforom", _valid, "infoROM of {n} GPUs is valid")


def _valid(_device: gpus.Device, _value: Any) -> None:
    return None


CHECKS = (judge_lost, inforom)
