"""Finds health problems of a node during a run in the samples of its agent, and reports each change once.

No function reads a clock: time is the time of the samples. A lost GPU, an uncorrected memory error or a hung driver is
reported at once or at the second sample. Heat, full disks and possibly transient errors are reported only if they last.
The end of every reported problem is reported too. Each module of `health/checks` defines the symptoms of its checks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace

from clusterctl.agent.protocol.record_types import GpuSample, HealthSample
from clusterctl.formatting import describe_duration, format_size
from clusterctl.health.checks import amd, gpu_failures, gpu_memory, gpu_thermal, storage, xid
from clusterctl.health.findings import AMD, Action, Finding, Status, Symptom
from clusterctl.health.judge import apply_overrides
from clusterctl.health.registry import LIMIT_KEYS
from clusterctl.health.settings import HealthSettings

_SILENT_SECONDS = 120.0
_SAMPLES_MISSED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SymptomLimits:
    """Durations in seconds after which a symptom is reported, and limits for full disks.

    Attributes:
        slowdown: How long hardware or heat must reduce the clocks of a GPU.
        stuck: How long a driver must not answer.
        disk: How long a disk must be nearly full.
        disk_min_free: A disk with fewer free bytes is nearly full.
        disk_min_share: A disk with a smaller free share is nearly full, unless `disk_ample_free` bytes are free.
        clear_after: How long a symptom must be absent until the problem is over.
        silence: How long samples may be missing.
        recovered_after: How long a GPU must be healthy after an error that a reset repairs.
    """

    slowdown: float = 180.0
    stuck: float = 30.0
    disk: float = 30.0
    disk_min_free: float = storage.MIN_FREE
    disk_min_share: float = 0.05
    disk_ample_free: float = storage.AMPLE_FREE
    clear_after: float = 60.0
    silence: float = _SILENT_SECONDS
    recovered_after: float = 600.0

    @classmethod
    def from_thresholds(cls, thresholds: Mapping[str, float], interval: float) -> SymptomLimits:
        """Return the limits of a cluster file.

        Args:
            thresholds: `health.thresholds`, such as `{during.slowdown: 60}`.
            interval: Seconds between two samples.
        """
        chosen = {key: float(thresholds[name]) for key in LIMIT_KEYS if (name := f"during.{key}") in thresholds}
        # With a long sampling interval, a node is not silent between two samples.
        return cls(**{"silence": max(_SILENT_SECONDS, _SAMPLES_MISSED * interval), **chosen})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChange:
    """The start or the end of a health problem. Times are seconds of the node's monotonic clock.

    Attributes:
        time: Time of the change.
        check: Name of the check that finds the same problem before a run.
        key: `check`, or a finer name if one check can find several problems: `host.disk /`, `gpu.xid 79`.
        status: FAIL or WARN at the start of the problem, PASS at its end.
        began: Time of the first sample with the problem.
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
    """A symptom over time.

    Attributes:
        last_seen: Time of the last sample that shows that the problem goes on.
    """

    symptom: Symptom
    began: float
    last_seen: float
    is_reported: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMonitor:
    """The health of one node after some samples; `apply_sample` returns the monitor after the next sample.

    Attributes:
        settings: The `health` section of the cluster file.
        gpus: Indices of the GPUs of the run; `None` for all.
        sampled_at: Time of the newest sample.
        is_silent: Samples are missing, and clusterctl has reported their absence.
        first_ecc_counts: The first count of uncorrected errors of each GPU.
        streaks: Numbers of possibly transient errors in a row, by GPU and call.
    """

    node: str
    limits: SymptomLimits = field(default_factory=SymptomLimits)
    settings: HealthSettings = field(default_factory=HealthSettings)
    gpus: Collection[int] | None = None
    sampled_at: float | None = None
    is_silent: bool = False
    first_ecc_counts: Mapping[int, int] = field(default_factory=dict)
    streaks: gpu_failures.ErrorStreaks = field(default_factory=dict)
    problems: Mapping[tuple[int | None, str], _Problem] = field(default_factory=dict)


def apply_sample(monitor: NodeMonitor, sample: HealthSample) -> tuple[NodeMonitor, list[HealthChange]]:
    """Add a sample (format: `agent.facts.machine_sampler`); return the new monitor and the changes to report."""
    now = float(sample["m"])
    changes: list[HealthChange] = []
    if monitor.is_silent:
        silence = _make_silence(monitor.sampled_at or now)
        changes.append(_make_change(monitor, now, silence, Status.PASS, f"{monitor.node}: samples again"))
    # A sample without facts about GPUs does not end a streak.
    if sample.get("status") == "ok":
        monitor = replace(monitor, streaks=_count_streaks(monitor, sample))
    symptoms = {(symptom.gpu, symptom.check): symptom for symptom in _list_symptoms(monitor, sample)}
    problems: dict[tuple[int | None, str], _Problem] = {}
    for key, symptom in symptoms.items():
        before = monitor.problems.get(key)
        # Report again if the status has changed.
        is_reported = bool(before and before.is_reported and before.symptom.status is symptom.status)
        problem = _Problem(
            symptom=symptom, began=before.began if before else now, last_seen=now, is_reported=is_reported
        )
        if not problem.is_reported and now - problem.began >= symptom.min_duration_s:
            changes.append(_make_change(monitor, now, problem))
            problem = replace(problem, is_reported=True)
        problems[key] = problem
    for key, problem in monitor.problems.items():
        if key in symptoms:
            continue
        wait = monitor.limits.recovered_after if problem.symptom.is_event else monitor.limits.clear_after
        if _is_ongoing(problem, sample):
            problems[key] = replace(problem, last_seen=now)
        elif problem.is_reported and now - problem.last_seen < wait:
            problems[key] = problem
        elif problem.is_reported:
            changes.append(_make_change(monitor, now, problem, Status.PASS, _format_end(monitor, problem)))
    counts = _merge_first_ecc_counts(monitor, sample)
    return replace(monitor, sampled_at=now, is_silent=False, problems=problems, first_ecc_counts=counts), changes


def _count_streaks(monitor: NodeMonitor, sample: HealthSample) -> gpu_failures.ErrorStreaks:
    counted: gpu_failures.ErrorStreaks = {}
    for gpu in sample.get("gpus") or []:
        counted |= gpu_failures.update_error_streaks(dict(monitor.streaks), gpu)
    return counted


def _is_ongoing(problem: _Problem, sample: HealthSample) -> bool:
    """Return whether a problem continues although this sample does not show its symptom."""
    gpu = problem.symptom.gpu
    if sample.get("status") != "ok" and gpu is not None:
        return True
    if not problem.symptom.is_event:
        return False
    return not (
        problem.symptom.repaired_by_reset
        and any(g["gpu"] == gpu and xid.is_sample_healthy(g) for g in sample.get("gpus") or [])
    )


def _format_end(monitor: NodeMonitor, problem: _Problem) -> str:
    place = f"{_format_place(monitor, problem.symptom)}{problem.symptom.description}"
    if problem.symptom.is_event:
        return f"{place}: the GPU has been healthy for {describe_duration(monitor.limits.recovered_after)}"
    return f"{place} is over after {describe_duration(problem.last_seen - problem.began)}"


def report_missing_samples(monitor: NodeMonitor, now: float) -> tuple[NodeMonitor, list[HealthChange]]:
    """Return the new monitor, and a change if samples are missing.

    Args:
        monitor: The monitor of the node.
        now: The present time on the clock of the samples.
    """
    if monitor.is_silent or monitor.sampled_at is None or now - monitor.sampled_at < monitor.limits.silence:
        return monitor, []
    message = f"{monitor.node}: no sample of GPUs and host for {describe_duration(now - monitor.sampled_at)}"
    silence = _make_silence(monitor.sampled_at)
    return replace(monitor, is_silent=True), [_make_change(monitor, now, silence, message=message)]


def list_active_problems(monitor: NodeMonitor) -> list[HealthChange]:
    """Return the reported problems of the node that have not ended, each as the change at its start."""
    now = monitor.sampled_at or 0.0
    return [_make_change(monitor, now, problem) for problem in monitor.problems.values() if problem.is_reported]


def find_fatal_reason(monitor: NodeMonitor) -> str | None:
    """Return why the run must stop on this node, or `None`."""
    return next((change.message for change in list_active_problems(monitor) if change.status is Status.FAIL), None)


def find_drain_reason(monitor: NodeMonitor) -> str | None:
    """Return why the next attempt should avoid this node, although this attempt continues, or `None`."""
    now = monitor.sampled_at or 0.0
    reported = (problem for problem in monitor.problems.values() if problem.is_reported and problem.symptom.drains_node)
    return next((_format_message(monitor, problem, now) for problem in reported), None)


def _make_silence(began: float) -> _Problem:
    symptom = Symptom("host.sampler", Status.WARN, "samples", Action.NONE)
    return _Problem(symptom=symptom, began=began, last_seen=began)


def _list_symptoms(monitor: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    for symptom in _find_symptoms(monitor, sample):
        check = symptom.check.split(" ")[0]
        finding = Finding(
            check, symptom.status, "", node=monitor.node, gpu=symptom.gpu, override_key=symptom.override_key
        )
        weighed = apply_overrides(finding, monitor.settings)
        if not weighed.ignored:
            yield replace(symptom, status=weighed.status)


def _find_symptoms(monitor: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    yield from _list_disk_symptoms(monitor, sample)
    if monitor.gpus is not None and not monitor.gpus:
        return
    yield from _list_driver_symptoms(monitor, sample)
    for gpu in sample.get("gpus") or []:
        if _concerns_run(monitor, gpu["gpu"]):
            yield from filter(None, _list_gpu_symptoms(monitor, gpu))
    for event in sample.get("xids") or []:
        if _concerns_run(monitor, event["gpu"]) and (s := xid.find_xid_symptom(event["gpu"], int(event["xid"]))):
            yield s


def _concerns_run(monitor: NodeMonitor, gpu: int | None) -> bool:
    return monitor.gpus is None or gpu is None or gpu in monitor.gpus


def _list_driver_symptoms(monitor: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    status, limit = sample.get("status"), monitor.limits.stuck
    if status == "stuck":
        stuck_s = float(sample.get("stuck_s") or 0)
        where = f" in {sample['wchan']}" if sample.get("state") == "D" and sample.get("wchan") else ""
        words, detail = f"the GPU driver hangs{where}", f"no answer for {describe_duration(stuck_s)}"
        # The sampler has already measured how long the driver hangs, so the monitor does not wait again.
        lasting = 0.0 if stuck_s >= limit else limit
        yield Symptom("gpu.responsive", Status.FAIL, words, Action.REBOOT_NODE, min_duration_s=lasting, detail=detail)
    elif status == "error":
        words = f"GPUs cannot be sampled: {sample.get('reason')}"
        yield Symptom("gpu.driver", Status.WARN, words, Action.NONE, min_duration_s=limit)


def _list_disk_symptoms(monitor: NodeMonitor, sample: HealthSample) -> Iterator[Symptom]:
    limits = monitor.limits
    for disk in sample.get("disk") or []:
        path, free, total = disk["path"], disk["free"], disk["total"]
        crowded = free < min(limits.disk_min_share * total, limits.disk_ample_free)
        if crowded or storage.is_nearly_full(free, total, limits.disk_min_free):
            check, words, detail = f"host.disk {path}", f"{path} is nearly full", f"{format_size(free)} free"
            yield Symptom(check, Status.WARN, words, Action.FREE_SPACE, min_duration_s=limits.disk, detail=detail)


def _list_gpu_symptoms(monitor: NodeMonitor, gpu: GpuSample) -> Iterator[Symptom | None]:
    """Yield the symptoms of one GPU, and `None` for each absent symptom."""
    index, uncorrected = int(gpu["gpu"]), gpu.get("ecc_unc") or 0
    more, degrees = uncorrected - monitor.first_ecc_counts.get(index, uncorrected), gpu.get("temp_c")
    yield gpu_failures.find_gpu_error_symptom(gpu, dict(monitor.streaks))
    if gpu.get("vendor") == AMD:
        yield amd.find_uncorrected_errors_symptom(index, more)
        yield amd.find_xgmi_symptom(index, gpu.get("links_lost"))
        yield gpu_thermal.find_temperature_symptom(gpu, monitor.limits.slowdown)
        yield amd.find_reduced_clocks_symptom(index, gpu.get("slowdown"), degrees, monitor.limits.slowdown)
        return
    yield gpu_failures.find_recovery_symptom(index, gpu.get("recovery_action"))
    yield gpu_memory.find_ecc_symptom(index, more, gpu.get("recovery_action"))
    yield gpu_memory.find_row_remap_symptom(index, gpu.get("remap_failure"))
    yield gpu_thermal.find_throttle_symptom(index, int(gpu.get("throttle") or 0), degrees, monitor.limits.slowdown)


def _merge_first_ecc_counts(monitor: NodeMonitor, sample: HealthSample) -> dict[int, int]:
    """Return the first count of uncorrected errors of each GPU: errors before the run are no symptoms."""
    gpus = sample.get("gpus") or []
    counts = {gpu["gpu"]: count for gpu in gpus if (count := gpu.get("ecc_unc")) is not None}
    return {**counts, **monitor.first_ecc_counts}


def _format_place(monitor: NodeMonitor, symptom: Symptom) -> str:
    return f"{monitor.node} GPU {symptom.gpu}: " if symptom.gpu is not None else f"{monitor.node}: "


def _format_message(monitor: NodeMonitor, problem: _Problem, now: float) -> str:
    symptom = problem.symptom
    lasting = f" for {describe_duration(now - problem.began)}" if symptom.min_duration_s and now > problem.began else ""
    detail = f", {symptom.detail}" if symptom.detail else ""
    return f"{_format_place(monitor, symptom)}{symptom.description}{lasting}{detail}"


def _make_change(
    monitor: NodeMonitor, now: float, problem: _Problem, status: Status | None = None, message: str = ""
) -> HealthChange:
    """Return a change of a problem; without `status`, the start of the problem."""
    symptom = problem.symptom
    action = Action.NONE if status is Status.PASS else symptom.action
    return HealthChange(
        time=now,
        node=monitor.node,
        gpu=symptom.gpu,
        check=symptom.check.split(" ")[0],
        key=symptom.check,
        status=status or symptom.status,
        message=message or _format_message(monitor, problem, now),
        action=action.value,
        began=problem.began,
    )
