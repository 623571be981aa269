"""Renders the output of `stats`: the load of the machines, with a row for each GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from clusterctl.agent.protocol.record_types import HealthSample
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import format_duration, group_pairs
from clusterctl.render.console import BOLD, GREEN, RED, YELLOW, Terminal, safe
from clusterctl.render.log_output import format_rfc3339
from clusterctl.render.table import Cell, make_columns, render_table

_IDLE_PERCENT = 10
_FEW = 4
"""The minimum number of nodes with old values that are named together in one line."""
HOT_C = 85
"""The minimum temperature in degrees Celsius of a GPU that is shown as hot."""
STALE_S = 60.0
"""The age in seconds above which a sample counts as old. Nodes send a sample every 15 s."""

GIB = 2**30
_GPU_KEYS = ("gpu", "util", "mem_used", "mem_total", "temp_c", "power_w")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """The values of one GPU: utilisation in percent, memory in bytes; `None` if the driver does not report it."""

    gpu: int
    util: float | None = None
    mem_used: int | None = None
    mem_total: int | None = None
    temp_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """The values of one node at one moment.

    Attributes:
        time: Wall clock time of the values; `None` if no values are known.
        cpu, mem: Percent.
        mem_used, mem_total: Bytes.
        status: Status of the GPU driver: `ok`, `stuck`, `error` or `absent`; `unknown` if there is no sample.
        reason: Why the values of GPUs, or all values, are missing.
    """

    node: str
    time: float | None
    cpu: float | None = None
    mem: float | None = None
    mem_used: int | None = None
    mem_total: int | None = None
    gpus: tuple[GpuStats, ...] = ()
    status: str = "ok"
    reason: str | None = None


def stats_from_sample(node: str, sample: HealthSample) -> NodeStats:
    """Return the values of a sample (`clusterctl.agent.facts.machine_sampler`)."""
    values: dict[str, Any] = {key: sample.get(key) for key in ("cpu", "mem", "mem_used", "mem_total", "reason")}
    of_gpus: list[dict[str, Any]] = [{key: gpu.get(key) for key in _GPU_KEYS} for gpu in sample.get("gpus") or ()]
    gpus = tuple(GpuStats(**of_gpu) for of_gpu in of_gpus)
    status = str(sample.get("status") or "ok")
    return NodeStats(node=node, time=sample["t"], gpus=gpus, status=status, **values)


def stats_json(nodes: Sequence[NodeStats]) -> list[dict[str, Any]]:
    """Return the output of `stats --json`."""
    return [
        {
            "node": node.node,
            "time": None if node.time is None else format_rfc3339(node.time),
            **{key: getattr(node, key) for key in ("status", "reason", "cpu", "mem")},
            "gpus": [asdict(gpu) for gpu in node.gpus],
        }
        for node in nodes
    ]


def render_stats(nodes: Sequence[NodeStats], terminal: Terminal, *, header: bool = True) -> list[str]:
    """Return a table with a row for each GPU, and a row for each node without GPUs."""
    columns = make_columns("~NODE", ">CPU", ">MEM", ">GPU", ">UTIL", ">GPU MEMORY", ">TEMP", ">POWER")
    rows = [row for node in nodes for row in _rows(node)]
    return render_table(columns, rows, terminal, header=header)


def describe_missing_values(nodes: Sequence[NodeStats], now: float) -> list[str]:
    """Return notes about missing values and about values older than `STALE_S`."""
    reasons = group_pairs((n.reason, n.node) for n in nodes if n.reason and n.status not in ("ok", "absent"))
    lines = [f"{safe(fold_hosts(names))}: {safe(reason)}" for reason, names in reasons.items()]
    old = [(n.node, now - n.time) for n in nodes if n.time is not None and now - n.time > STALE_S]
    if len(old) < _FEW:
        return [*lines, *(f"{safe(name)}: seen {format_duration(age)} ago" for name, age in old)]
    youngest = format_duration(min(age for _, age in old))
    return [*lines, f"{safe(fold_hosts(name for name, _ in old))}: seen {youngest} ago or longer"]


def _rows(node: NodeStats) -> list[list[Cell | str]]:
    head: list[Cell | str] = [Cell(node.node, (BOLD,)), percent(node.cpu), percent(node.mem)]
    if not node.gpus:
        return [[*head, "-", "-", "-", "-", "-"]]
    first, *rest = node.gpus
    return [[*head, *_gpu(first)]] + [["", "", "", *_gpu(gpu)] for gpu in rest]


def _gpu(gpu: GpuStats) -> list[Cell | str]:
    memory = "-"
    if gpu.mem_used is not None and gpu.mem_total is not None:
        # All rows have the same unit and one decimal, so that a reader can compare them.
        memory = f"{gpu.mem_used / GIB:.1f} GiB / {gpu.mem_total / GIB:.1f} GiB"
    power = "-" if gpu.power_w is None else f"{gpu.power_w:.0f} W"
    return [
        str(gpu.gpu),
        Cell(percent(gpu.util), utilisation_style(gpu.util)),
        memory,
        temperature_cell(gpu.temp_c),
        power,
    ]


def utilisation_style(util: float | None) -> tuple[str, ...]:
    """Return the style for a utilisation in percent: yellow for an idle GPU."""
    return (YELLOW,) if util is not None and util < _IDLE_PERCENT else (GREEN,)


def temperature_cell(temp_c: float | None) -> Cell:
    """Return the temperature of a GPU, in red if it is too hot."""
    hot = temp_c is not None and temp_c >= HOT_C
    return Cell("-" if temp_c is None else f"{temp_c:.0f} C", (RED,) if hot else ())


def percent(value: float | None) -> str:
    """Return a value in percent as text, `-` if it is unknown."""
    return "-" if value is None else f"{value:.0f}%"
