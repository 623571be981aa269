"""Renders runs as metrics in the text format of Prometheus.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4). Names and units follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from clusterctl._version import __version__
from clusterctl.agent.protocol.record_types import HealthSample
from clusterctl.render.metric_labels import render_labels
from clusterctl.render.status_report import WorkerActivity
from clusterctl.run.rules.goodput import PARTS, Goodput
from clusterctl.run.rules.state import NodePhase, RunPhase, RunState, WorkerPhase

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_PROBLEMS = 1000
"""The most health problems of a run that have a series of their own."""
MAX_SAMPLE_AGE_S = 180.0
"""The maximum age in seconds of a sample. Older values have no series, because they would look like present values."""

FAMILIES = {
    "build_info": ("gauge", "Version of clusterctl."),
    "runs_omitted": ("gauge", "Runs without series, because there are too many runs."),
    "scrape_duration_seconds": ("gauge", "Time to read all runs."),
    "run_info": ("gauge", "Name of a run."),
    "run_state": ("gauge", "State of a run: 1 for the present state, else 0."),
    "run_attended": ("gauge", "Whether the controller of a run is alive."),
    "run_created_timestamp_seconds": ("gauge", "Time at which a run was created."),
    "run_ended_timestamp_seconds": ("gauge", "Time at which a run ended."),
    "run_exit_code": ("gauge", "Exit code of an ended run."),
    "run_attempt": ("gauge", "Number of the present attempt, from 0."),
    "run_restarts_total": ("counter", "Attempts after the first."),
    "run_stalls_total": ("counter", "Stalls, suspected or confirmed."),
    "run_nodes": ("gauge", "Nodes of a run, by state."),
    "run_ranks": ("gauge", "Ranks of a run, by state."),
    "run_step": ("gauge", "Step of the slowest rank."),
    "run_progress_age_seconds": ("gauge", "Time since the last progress of any rank."),
    "run_wall_seconds": ("gauge", "Wall time of a run so far."),
    "run_time_seconds": ("gauge", "Parts of the wall time, which sum to it."),
    "run_goodput_ratio": ("gauge", "Productive share of the wall time."),
    "run_goodput_upper_bound": ("gauge", "Whether the goodput is only an upper bound, because steps are unknown."),
    "run_repeated_steps": ("gauge", "Steps that a later attempt made again; absent if unknown."),
    "health_problem": ("gauge", "A present health problem of a node or GPU."),
    "rank_running": ("gauge", "Whether a rank runs."),
    "rank_step": ("gauge", "Step of a rank."),
    "rank_progress_age_seconds": ("gauge", "Time since the last progress of a rank."),
    "node_connected": ("gauge", "Whether the controller has a connection to a node."),
    "node_sample_timestamp_seconds": ("gauge", "Time of the newest sample of a node, on the clock of the head."),
    "node_cpu_utilization_ratio": ("gauge", "Use of the CPUs of a node."),
    "node_memory_used_bytes": ("gauge", "Used memory of a node."),
    "node_memory_size_bytes": ("gauge", "Memory of a node."),
    "node_load1": ("gauge", "Load average of a node over one minute."),
    "node_disk_free_bytes": ("gauge", "Free space of a disk."),
    "node_disk_size_bytes": ("gauge", "Size of a disk."),
    "gpu_utilization_ratio": ("gauge", "Utilisation of a GPU."),
    "gpu_memory_used_bytes": ("gauge", "Used memory of a GPU."),
    "gpu_memory_size_bytes": ("gauge", "Memory of a GPU."),
    "gpu_temperature_celsius": ("gauge", "Temperature of a GPU."),
    "gpu_power_watts": ("gauge", "Power of a GPU."),
    "gpu_clock_hertz": ("gauge", "Clock of the multiprocessors of a GPU."),
    "gpu_ecc_uncorrected_errors_total": ("counter", "Uncorrected memory errors of a GPU, as the driver counts them."),
}
"""The type and the description of each metric, by its name without `clusterctl_`."""
_GPU_FIELDS = (
    ("gpu_utilization_ratio", "util", 0.01),
    ("gpu_memory_used_bytes", "mem_used", 1),
    ("gpu_memory_size_bytes", "mem_total", 1),
    ("gpu_temperature_celsius", "temp_c", 1),
    ("gpu_power_watts", "power_w", 1),
    ("gpu_clock_hertz", "sm_clock", 1_000_000),
    ("gpu_ecc_uncorrected_errors_total", "ecc_unc", 1),
)
_NODE_FIELDS = (
    ("node_cpu_utilization_ratio", "cpu", 0.01),
    ("node_memory_used_bytes", "mem_used", 1),
    ("node_memory_size_bytes", "mem_total", 1),
    ("node_load1", "load1", 1),
)

_Sample = tuple[str, str, float | None]
"""The name of a family, the labels as text, and the value; `None` if the value is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """The values of a run.

    Attributes:
        state: The state of the run.
        has_controller: Whether its controller is alive.
        goodput: The goodput so far.
        activity: The activity of each rank; empty for an ended run.
        health: The newest sample of each machine; empty for an ended run.
        gpus: The GPUs that the run uses on each node; all GPUs on nodes that are missing.
    """

    state: RunState
    has_controller: bool
    goodput: Goodput
    activity: Mapping[int, WorkerActivity] = field(default_factory=dict)
    health: Mapping[str, HealthSample] = field(default_factory=dict)
    gpus: Mapping[str, Sequence[int]] = field(default_factory=dict)


def render_metrics(runs: Iterable[RunMetrics], *, omitted: int, read_s: float, now: float, uid: int) -> str:
    """Return the metrics of runs.

    Args:
        runs: The runs, each id once.
        omitted: How many active runs are left out.
        read_s: How long the caller has read the runs, in seconds.
        now: The head's wall clock.
        uid: The user whose runs these are. Without it, the files of two users would have the same series.
    """
    user = {"uid": str(uid)}
    samples: list[_Sample] = [
        ("build_info", render_labels({**user, "version": __version__}), 1),
        ("runs_omitted", render_labels(user), omitted),
        ("scrape_duration_seconds", render_labels(user), read_s),
    ]
    for run in runs:
        samples += _list_run_samples(run)
        samples += [] if run.state.is_over else [*_list_rank_samples(run), *_list_machine_samples(run, now)]
    lines: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for name, labels, value in samples:
        if value is not None and math.isfinite(value):
            lines[name].append(f"clusterctl_{name}{labels} {value}\n")
    return "".join(
        f"# HELP clusterctl_{name} {description}\n# TYPE clusterctl_{name} {kind}\n{''.join(lines[name])}"
        for name, (kind, description) in FAMILIES.items()
        if lines[name]
    )


def _list_run_samples(run: RunMetrics) -> Iterator[_Sample]:
    state, goodput = run.state, run.goodput
    ages = [a.last_progress_s for a in run.activity.values() if a.last_progress_s is not None]
    steps = [a.step for a in run.activity.values() if a.step is not None]

    def label(**more: str) -> str:
        return render_labels({"run": state.run, **more})

    yield "run_info", label(name=state.name), 1
    for phase in RunPhase:
        yield "run_state", label(state=phase.value), int(state.phase is phase)
    plain: dict[str, float | None] = {
        "run_attended": int(run.has_controller),
        "run_created_timestamp_seconds": state.created,
        "run_ended_timestamp_seconds": state.ended,
        "run_exit_code": state.exit_code,
        "run_attempt": state.attempt,
        "run_restarts_total": goodput.restarts,
        "run_stalls_total": goodput.stalls,
        "run_step": min(steps, default=None),
        "run_progress_age_seconds": min(ages, default=None),
        "run_wall_seconds": goodput.wall_s,
        "run_goodput_ratio": goodput.ratio,
        "run_goodput_upper_bound": int(goodput.is_upper_bound),
        "run_repeated_steps": goodput.lost_steps,
    }
    for name, value in plain.items():
        yield name, label(), value
    for part in PARTS:
        yield "run_time_seconds", label(part=part), getattr(goodput, f"{part}_s")
    nodes = Counter(state.find_node_phase(node) for node in state.nodes)
    for node_phase in NodePhase:
        yield "run_nodes", label(state=node_phase.value), nodes[node_phase]
    ranks = Counter(worker.phase for worker in state.workers.values())
    for worker_phase in WorkerPhase:
        yield "run_ranks", label(state=worker_phase.value), ranks[worker_phase]
    for event in islice(state.troubles.values(), 0 if state.is_over else MAX_PROBLEMS):
        gpu = "" if event.gpu is None else str(event.gpu)
        yield "health_problem", label(node=event.node, gpu=gpu, check=event.key, status=event.status), 1


def _list_rank_samples(run: RunMetrics) -> Iterator[_Sample]:
    state, unknown = run.state, WorkerActivity()
    for rank, worker in state.workers.items():
        activity = run.activity.get(rank, unknown)
        labels = render_labels({"run": state.run, "node": worker.node, "rank": str(rank)})
        yield "rank_running", labels, int(worker.phase is WorkerPhase.RUNNING)
        yield "rank_step", labels, activity.step
        yield "rank_progress_age_seconds", labels, activity.last_progress_s


def _list_machine_samples(run: RunMetrics, now: float) -> Iterator[_Sample]:
    state = run.state
    for name, node in state.nodes.items():
        labels = render_labels({"run": state.run, "node": name})
        yield "node_connected", labels, int(node.link == "connected")
        sample: Mapping[str, Any] | None = run.health.get(name)
        if sample is None:
            continue
        moment = sample["t"] - node.clock_ahead_s
        yield "node_sample_timestamp_seconds", labels, moment
        if now - moment > MAX_SAMPLE_AGE_S:
            continue
        yield from _scale_fields(sample, _NODE_FIELDS, labels)
        for disk in sample.get("disk") or ():
            of_disk = render_labels({"run": state.run, "node": name, "path": disk["path"]})
            yield "node_disk_free_bytes", of_disk, disk["free"]
            yield "node_disk_size_bytes", of_disk, disk["total"]
        used = run.gpus.get(name)
        for gpu in sample.get("gpus") or ():
            if used is None or gpu["gpu"] in used:
                of_gpu = render_labels({"run": state.run, "node": name, "gpu": str(gpu["gpu"])})
                yield from _scale_fields(gpu, _GPU_FIELDS, of_gpu)


def _scale_fields(
    sample: Mapping[str, Any], fields: Sequence[tuple[str, str, float]], labels: str
) -> Iterator[_Sample]:
    for name, key, factor in fields:
        value = sample.get(key)
        # A ratio of percent has at most six digits, so that 58 % is 0.58 and not 0.5800000000000001.
        yield name, labels, None if value is None else round(value * factor, 6)
