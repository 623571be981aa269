"""`stats` and `top`: what the machines do, a line for each GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.render.console import BOLD, DIM, GREEN, RED, YELLOW, fit, safe, size
from clusterctl.render.log import rfc3339
from clusterctl.render.table import Cell, Column, render_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.console import Terminal
    from clusterctl.render.status import RunView

_IDLE_PERCENT = 10
_HOT_C = 85


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats:
    """One GPU now. Utilisation in percent, memory in bytes; `None` where the driver does not say."""

    gpu: int
    util: float | None = None
    mem_used: int | None = None
    mem_total: int | None = None
    temp_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """One node now: wall clock, CPU and memory in percent, GPUs."""

    node: str
    time: float
    cpu: float | None = None
    mem: float | None = None
    gpus: tuple[GpuStats, ...] = ()


def stats_json(nodes: Sequence[NodeStats]) -> list[dict[str, Any]]:
    """Return `stats --json`."""
    keys = ("gpu", "util", "mem_used", "mem_total", "temp_c", "power_w")
    return [
        {
            "node": node.node,
            "time": rfc3339(node.time),
            "cpu": node.cpu,
            "mem": node.mem,
            "gpus": [{key: getattr(gpu, key) for key in keys} for gpu in node.gpus],
        }
        for node in nodes
    ]


def render_stats(nodes: Sequence[NodeStats], terminal: Terminal, *, header: bool = True) -> list[str]:
    """Return a table: a row for each GPU, or one for a node without any."""
    columns = [
        Column(title="NODE", shrink=True),
        Column(title="CPU", right=True),
        Column(title="MEM", right=True),
        Column(title="GPU", right=True),
        Column(title="UTIL", right=True),
        Column(title="GPU MEMORY", right=True),
        Column(title="TEMP", right=True),
        Column(title="POWER", right=True),
    ]
    rows = [row for node in nodes for row in _rows(node)]
    return render_table(columns, rows, terminal, header=header)


def render_top(
    view: RunView, nodes: Sequence[NodeStats], now: float, terminal: Terminal, *, height: int | None = None
) -> list[str]:
    """Return one screen of `top`: the run, its machines, its ranks; cut to `height` lines."""
    from clusterctl.render.status import render_status

    lines = render_status(view, now, terminal)
    if nodes:
        lines += ["", *render_stats(nodes, terminal)]
    lines.append("")
    lines.append(terminal.style(fit("Ctrl-C leaves; the run goes on", terminal.width, terminal.glyphs), DIM))
    if height is not None and len(lines) > height:
        lines = [*lines[: max(0, height - 1)], terminal.style(f"{len(lines) - height + 1} more lines", DIM)]
    return lines


def _rows(node: NodeStats) -> list[list[Cell | str]]:
    head: list[Cell | str] = [Cell(safe(node.node), (BOLD,)), _percent(node.cpu), _percent(node.mem)]
    if not node.gpus:
        return [[*head, "-", "-", "-", "-", "-"]]
    first, *rest = node.gpus
    return [[*head, *_gpu(first)]] + [["", "", "", *_gpu(gpu)] for gpu in rest]


def _gpu(gpu: GpuStats) -> list[Cell | str]:
    memory = "-"
    if gpu.mem_used is not None and gpu.mem_total is not None:
        memory = f"{size(gpu.mem_used)} / {size(gpu.mem_total)}"
    idle = gpu.util is not None and gpu.util < _IDLE_PERCENT
    hot = gpu.temp_c is not None and gpu.temp_c >= _HOT_C
    return [
        str(gpu.gpu),
        Cell(_percent(gpu.util), (YELLOW,) if idle else (GREEN,)),
        memory,
        Cell("-" if gpu.temp_c is None else f"{gpu.temp_c:.0f} C", (RED,) if hot else ()),
        "-" if gpu.power_w is None else f"{gpu.power_w:.0f} W",
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}%"
