"""`top`: one screen of a run, never taller or wider than the terminal; where rows have no room they are folded."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text
from clusterctl.logs.sanitize import strip_colours
from clusterctl.render.stats import STALE_S, remarks
from clusterctl.render.status import render_summary
from clusterctl.render.story.last_line import speed_text
from clusterctl.render.terminal.console import BOLD, DIM, fit
from clusterctl.render.terminal.wrapping import cells, wrapped
from clusterctl.render.top.order import SORTS, in_order
from clusterctl.render.top.scene import Level, finest, leaves_of, rows_at
from clusterctl.render.top.table import busy_text, mean_trend, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from clusterctl.render.terminal.console import Terminal
    from clusterctl.render.top.order import Order
    from clusterctl.render.top.scene import Leaf, Scene

_MOST_NEWS = 4
_MOST_OF_ONE = 3
_WIDE = 10_000
_FOLDED = {Level.RANKS: "", Level.NODES: "a row a node", Level.ALIKE: "nodes that are alike in one row"}


def render_top(scene: Scene, order: Order, now: float, terminal: Terminal, height: int) -> tuple[list[str], Order]:
    """Return one screen of at most `height` lines, and the order with a first row that exists.

    Args:
        scene: What there is to show.
        order: How it is sorted and folded, and from where it is shown.
        now: The head's wall clock in seconds.
        terminal: For width and colours.
        height: Lines of the screen.
    """
    width = terminal.width
    head = _head(scene, now, terminal, width or _WIDE)[: max(1, height - 4)]
    leaves = leaves_of(scene)
    room = max(1, height - len(head) - 3)
    level = order.fold or finest(leaves, room)
    rows = in_order(rows_at(scene, leaves, level, now), order)
    first = max(0, min(order.first, len(rows) - room))
    lines = [
        *head,
        _as_of(scene, leaves, level, now, terminal),
        *table(rows[first : first + room], scene, width, terminal),
    ]
    lines += [""] * max(0, height - 1 - len(lines))
    foot = _foot(order, first, room, len(rows), terminal)
    return [*lines[: height - 1], foot], replace(order, first=first)


def level_of(scene: Scene, order: Order, now: float, terminal: Terminal, height: int) -> Level:
    """Return what a row of the screen stands for."""
    head = _head(scene, now, terminal, terminal.width or _WIDE)[: max(1, height - 4)]
    return order.fold or finest(leaves_of(scene), max(1, height - len(head) - 3))


def _head(scene: Scene, now: float, terminal: Terminal, width: int) -> list[str]:
    lines = [terminal.style(fit(scene.title, width, terminal.glyphs), BOLD)]
    if scene.view is not None:
        lines = render_summary(scene.view, now, terminal)
    news = lines[1:] + [f"  {line}" for line in remarks(scene.nodes, now)]
    if len(news) > _MOST_NEWS:
        news = [*news[: _MOST_NEWS - 1], f"  {len(news) - _MOST_NEWS + 1} more: `clusterctl status`"]
    news = [part for line in news for part in wrapped(line, width)[:_MOST_OF_ONE]]
    return [_within(line, width, terminal) for line in (lines[0], *news)]


def _within(line: str, width: int, terminal: Terminal) -> str:
    """Return a line as it is, and without its colours where it has to be cut."""
    bare = strip_colours(line)
    return line if cells(bare) <= width else fit(bare, width, terminal.glyphs)


def _as_of(scene: Scene, leaves: Sequence[Leaf], level: Level, now: float, terminal: Terminal) -> str:
    """Return how the whole is doing, how old the numbers are, and how they are folded."""
    parts = [*_whole(scene, leaves, terminal)]
    if scene.view is not None and scene.view.state.over:
        ended = scene.view.state.ended
        parts.append("as it was at the end" + ("" if ended is None else f", {duration_text(now - ended)} ago"))
    else:
        parts += _ages(scene, now)
    if _FOLDED[level]:
        parts.append(_FOLDED[level])
    text = f"  {f' {terminal.glyphs.dot} '.join(parts)}" if parts else ""
    return terminal.style(fit(text, terminal.width, terminal.glyphs), DIM)


def _ages(scene: Scene, now: float) -> list[str]:
    """Return how old numbers of ranks and machines are: the oldest of those that still tell how it is."""
    fresh = [now - n.time for n in scene.nodes if n.time is not None and now - n.time <= STALE_S]
    machines = f"machines {duration_text(max(0.0, *fresh))} ago" if len(fresh) > 1 else ""
    if len(fresh) == 1:
        machines = f"machine {duration_text(max(0.0, fresh[0]))} ago"
    ranks = "" if scene.ranks_at is None else f"ranks {duration_text(max(0.0, now - scene.ranks_at))} ago"
    return [text for text in (ranks, machines) if text]


def _whole(scene: Scene, leaves: Sequence[Leaf], terminal: Terminal) -> list[str]:
    paces = [leaf.pace for leaf in leaves if leaf.pace]
    parts = [speed_text(median(paces))] if paces else []
    of_gpus = any(leaf.gpu is not None for leaf in leaves)
    busy = mean_trend([leaf.trend for leaf in leaves if (leaf.gpu is not None) == of_gpus])
    if busy:
        parts.append(busy_text(busy, "GPUs" if of_gpus else "CPUs", terminal.glyphs))
    return parts


def _foot(order: Order, first: int, room: int, total: int, terminal: Terminal) -> str:
    shown = f"{first + 1}-{min(first + room, total)} of {total}  " if total > room else ""
    words = [(f"[{word}]" if word == order.by else word, key) for key, word in SORTS.items()]
    keys = " ".join(word if word.strip("[]").startswith(key) else f"{key}:{word}" for word, key in words)
    foot = f"{shown}q leave  f fold  sort: {keys}"
    if terminal.width is not None and cells(foot) > terminal.width:
        # The keys alone: a word that is cut is none.
        keys = " ".join(f"[{word}]" if word == order.by else key for key, word in SORTS.items())
        foot = f"{shown}q leave  f fold  sort: {keys}"
    return terminal.style(fit(foot, terminal.width, terminal.glyphs), DIM)
