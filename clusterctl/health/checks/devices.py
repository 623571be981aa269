"""Whether each GPU answers, before a run and during it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health import answers
from clusterctl.health.check import node_check
from clusterctl.health.checks import amd, gpus
from clusterctl.health.checks.recovery import HINTS
from clusterctl.health.model import Action, Outcome, Status, failed, passed, warned
from clusterctl.health.signs import Sign
from clusterctl.health.vendors import AMD, JUDGED
from clusterctl.wording import plural

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
        f"reset or insufficient power {answers.LOOKS} times in a row; once WARN"
    ),
    severity="FAIL",
    remedy="Reboot the node; if it happens again to the same serial number, have the GPU replaced",
    action=Action.REBOOT_NODE,
    gpu=True,
    vendors=JUDGED,
)
def lost(view: View) -> Iterator[Outcome]:
    """Every GPU answers. A lost GPU has fallen off the bus or needs a reset."""
    blocked = gpus.library_gate(view)
    if blocked is not None:
        yield blocked
        return
    sick = False
    for device in gpus.devices(view):
        outcome = _judge(view, device)
        if outcome is not None:
            sick = True
            yield outcome
    if not sick:
        yield passed(
            f"{plural(len(gpus.devices(view)), 'GPU')} {'answers' if len(gpus.devices(view)) == 1 else 'answer'}"
        )


def _judge(view: View, device: gpus.Device) -> Outcome | None:
    gravest = answers.gravest(device.get("err", {}))
    if gravest is not None:
        word, calls = gravest
        action, text = answers.MEANINGS[word].action, answers.words(device, calls[0])
        looks = "" if answers.MEANINGS[word].at_once else f", {answers.LOOKS} looks in a row"
        message = f"{gpus.label(device)}: {text} ({answers.named(calls)}){looks}"
        code = (device.get("codes") or {}).get(calls[0])
        hint = amd.hint(view, device, action) if device.get("vendor") == AMD else HINTS.get(action)
        return failed(message, gpu=device["index"], value=code, action=action, hint=hint)
    odd = device.get("odd") or {}
    if odd:
        text = answers.code_name(device, next(iter(odd.values())))
        message = f"{gpus.label(device)}: {text} ({answers.named(odd)}), then well"
        return warned(message, gpu=device["index"], value=odd, action=Action.NONE, hint=_ONCE)
    return None


_ONCE = "Once may be chance; if it comes again, look at the kernel log around it (`dmesg -T`)"


def answers_well(gpu: Mapping[str, Any]) -> bool:
    """Tell whether a GPU, of facts or of a sample, answered every call as far as the calls speak of it."""
    return answers.gravest(gpu.get("err") or {}) is None


def streaks(before: Streaks, gpu: Mapping[str, Any]) -> Streaks:
    """Count on, for one GPU of a sample, how often each call has given an answer that may be chance."""
    index = int(gpu["gpu"])
    doubtful = [call for call, word in (gpu.get("err") or {}).items() if word in answers.MEANINGS]
    return {(index, call): before.get((index, call), 0) + 1 for call in doubtful}


def sign(gpu: Mapping[str, Any], counted: Streaks) -> Sign | None:
    """Return what a sample's answers say of a GPU in a run: one odd answer says nothing."""
    index = int(gpu["gpu"])
    certain = {
        call: word
        for call, word in (gpu.get("err") or {}).items()
        if word in answers.MEANINGS
        and (answers.MEANINGS[word].at_once or counted.get((index, call), 0) >= answers.LOOKS)
    }
    gravest = answers.gravest(certain)
    if gravest is None:
        return None
    word, calls = gravest
    return Sign(
        gpu=index,
        check="gpu.lost",
        status=Status.FAIL,
        words=answers.words(gpu, calls[0]),
        action=answers.MEANINGS[word].action,
        detail="" if answers.MEANINGS[word].at_once else answers.named(calls),
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
    corrupted = [d for d in gpus.devices(view) if answers.CORRUPTED in d.get("err", {}).values()]
    for device in corrupted:
        yield failed(f"{gpus.label(device)}: corrupted infoROM", gpu=device["index"], value=14)
    if not corrupted:
        yield from gpus.each(view, "inforom", _valid, "infoROM of {n} GPUs is valid")


def _valid(_device: gpus.Device, _value: Any) -> None:
    return None


CHECKS = (lost, inforom)
