"""Checks of AMD GPUs: set-up, XGMI links, error counters of the hardware (RAS), and the driver's kernel log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterctl.formatting import group_pairs
from clusterctl.health.check import CheckedCluster, CheckedNode, cluster_check, node_check, remedy
from clusterctl.health.checks import comparison, gpu_facts
from clusterctl.health.checks.gpu_thermal import COOLING
from clusterctl.health.checks.machine_kernel_log import (
    describe_covered_time,
    describe_occurrences,
    report_unreadable_gpu_log,
)
from clusterctl.health.findings import AMD, Action, Outcome, Status, Symptom, fail, ok, skip, unknown, warn

_HINTS = {
    Action.REBOOT_NODE: "Reboot the node; if the error returns on the same serial number, have the GPU replaced",
    Action.CHECK_POWER_COOLING: "Check the power supply and the cooling of the node",
    Action.RMA: "Have the GPU replaced; give its serial number and the kernel log",
}


def list_hive_members(node: CheckedNode, device: gpu_facts.Device) -> list[int]:
    """Return the indices of the GPUs in the same XGMI hive as `device`. GPUs of one hive can only be reset together."""
    own = gpu_facts.read_value(device, "hive")
    members = [d["index"] for d in gpu_facts.list_gpus(node) if own and gpu_facts.read_value(d, "hive") == own]
    return members or [device["index"]]


def get_reset_hint(node: CheckedNode, device: gpu_facts.Device, action: Action) -> str | None:
    """Return the remedy for one GPU, or `None` if there is no remedy for the action."""
    if action is not Action.RESET_GPU:
        return _HINTS.get(action)
    members = list_hive_members(node, device)
    if len(members) == 1:
        target = gpu_facts.read_value(device, "pci") or device["index"]
        return f"Stop all jobs that use it, then `sudo amd-smi reset -G -g {target}`, or reboot"
    return f"{describe_joint_reset(members)}: an XGMI hive is reset as one"


def describe_joint_reset(members: Sequence[int]) -> str:
    """Return the remedy that resets some GPUs together."""
    named = gpu_facts.format_gpu_names(members)
    return f"Stop all jobs on the node, then reset {named} together (`sudo amd-smi reset -G -g all`), or reboot"


# --- Set-up of AMD's GPUs: partitions, variables that select GPUs, reduced clocks

_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"


@remedy(Action.CHECK_POWER_COOLING, COOLING)
@node_check("gpu.slowdown", "GPU temperature, power, clocks", severity="WARN", gpu=True, vendors=(AMD,))
def check_reduced_clocks(node: CheckedNode) -> Outcome | list[Outcome]:
    """Neither heat nor the board reduces the clocks of AMD's GPUs.

    Source: `gpu_metrics` of AMD: throttle status (MI200), residencies of two readings (MI300 and later, newer drivers)
    Healthy: only the power limit may reduce the clocks, which is normal under load
    """
    gpu_facts.require_library_facts(node)
    if not any("slowdown" in device.get("v", {}) for device in gpu_facts.list_used_gpus(node)):
        return skip("this GPU or driver does not report reduced clocks")
    return gpu_facts.judge_each_gpu(node, "slowdown", _judge_slowdown, "no reduced clocks on {n} GPUs")


def _judge_slowdown(gpu: gpu_facts.GpuValue) -> Outcome | None:
    return gpu.warn(f"clocks reduced by {', '.join(gpu.value)}") if gpu.value else None


@remedy(Action.FIX_CONFIG, "`sudo amd-smi set --compute-partition SPX` (and `--memory-partition NPS1`) on all GPUs")
@cluster_check("gpu.partition", "GPU modes", severity="WARN", gpu=True, vendors=(AMD,))
def check_partition_modes(cluster: CheckedCluster) -> Iterable[Outcome]:
    """All of AMD's GPUs have the same partition mode.

    With different modes, ranks with a whole GPU wait for ranks with a part of a GPU.

    Source: `current_compute_partition`, `current_memory_partition` of AMD (MI300 and later)
    Healthy: the same on all GPUs of one board
    """
    return comparison.compare_gpus(cluster, lambda device: gpu_facts.read_value(device, "modes"), "partition", "/".join)


@remedy(Action.FIX_CONFIG, "`sudo sysctl kernel.numa_balancing=0`")
@node_check("gpu.numa_balancing", "GPU modes", severity="WARN", gpu=True, vendors=(AMD,))
def check_numa_balancing(node: CheckedNode) -> Outcome:
    """The kernel does not move memory of AMD's GPUs between processors by itself (NUMA balancing).

    Source: /proc/sys/kernel/numa_balancing
    Healthy: 0 (AMD's guides to MI200 and MI300 turn NUMA balancing off, because it moves pages that GPUs have mapped)
    """
    value = gpu_facts.get_library_facts(node).facts.get("numa_balancing")
    if value is None:
        return unknown("could not read /proc/sys/kernel/numa_balancing")
    return warn("NUMA balancing is on", value=value, expected=0) if value else ok("NUMA balancing is off")


@remedy(Action.FIX_CONFIG, "Unset it in `env`, the prologue or the shell's start files")
@node_check("gpu.visible_env", "GPU modes", gpu=True, vendors=(AMD,), group="host")
def check_visible_devices(node: CheckedNode) -> Outcome:
    """The variables that select AMD's GPUs agree with each other and with the cluster file.

    Source: ROCR_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES (else CUDA_VISIBLE_DEVICES) in the job's environment
    Healthy: ROCR_VISIBLE_DEVICES is not set if the cluster file names GPUs by index. It selects at least as many GPUs
        as HIP_VISIBLE_DEVICES, because HIP sees only GPUs that ROCR selects. No variable selects fewer GPUs than the
        cluster file declares
    """
    env = node.read("env", "the environment was not reported")
    rocr, hip = env.get(_ROCR), env.get(_HIP)
    declared, least = node.declaration.gpus, node.declaration.gpu_count or 0
    if rocr is not None and isinstance(declared, tuple):
        message = f"{_ROCR} is {rocr}: the cluster file's GPUs {list(declared)} would be indices into this list"
        return fail(message, value=rocr)
    if rocr is not None and hip is not None and len(hip.split(",")) > len(rocr.split(",")):
        # torch treats this as an error too (`_parse_visible_devices` of torch.cuda).
        return fail(f"{_HIP} selects {hip}, but {_ROCR} only {rocr}", value=[rocr, hip])
    # HIP reads CUDA_VISIBLE_DEVICES only if HIP_VISIBLE_DEVICES is not set.
    for name in () if isinstance(declared, tuple) else (_ROCR, _HIP if _HIP in env else _CUDA):
        if env.get(name) is not None and len(env[name].split(",")) < least:
            return fail(f"{name} is {env[name]}: fewer than the {least} declared GPUs", value=env[name])
    return ok("the variables that select GPUs agree")


def find_reduced_clocks_symptom(
    gpu: int, causes: Sequence[str] | None, degrees: float | None, lasting: float
) -> Symptom | None:
    """Return the symptom of reduced clocks, or `None`.

    Args:
        gpu: Index of the GPU.
        causes: What reduces the clocks.
        degrees: Temperature in degrees Celsius.
        lasting: Seconds that the symptom must last before clusterctl reports it.
    """
    if not causes:
        return None
    words, detail = f"clocks reduced by {', '.join(causes)}", f"{degrees:.0f} °C" if degrees is not None else ""
    action = Action.CHECK_POWER_COOLING
    return Symptom("gpu.slowdown", Status.WARN, words, action, gpu=gpu, min_duration_s=lasting, detail=detail)


# --- Links between AMD's GPUs (XGMI, also called Infinity Fabric); linked GPUs form a hive

_FAMILY = "PCIe, NVLink, fabric"
_REMEDY = "Reset all GPUs of the hive together, or reboot; if the link stays down, have the module examined"
_LASTING = 30.0


@remedy(Action.RESET_GPU, _REMEDY)
@node_check("gpu.xgmi", _FAMILY, gpu=True, vendors=(AMD,))
def check_xgmi_links(node: CheckedNode) -> Outcome | list[Outcome]:
    """All XGMI links of AMD's GPUs are up: a link that is down slows every collective.

    Source: hive and links of KFD's topology; state of each link in `gpu_metrics` (MI300 and later, newer drivers)
    Healthy: each GPU has as many active links as most GPUs of its hive. Every pair of a hive has a link. No GPU is
        outside the hive of all others. SKIP if the GPUs have no XGMI links
    """
    gpu_facts.require_library_facts(node)
    devices = gpu_facts.list_used_gpus(node)
    bad = [
        *_judge_hive_membership(devices),
        *_judge_unlinked_pairs(node, devices),
        *_judge_inactive_links(node, devices),
    ]
    joined = sum(bool(gpu_facts.read_value(device, "xgmi")) for device in devices)
    healthy = ok(f"all XGMI links are up on {joined} GPUs") if joined else skip("these GPUs have no XGMI links")
    return bad or healthy


def _judge_hive_membership(devices: Sequence[gpu_facts.Device]) -> Iterator[Outcome]:
    """Yield a FAIL for a GPU that is outside the hive of all others.

    Two hives of equal size are no fault, because some cards form them by design.
    """
    hives = Counter(gpu_facts.read_value(device, "hive") for device in devices)
    if len(devices) < 3:
        return
    for device in devices:
        own = gpu_facts.read_value(device, "hive")
        others = max((count for hive, count in hives.items() if hive and hive != own), default=0)
        if others == len(devices) - 1:
            message = f"{gpu_facts.describe_gpu(device)}: not in the XGMI hive of the other {others} GPUs"
            hint = _describe_remedy([d["index"] for d in devices])
            yield fail(message, gpu=device["index"], hint=hint, action=Action.RESET_GPU)


def _judge_unlinked_pairs(node: CheckedNode, devices: Sequence[gpu_facts.Device]) -> Iterator[Outcome]:
    pairs = []
    for i, device in enumerate(devices):
        for other in devices[i + 1 :]:
            same = gpu_facts.read_value(device, "hive") and gpu_facts.read_value(
                device, "hive"
            ) == gpu_facts.read_value(other, "hive")
            if same and not (_has_link(device, other) and _has_link(other, device)):
                pairs.append((device, other))
    if pairs:
        names = [f"{one['index']}-{other['index']}" for one, other in pairs]
        hint = _describe_remedy(list_hive_members(node, pairs[0][0]))
        yield fail(f"no XGMI link between GPUs {', '.join(names[:8])}, which are in one hive", value=names, hint=hint)


def _has_link(one: gpu_facts.Device, other: gpu_facts.Device) -> bool:
    # Partitions of one GPU reach each other without a link.
    if gpu_facts.read_value(one, "pci") == gpu_facts.read_value(other, "pci"):
        return True
    return str(other["index"]) in (gpu_facts.read_value(one, "xgmi") or {})


def _judge_inactive_links(node: CheckedNode, devices: Sequence[gpu_facts.Device]) -> Iterator[Outcome]:
    told = {device["index"]: gpu_facts.read_value(device, "xgmi_links") for device in gpu_facts.list_gpus(node)}
    up = {index: sum(states) for index, states in told.items() if states}
    for device in devices:
        index = device["index"]
        members = [up[member] for member in list_hive_members(node, device) if member in up]
        usual, times = Counter(members).most_common(1)[0] if members else (0, 0)
        if index in up and up[index] < usual and times * 2 > len(members):
            message = f"{gpu_facts.describe_gpu(device)}: {up[index]} of {usual} XGMI links up"
            hint = _describe_remedy(list_hive_members(node, device))
            yield fail(message, gpu=index, value=up[index], expected=usual, hint=hint)


def _describe_remedy(members: Sequence[int]) -> str:
    return f"{describe_joint_reset(members)}; if the link stays down, have the module examined"


@remedy(Action.RESET_GPU, _REMEDY)
@cluster_check("gpu.xgmi_outlier", _FAMILY, gpu=True, vendors=(AMD,))
def check_xgmi_outliers(cluster: CheckedCluster) -> Outcome | list[Outcome]:
    """No pair of AMD's GPUs is slower, or has more hops, than the same pair on other nodes.

    Source: active links, hops and bandwidth of each pair of GPUs, compared at the same addresses of machines with the
        same layout
    Healthy: the same as on most nodes. If only two nodes can be compared, the worse one is WARN
    """
    fast = comparison.group_by_slot(cluster, lambda node: _read_pairs(node, 1))
    near = comparison.group_by_slot(
        cluster, lambda node: {pair: -weight for pair, weight in _read_pairs(node, 0).items()}
    )
    if not fast:
        return comparison.report_no_outlier(cluster, 0, "pairs of GPUs")
    odd = _report_deficits(fast, "slower than") or _report_deficits(near, "farther apart than")
    return odd or ok("pairs of GPUs have the same links as on other nodes")


def _read_pairs(node: CheckedNode, which: int) -> dict[str, int]:
    """Return pair of GPU indices -> number of the link: the weight if `which` is 0, the bandwidth if it is 1."""
    return {
        f"{device['index']}-{peer}": link[which]
        for device in gpu_facts.list_used_gpus(node)
        for peer, link in (gpu_facts.read_value(device, "xgmi") or {}).items()
        if device["index"] < int(peer)
    }


def _report_deficits(places: Mapping[str, Mapping[str, int]], how: str) -> list[Outcome]:
    by_state = group_pairs(((slot.node, slot.is_certain), slot.index) for slot in comparison.find_slot_deficits(places))
    return [
        (fail if certain else warn)(f"GPUs {', '.join(pairs[:8])} are {how} on other nodes", node=node, value=pairs)
        for (node, certain), pairs in by_state.items()
    ]


def find_xgmi_symptom(gpu: int, lost_links: int | None) -> Symptom | None:
    """Return the symptom of a GPU whose XGMI links went down during a run, or `None`."""
    if not lost_links or lost_links < 0:
        return None
    words = f"{lost_links} XGMI links have gone down"
    return Symptom("gpu.xgmi", Status.FAIL, words, Action.RESET_GPU, gpu=gpu, min_duration_s=_LASTING)


# --- Messages of AMD's driver in the kernel log: errors, hangs, resets

Event = dict[str, Any]
_ENDED = ("done", "failed")


@dataclass(frozen=True, slots=True)
class _Meaning:
    """The meaning of a kind of event.

    Attributes:
        is_hardware: The event is a hardware error.
        repaired_by_reset: A reset of the GPU repairs the error.
    """

    description: str
    is_hardware: bool
    action: Action
    repaired_by_reset: bool = False


_MEANINGS: dict[tuple[str, str], _Meaning] = {
    ("lost", ""): _Meaning("GPU is lost", True, Action.REBOOT_NODE),
    ("init", ""): _Meaning("the driver could not start the GPU", True, Action.REBOOT_NODE),
    ("worn", ""): _Meaning("more bad memory pages than the driver accepts", True, Action.RMA),
    ("reset", "failed"): _Meaning("a reset of the GPU failed", True, Action.REBOOT_NODE),
    ("reset", "done"): _Meaning("the GPU was reset", False, Action.NONE),
    ("hang", ""): _Meaning("a queue of work hung", False, Action.RESTART_APP),
}


def was_reset_after(node: CheckedNode, device: gpu_facts.Device, event_kind: str) -> bool:
    """Return whether the kernel log shows a reset of the GPU after the last event of a kind."""
    own = [event for event in _list_events(node) if event["device"] == gpu_facts.read_value(device, "pci")]
    of_kind = [event["order"] for event in own if event["kind"] == event_kind]
    resets = [event["order"] for event in own if (event["kind"], event["grade"]) == ("reset", "done")]
    return bool(of_kind and resets) and max(resets) > max(of_kind)


def _list_events(node: CheckedNode) -> list[Event]:
    events = node.group("kernel_log").facts.get("events") or []
    return [event for event in events if event.get("vendor") == AMD]


@remedy(
    Action.REBOOT_NODE,
    "Follow the action; `severity: {amdgpu.reset: ignore}` silences a kind (ras, hang, reset, lost, worn, init)",
)
@node_check(
    "gpu.driver_log",
    "XID and SXid",
    gpu=True,
    vendors=(AMD,),
    group="kernel_log",
    without_root="counts of errors and bad pages, and the answers of the GPUs, are the evidence",
    judge_without_source=report_unreadable_gpu_log,
    thresholds={"lookback": 86400.0, "unended": 120.0},
)
def check_driver_log(node: CheckedNode) -> Outcome | list[Outcome]:
    """AMD's driver reported no error, hang or reset of a GPU since the boot.

    Source: lines of amdgpu in the kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log), counted
    Healthy: no GPU is lost, and the driver could start every GPU. No reset failed or lasted `unended` seconds. The
        driver accepts the number of bad pages. An uncorrected error is FAIL within `lookback` seconds, and WARN once
        the GPU was reset. Resets and hung queues, which programs cause too, are WARN within `lookback` seconds
    """
    events = _list_events(node)
    outcomes = [outcome for event in events if (outcome := _judge_event(node, event, events)) is not None]
    return outcomes or ok(f"no error of amdgpu {describe_covered_time(node)}")


def _judge_event(node: CheckedNode, event: Event, events: list[Event]) -> Outcome | None:
    device, index, mine = _find_gpu(node, event["device"])
    age = event["last_age_s"]
    recent = age is None or age <= node.limit("lookback")
    meaning = _find_meaning(node, event, events)
    if not mine or meaning is None or not (recent or meaning.is_hardware):
        return None
    repaired = meaning.repaired_by_reset and any(
        e["order"] > event["order"] and e["grade"] == "done" for e in _select_events(event, events, "reset")
    )
    say = fail if meaning.is_hardware and not repaired and (recent or not meaning.repaired_by_reset) else warn
    action = Action.NONE if repaired else meaning.action
    times = f"{describe_occurrences(event)}{', reset since' if repaired else ''}"
    return say(
        f"{_format_gpu(index, event['device'])}: {meaning.description}{times}",
        gpu=index,
        value={"kind": event["kind"], "count": event["count"], "last_age_s": age, "text": event["text"]},
        action=action,
        hint=_choose_hint(node, device, action),
        override_key=f"amdgpu.{event['kind']}",
    )


def _find_meaning(node: CheckedNode, event: Event, events: list[Event]) -> _Meaning | None:
    kind, grade = event["kind"], event["grade"]
    if kind == "ras":
        return _Meaning(f"uncorrected errors in {grade}", True, Action.RESET_GPU, repaired_by_reset=True)
    if (kind, grade) == ("reset", "begin"):
        ended = any(
            e["order"] > event["order"] and e["grade"] in _ENDED for e in _select_events(event, events, "reset")
        )
        age = event["last_age_s"]
        if ended or (age is not None and age < node.limit("unended")):
            return None
        return _Meaning("a reset of the GPU has not ended", True, Action.REBOOT_NODE)
    return _MEANINGS.get((kind, grade))


def _select_events(event: Event, events: list[Event], kind: str) -> list[Event]:
    return [other for other in events if other["device"] == event["device"] and other["kind"] == kind]


def _find_gpu(node: CheckedNode, address: str) -> tuple[gpu_facts.Device | None, int | None, bool]:
    """Return the GPU at a PCI address, its index, and whether the run may use it. An unknown GPU counts as usable."""
    device = next((d for d in gpu_facts.list_gpus(node) if gpu_facts.read_value(d, "pci") == address), None)
    if device is None:
        return None, None, True
    return device, device["index"], device in gpu_facts.list_used_gpus(node)


def _format_gpu(index: int | None, address: str) -> str:
    if index is not None:
        return f"GPU {index}"
    return f"GPU at {address}" if address else "a GPU"


def _choose_hint(node: CheckedNode, device: gpu_facts.Device | None, action: Action) -> str:
    if action is Action.RESTART_APP:
        return "A program may have caused this; if it happens with other programs too, have the hardware examined"
    if action is Action.NONE:
        return "Nothing to do: the GPU was reset; if nobody reset it on purpose, see the kernel log before the reset"
    remedy = get_reset_hint(node, device or {"index": 0}, action)
    return remedy or "See the lines of amdgpu in the kernel log at that time (`dmesg -T`)"


# --- Uncorrected errors and bad memory pages of AMD's GPUs

_REPAIRED = "Nothing to do: a later reset took the bad pages out of use; the count starts again at the next boot"


def judge_uncorrected_errors(node: CheckedNode) -> list[Outcome]:
    """Judge uncorrected errors since the driver was loaded. A reset does not clear these counts."""
    return gpu_facts.judge_each_gpu(node, "ecc_unc", _judge_uncorrected, "no uncorrected errors on {n} GPUs")


def _judge_uncorrected(gpu: gpu_facts.GpuValue) -> Outcome | None:
    if gpu.value <= 0:
        return None
    blocks = ", ".join(name for name, (wrong, _) in (gpu.get("ras") or {}).items() if wrong)
    message = f"{gpu.value} uncorrected errors in {blocks or 'memory'}"
    if was_reset_after(gpu.node, gpu.device, "ras"):
        return gpu.warn(f"{message}, reset since", expected=0, action=Action.NONE, hint=_REPAIRED)
    hint = get_reset_hint(gpu.node, gpu.device, Action.RESET_GPU)
    return gpu.fail(message, expected=0, action=Action.RESET_GPU, hint=hint)


@remedy(Action.RESET_GPU, "Reset the GPU, with all of its XGMI hive, or reboot")
@gpu_facts.gpu_check(
    "gpu.bad_pages",
    "GPU memory",
    "bad_pages",
    "no bad memory page in use on {n} GPUs",
    vendors=(AMD,),
    thresholds={"warn": 256.0},
)
def check_bad_pages(gpu: gpu_facts.GpuValue) -> Outcome | None:
    """No bad memory page of an AMD GPU is in use, and few pages are retired.

    Source: `ras/gpu_vram_bad_pages` of AMD's driver
    Healthy: no bad page waits for retirement, and no retirement failed. WARN above `warn` retired pages.
        `gpu.driver_log` reports more retired pages than the driver accepts
    """
    in_use, retired = gpu.value["pending"] + gpu.value["failed"], gpu.value["retired"]
    if in_use:
        hint = get_reset_hint(gpu.node, gpu.device, Action.RESET_GPU)
        return gpu.fail(f"{in_use} bad memory pages are still in use", action=Action.RESET_GPU, hint=hint)
    if retired <= gpu.limit("warn"):
        return None
    hint = get_reset_hint(gpu.node, gpu.device, Action.RMA)
    return gpu.warn(f"{retired} bad memory pages retired", action=Action.RMA, hint=hint)


def find_uncorrected_errors_symptom(gpu: int, new_errors: int) -> Symptom | None:
    """Return the symptom of a GPU with `new_errors` uncorrected errors since the start of the run, or `None`."""
    if new_errors <= 0:
        return None
    check, detail = "gpu.ecc_uncorrected", f"{new_errors} since the start"
    return Symptom(check, Status.FAIL, "uncorrected errors", Action.RESET_GPU, gpu=gpu, detail=detail)
