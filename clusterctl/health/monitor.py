"""Debounced health changes of a node during a run, from the samples of its agent. Each change is reported once.

Pure: time is the time of the samples. A lost GPU, an uncorrected memory error or a hung driver is reported at once or
at the second sample; heat, full disks and possibly transient errors only if they last. Every reported problem is
reported again when it is over, also for a repaired GPU. Each family of checks defines its own symptoms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from clusterctl.agent.protocol.record_types import GpuSample, HealthSample
from clusterctl.formatting import describe_duration, format_size
from clusterctl.health.checks import amd, device_errors, gpu_memory, storage, thermal, xid
from clusterctl.health.context import Context
from clusterctl.health.judge import apply_overrides
from clusterctl.health.model import AMD, Action, Finding, Status, Symptom
from clusterctl.health.registry import LIMITS

_SILENT_SECONDS = 120.0
_SAMPLES_MISSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a symptom must last before it is reported, in seconds, and what counts as full.

    Attributes:
        slowdown: Clocks reduced by hardware or heat.
        stuck: A driver that does not answer. Slow is not hung.
        disk: A disk with less than `disk_least` bytes free, or less than `disk_share` of its size and `disk_enough`.
        clear_after: How long a symptom must be absent before the problem is over.
        silence: How long samples may be missing before the sampler counts as dead.
        recovered_after: How long a GPU must be healthy after an error that a reset repairs.
    """

    slowdown: float = 180.0
    stuck: float = 30.0
    disk: float = 30.0
    disk_least: float = storage.LEAST
    disk_share: float = 0.05
    disk_enough: float = storage.ENOUGH
    clear_after: float = 60.0
    silence: float = _SILENT_SECONDS
    recovered_after: float = 600.0

    @classmethod
    def of(cls, thresholds: Mapping[str, float], interval: float) -> Limits:
        """Return the limits of a cluster file: `health.thresholds: {during.slowdown: 60}`."""
        chosen = {key: float(thresholds[name]) for key in LIMITS if (name := f"during.{key}") in thresholds}
        # A long sampling interval is no silence.
        slow = {"silence": max(_SILENT_SECONDS, _SAMPLES_MISSED * interval)}
        return cls(**{**slow, **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change, to be shown once.

    Attributes:
        time: When it was certain, in seconds of the node's monotonic clock.
        check: Name of the check that finds the same problem before a run.
        key: `check`, or a finer name if one check can find several things: `host.disk /`, `gpu.xid 79`.
        status: FAIL or WARN at the start of a problem, PASS at its end.
        began: When it was first observed, on the same clock.
    """

    time: float
    node: str
    gpu: int | None
    check: str
    key: str
    status: Status
    message: str
    action: str
    began: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    """One symptom over time.

    Attributes:
        last_seen: When the symptom, or a reason that keeps the problem open, was last observed.
    """

    symptom: Symptom
    began: float
    last_seen: float
    is_reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMonitor:
    """The health of one node so far; `update` returns the next state. Start with `NodeMonitor(node=...)`.

    Attributes:
        context: The `health` section of the cluster file.
        gpus: The GPUs of the run; `None` for all.
        last: Time of the newest sample.
        silent: The missing samples were reported.
        ecc: The first count of uncorrected errors of each GPU.
        streaks: Counts of possibly transient errors in a row.
    """

    node: str
    limits: Limits = field(default_factory=Limits)
    context: Context = field(default_factory=Context)
    gpus: Collection[int] | None = None
    last: float | None = None
    silent: bool = False
    ecc: Mapping[int, int] = field(default_factory=dict)
    streaks: device_errors.Streaks = field(default_factory=dict)
    troubles: Mapping[tuple[int | None, str], _Problem] = field(default_factory=dict)


def apply_sample(watch: NodeMonitor, sample: HealthSample) -> tuple[NodeMonitor, list[Change]]:
    """Apply one sample (shape: `clusterctl.agent.facts.sampler`); return the new state and the changes to report."""
    now = float(sample["m"])
    changes: list[Change] = []
    if watch.silent:
        changes.append(_change(watch, now, _SILENCE, Status.PASS, "samples again", watch.last or now))
    # A sample without GPU data says nothing about GPUs: it does not break a streak either.
    if sample.get("status") == "ok":
        watch = replace(watch, streaks=_count_streaks(watch, sample))
    symptoms = {(symptom.gpu, symptom.check): symptom for symptom in _list_symptoms(watch, sample)}
    troubles: dict[tuple[int | None, str], _Problem] = {}
    for key, symptom in symptoms.items():
        before = watch.troubles.get(key)
        # Report again if the status has changed.
        is_reported = bool(before and before.is_reported and before.symptom.status is symptom.status)
        trouble = _Problem(
            symptom=symptom, began=before.began if before else now, last_seen=now, is_reported=is_reported
        )
        if not trouble.is_reported and now - trouble.began >= symptom.lasting:
            changes.append(_change(watch, now, symptom, symptom.status, _message(watch, trouble, now), trouble.began))
            trouble = replace(trouble, is_reported=True)
        troubles[key] = trouble
    for key, trouble in watch.troubles.items():
        if key in symptoms:
            continue
        wait = watch.limits.recovered_after if trouble.symptom.event else watch.limits.clear_after
        if _lasts(trouble, sample):
            troubles[key] = replace(trouble, last_seen=now)
        elif trouble.is_reported and now - trouble.last_seen < wait:
            troubles[key] = trouble
        elif trouble.is_reported:
            changes.append(_change(watch, now, trouble.symptom, Status.PASS, _over(watch, trouble), trouble.began))
    after = replace(watch, last=now, silent=False, troubles=troubles, ecc=_first_ecc(watch, sample))
    return after, changes


def _count_streaks(watch: NodeMonitor, sample: HealthSample) -> device_errors.Streaks:
    counted: device_errors.Streaks = {}
    for gpu in sample.get("gpus") or []:
        counted |= device_errors.count_streaks(dict(watch.streaks), gpu)
    return counted


def _lasts(trouble: _Problem, sample: HealthSample) -> bool:
    """Return whether a problem goes on although this sample does not show its symptom."""
    gpu = trouble.symptom.gpu
    if sample.get("status") != "ok" and gpu is not None:
        return True
    if not trouble.symptom.event:
        return False
    return not (
        trouble.symptom.mends and any(g["gpu"] == gpu and xid.is_sample_healthy(g) for g in sample.get("gpus") or [])
    )


def _over(watch: NodeMonitor, trouble: _Problem) -> str:
    place = f"{_place(watch, trouble.symptom)}{trouble.symptom.words}"
    if trouble.symptom.event:
        return f"{place}: the GPU is well again for {describe_duration(watch.limits.recovered_after)}"
    return f"{place} is over after {describe_duration(trouble.last_seen - trouble.began)}"


def report_missing_samples(watch: NodeMonitor, now: float) -> tuple[NodeMonitor, list[Change]]:
    """Report missing samples. Call it regularly with the clock of the samples."""
    if watch.silent or watch.last is None or now - watch.last < watch.limits.silence:
        return watch, []
    message = f"{watch.node}: no sample of GPUs and host for {describe_duration(now - watch.last)}"
    return replace(watch, silent=True), [_change(watch, now, _SILENCE, Status.WARN, message, watch.last)]


def list_active_problems(watch: NodeMonitor) -> list[Change]:
    """Return the open problems of the node, each as it would be reported now."""
    now = watch.last or 0.0
    return [
        _change(watch, now, trouble.symptom, trouble.symptom.status, _message(watch, trouble, now), trouble.began)
        for trouble in watch.troubles.values()
        if trouble.is_reported
    ]


def find_fatal_reason(watch: NodeMonitor) -> str | None:
    """Return why the run must not go on with this node, or `None`."""
    return next((change.message for change in list_active_problems(watch) if change.status is Status.FAIL), None)


def find_drain_reason(watch: NodeMonitor) -> str | None:
    """Return why the next attempt should avoid this node although this attempt may go on, or `None`."""
    now = watch.last or 0.0
    reported = (trouble for trouble in watch.troubles.values() if trouble.is_reported and trouble.symptom.leave_out)
    return next((_message(watch, trouble, now) for trouble in reported), None)


_SILENCE = Symptom("host.sampler", Status.WARN, "samples", Action.NONE)


def _list_symptoms(watch: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    for symptom in _find_symptoms(watch, sample):
        check = symptom.check.split(" ")[0]
        finding = Finding(check, symptom.status, "", node=watch.node, gpu=symptom.gpu, key=symptom.rule)
        weighed = apply_overrides(finding, watch.context)
        if not weighed.ignored:
            yield replace(symptom, status=weighed.status)


def _find_symptoms(watch: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    yield from _list_disk_symptoms(watch, sample)
    if watch.gpus is not None and not watch.gpus:
        return
    yield from _list_driver_symptoms(watch, sample)
    for gpu in sample.get("gpus") or []:
        if _ours(watch, gpu["gpu"]):
            yield from filter(None, _list_gpu_symptoms(watch, gpu))
    for event in sample.get("xids") or []:
        symptom = xid.find_xid_symptom(event["gpu"], int(event["xid"])) if _ours(watch, event["gpu"]) else None
        if symptom is not None:
            yield symptom


def _ours(watch: NodeMonitor, gpu: int | None) -> bool:
    return watch.gpus is None or gpu is None or gpu in watch.gpus


def _list_driver_symptoms(watch: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    status, limit = sample.get("status"), watch.limits.stuck
    if status == "stuck":
        stuck_s = float(sample.get("stuck_s") or 0)
        where = f" in {sample['wchan']}" if sample.get("state") == "D" and sample.get("wchan") else ""
        words, detail = f"the GPU driver hangs{where}", f"no answer for {describe_duration(stuck_s)}"
        # The sampler knows the duration: do not wait for it again.
        lasting = 0.0 if stuck_s >= limit else limit
        yield Symptom("gpu.responsive", Status.FAIL, words, Action.REBOOT_NODE, lasting=lasting, detail=detail)
    elif status == "error":
        words = f"GPUs cannot be watched: {sample.get('reason')}"
        yield Symptom("gpu.driver", Status.WARN, words, Action.NONE, lasting=limit)


def _list_disk_symptoms(watch: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    limits = watch.limits
    for disk in sample.get("disk") or []:
        path, free, total = disk["path"], disk["free"], disk["total"]
        crowded = free < min(limits.disk_share * total, limits.disk_enough)
        if crowded or storage.is_nearly_full(free, total, limits.disk_least):
            check, words, detail = f"host.disk {path}", f"{path} is nearly full", f"{format_size(free)} free"
            yield Symptom(check, Status.WARN, words, Action.FREE_SPACE, lasting=limits.disk, detail=detail)


def _list_gpu_symptoms(watch: NodeMonitor, gpu: GpuSample) -> Iterator[Symptom | None]:
    """Collect the symptoms of one GPU from all families of checks."""
    index, uncorrected = int(gpu["gpu"]), gpu.get("ecc_unc") or 0
    more, degrees = uncorrected - watch.ecc.get(index, uncorrected), gpu.get("temp_c")
    yield device_errors.find_device_symptom(gpu, dict(watch.streaks))
    if gpu.get("vendor") == AMD:
        yield amd.find_ras_symptom(index, more)
        yield amd.find_xgmi_symptom(index, gpu.get("links_lost"))
        yield thermal.find_thermal_symptom(gpu, watch.limits.slowdown)
        yield amd.find_setup_symptom(index, gpu.get("slowdown"), degrees, watch.limits.slowdown)
        return
    yield device_errors.find_recovery_symptom(index, gpu.get("recovery_action"))
    yield gpu_memory.find_ecc_symptom(index, more, gpu.get("recovery_action"))
    yield gpu_memory.find_row_remap_symptom(index, gpu.get("remap_failure"))
    yield thermal.find_throttle_symptom(index, int(gpu.get("throttle") or 0), degrees, watch.limits.slowdown)


def _first_ecc(watch: NodeMonitor, sample: HealthSample) -> dict[int, int]:
    """Store the first count of each GPU: errors before the run belong to another check."""
    gpus = sample.get("gpus") or []
    counts = {gpu["gpu"]: count for gpu in gpus if (count := gpu.get("ecc_unc")) is not None}
    return {**counts, **watch.ecc}


def _place(watch: NodeMonitor, symptom: Symptom) -> str:
    return f"{watch.node} GPU {symptom.gpu}: " if symptom.gpu is not None else f"{watch.node}: "


def _message(watch: NodeMonitor, trouble: _Problem, now: float) -> str:
    symptom = trouble.symptom
    lasting = f" for {describe_duration(now - trouble.began)}" if symptom.lasting and now > trouble.began else ""
    detail = f", {symptom.detail}" if symptom.detail else ""
    return f"{_place(watch, symptom)}{symptom.words}{lasting}{detail}"


def _change(watch: NodeMonitor, now: float, symptom: Symptom, status: Status, message: str, began: float) -> Change:
    text = message if message.startswith(watch.node) else f"{watch.node}: {message}"
    action = Action.NONE if status is Status.PASS else symptom.action
    check = symptom.check.split(" ")[0]
    return Change(
        time=now,
        node=watch.node,
        gpu=symptom.gpu,
        check=check,
        key=symptom.check,
        status=status,
        message=text,
        action=action.value,
        began=began,
    )
