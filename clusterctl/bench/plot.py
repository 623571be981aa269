"""The scaling report as a picture. Needs matplotlib, the extra `bench`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.bench.results import PARTS
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.bench.results import Row

_NAMES = {"single": "one device", "dp": "DataParallel", "ddp": "DDP", "job": "the job"}
_COLOURS = {"data": "#4c72b0", "compute": "#55a868", "comm": "#c44e52", "wait": "#ccb974"}
_WORDS = {"data": "data", "compute": "compute", "comm": "communication", "wait": "waiting for the slowest"}


def draw(rows: Sequence[Row], path: str, title: str) -> None:
    """Write a picture: speed-up against perfect, and where an epoch goes. The file's ending says the format.

    Raises:
        RefusedError: There is no matplotlib, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RefusedError("a plot needs matplotlib", hint="pip install 'clusterctl[bench]'") from error
    apart = [row for row in rows if any(value is not None for value in row.parts.values())]
    figure = Figure(figsize=(11 if apart else 6, 4.2), layout="constrained")
    figure.suptitle(title)
    _speedup(figure.add_subplot(1, 2 if apart else 1, 1), rows)
    if apart:
        _parts(figure.add_subplot(1, 2, 2), apart)
    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be written: {error}") from error


def _speedup(axes: Any, rows: Sequence[Row]) -> None:
    most = max(row.workers for row in rows)
    axes.plot([1, most], [1, most], linestyle="--", color="0.6", label="perfect")
    for mode in dict.fromkeys(row.mode for row in rows):
        points = sorted((row.workers, row.speedup) for row in rows if row.mode == mode)
        axes.plot(*zip(*points, strict=True), marker="o", label=_NAMES.get(mode, mode))
    axes.set_xticks(sorted({row.workers for row in rows}))
    axes.set_xlabel("workers")
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    axes.legend()


def _parts(axes: Any, rows: Sequence[Row]) -> None:
    names = [f"{_NAMES.get(row.mode, row.mode)}\n{row.workers}" for row in rows]
    below = [0.0] * len(rows)
    for part in PARTS:
        heights = [row.parts.get(part) or 0.0 for row in rows]
        axes.bar(names, heights, bottom=below, color=_COLOURS[part], label=_WORDS[part], width=0.6)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    axes.plot(names, [row.epoch_s for row in rows], "k_", markersize=28, label="an epoch as scripts run it")
    axes.set_xlabel("workers")
    axes.set_ylabel("seconds per epoch")
    axes.set_ylim(0, max([*below, *(row.epoch_s for row in rows)]) * 1.35)
    axes.legend(fontsize="small", ncols=2, markerscale=0.4)
