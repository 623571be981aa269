"""Checks of GPUs for fatal errors that the library reports, and for recovery actions that the driver recommends."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from clusterctl.formatting import plural
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import amd, gpu_facts
from clusterctl.health.findings import AMD, JUDGED, Action, Outcome, Status, Symptom, fail, ok, warn
from clusterctl.health.gpu_library_errors import (
    CORRUPTED,
    ERROR_MEANINGS,
    READINGS,
    describe_error_code,
    describe_missing_value,
    find_worst_error,
    format_failed_calls,
)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A recovery action that the driver can recommend.

    Attributes:
        description: Name of the recovery action.
        action: The repair.
        status_before_run: Status of the finding before a run.
        status_during_run: Status of the symptom during a run.
    """

    description: str
    action: Action
    status_before_run: Status = Status.FAIL
    status_during_run: Status = Status.FAIL


NONE = 0
_DRAINED = "a GPU that works on with less: NVIDIA lets work go on and be moved away later"
RECOVERIES: dict[int, Recovery] = {
    1: Recovery("GPU reset", Action.RESET_GPU),
    2: Recovery("node reboot", Action.REBOOT_NODE),
    3: Recovery("drain P2P", Action.RESET_GPU, Status.WARN, Status.WARN),
    4: Recovery("drain and reset", Action.RESET_GPU, Status.FAIL, Status.WARN),
    5: Recovery("recover IMEX domain", Action.RESTART_FABRICMANAGER, Status.WARN, Status.WARN),
    6: Recovery("bus reset", Action.RESET_GPU),
    7: Recovery("system reboot", Action.REBOOT_NODE),
}
_UNKNOWN_RECOVERY = Recovery("an unknown action", Action.CONTACT_SUPPORT, Status.FAIL, Status.WARN)

HINTS: dict[Action, str] = {
    Action.RESET_GPU: "Stop all jobs on the node, then `sudo nvidia-smi -r -i N`; with an NVSwitch, reboot instead",
    Action.REBOOT_NODE: "Reboot the node; if the error returns on the same serial number, have the GPU replaced",
    Action.RESTART_FABRICMANAGER: "`sudo systemctl restart nvidia-imex` on all nodes of the NVLink domain",
    Action.CONTACT_SUPPORT: "Ask your vendor; `nvidia-smi -q` shows the action as `GPU Recovery Action`",
    Action.CHECK_POWER_COOLING: "Check the power cables of the GPU and the power supply of the node",
}
"""The remedy of each action for an NVIDIA GPU."""

_CHANGED_ACTION = re.compile(r"\bto\s+(?:0x([0-9a-fA-F]+))?\s*(?:\(?([A-Za-z0-9 ]+)\)?)?\s*$")
_ACTION_NAMES = {
    "none": 0,
    "gpu reset required": 1,
    "gpu reset": 1,
    "node reboot required": 2,
    "node reboot": 2,
    "drain p2p": 3,
    "drain and reset": 4,
    "recover imex domain": 5,
    "bus reset": 6,
    "system reboot": 7,
}


def get_recovery(action: int) -> Recovery:
    """Return the recovery action with this number in NVML. Unknown numbers have a recovery action too."""
    return RECOVERIES.get(action, _UNKNOWN_RECOVERY)


def parse_new_action(text: str) -> int | None:
    """Return the number of the recovery action at the end of the text of an XID 154, or `None`.

    If the text contains a number, the number decides, because names differ between drivers: driver 610 writes
    `0x2 (OS Reboot)`, others write `0x2 (Node Reboot Required)`.
    """
    match = _CHANGED_ACTION.search(text.strip())
    if match is None:
        return None
    number, words = match.groups()
    return int(number, 16) if number else _ACTION_NAMES.get((words or "").strip().lower())


@remedy(Action.RESET_GPU, "Follow the driver's recommendation: stop all jobs, then `sudo nvidia-smi -r -i N` or reboot")
@gpu_facts.gpu_check("gpu.recovery_action", "GPU state", "recovery_action", "no recovery action on {n} GPUs")
def check_recovery_action(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """The driver recommends no reset and no reboot.

    Unlike the kernel log, this recommendation is readable without root.

    Source: NVML field 230 (driver 570 and later)
    Healthy: none. The actions drain P2P and recover IMEX domain are WARN: the GPU works with limits, and NVIDIA lets
        running work continue
    """
    if gpu.value == NONE:
        return None
    recommended = get_recovery(gpu.value)
    say = gpu.fail if recommended.status_before_run is Status.FAIL else gpu.warn
    action = recommended.action
    return say(f"the driver recommends: {recommended.description}", expected=NONE, action=action, hint=HINTS[action])


def find_recovery_symptom(gpu: int, value: int | None) -> Symptom | None:
    """Return the symptom of a GPU for which the driver recommends a recovery action, or `None`."""
    if not value:
        return None
    recommended = get_recovery(value)
    words, status = f"the driver recommends: {recommended.description}", recommended.status_during_run
    drained = status is Status.WARN
    return Symptom("gpu.recovery_action", status, words, recommended.action, gpu=gpu, drains_node=drained)


# --- Whether each GPU answers, before a run and during it.

ErrorStreaks = dict[tuple[int, str], int]
"""(Index of a GPU, name of a call) to the number of samples in a row with a possibly transient error of the call."""


@remedy(Action.REBOOT_NODE, "Reboot the node; if it happens again to the same serial number, have the GPU replaced")
@node_check("gpu.lost", "GPU state", gpu=True, vendors=JUDGED)
def check_lost_gpus(node: CheckedNode) -> Outcome | list[Outcome]:
    """Every GPU answers.

    A lost GPU has fallen off the bus or needs a reset.

    Source: the results of every NVML call on the GPU; of AMD every file of amdgpu and the card's configuration space.
        The agent repeats a reading with a possibly transient error up to three times
    Healthy: no call returns lost or reset required. No call returns unknown error, timed out, interrupt problem, being
        reset or insufficient power 3 times in a row; once is WARN
    """
    gpu_facts.require_library_facts(node)
    devices = gpu_facts.list_used_gpus(node)
    lost = [outcome for device in devices if (outcome := _judge_gpu(node, device)) is not None]
    return lost or ok(f"{plural(len(devices), 'GPU')} {'answers' if len(devices) == 1 else 'answer'}")


def _judge_gpu(node: CheckedNode, device: gpu_facts.Device) -> Outcome | None:
    gravest = find_worst_error(device.get("err", {}))
    if gravest is not None:
        word, calls = gravest
        action, text = (ERROR_MEANINGS[word].action, describe_missing_value(device, calls[0]))
        looks = "" if ERROR_MEANINGS[word].is_conclusive else f", {READINGS} readings in a row"
        message = f"{gpu_facts.describe_gpu(device)}: {text} ({format_failed_calls(calls)}){looks}"
        code = (device.get("codes") or {}).get(calls[0])
        hint = amd.get_reset_hint(node, device, action) if device.get("vendor") == AMD else HINTS.get(action)
        return fail(message, gpu=device["index"], value=code, action=action, hint=hint)
    odd = device.get("odd") or {}
    if odd:
        text = describe_error_code(device, next(iter(odd.values())))
        message = f"{gpu_facts.describe_gpu(device)}: {text} ({format_failed_calls(odd)}), then no error"
        return warn(message, gpu=device["index"], value=odd, action=Action.NONE, hint=_ONCE_HINT)
    return None


_ONCE_HINT = "A single error may be transient; if it returns, see the kernel log at that time (`dmesg -T`)"


def is_answering(gpu: Mapping[str, Any]) -> bool:
    """Return whether no call reported an error of the GPU itself.

    Args:
        gpu: The GPU in the facts or in a sample.
    """
    return find_worst_error(gpu.get("err") or {}) is None


def update_error_streaks(streaks: ErrorStreaks, gpu: Mapping[str, Any]) -> ErrorStreaks:
    """Return the error streaks of one GPU after its next sample.

    Args:
        streaks: The streaks before this sample.
        gpu: The GPU in the sample.
    """
    index = int(gpu["gpu"])
    doubtful = [call for call, word in (gpu.get("err") or {}).items() if word in ERROR_MEANINGS]
    return {(index, call): streaks.get((index, call), 0) + 1 for call in doubtful}


def find_gpu_error_symptom(gpu: Mapping[str, Any], streaks: ErrorStreaks) -> Symptom | None:
    """Return the symptom of a GPU that failed, or `None`.

    One conclusive error is enough. Any other error counts if the same call failed in `READINGS` samples in a row.
    """
    index = int(gpu["gpu"])
    certain = {
        call: word
        for call, word in (gpu.get("err") or {}).items()
        if (meaning := ERROR_MEANINGS.get(word))
        and (meaning.is_conclusive or streaks.get((index, call), 0) >= READINGS)
    }
    gravest = find_worst_error(certain)
    if gravest is None:
        return None
    word, calls = gravest
    words, meaning = describe_missing_value(gpu, calls[0]), ERROR_MEANINGS[word]
    detail = "" if meaning.is_conclusive else format_failed_calls(calls)
    return Symptom("gpu.lost", Status.FAIL, words, meaning.action, gpu=index, detail=detail)


@remedy(
    Action.CONTACT_SUPPORT,
    "Ask your vendor to flash the infoROM (DCGM's advice); if it is corrupted again, have the GPU replaced",
)
@node_check("gpu.inforom", "GPU state", gpu=True)
def check_inforom(node: CheckedNode) -> list[Outcome]:
    """The configuration memory (infoROM) of every GPU is intact.

    Source: NVML nvmlDeviceValidateInforom, and `corrupted infoROM` from any other call
    Healthy: valid
    """
    corrupted = [d for d in gpu_facts.list_used_gpus(node) if CORRUPTED in d.get("err", {}).values()]
    if corrupted:
        return [fail(f"{gpu_facts.describe_gpu(d)}: corrupted infoROM", gpu=d["index"], value=14) for d in corrupted]
    return gpu_facts.judge_each_gpu(node, "inforom", lambda _: None, "infoROM of {n} GPUs is valid")
