"""Renders the screen of `clusterctl demo`: the loss beside the ranks, and what commands say of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from clusterctl.logs.safe_text import strip_colours
from clusterctl.render.console import BOLD, CYAN, DIM, Terminal, fit, pad
from clusterctl.render.line_chart import MIN_WIDTH, render_line_chart
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.status_report import RunSnapshot, render_status

_TABLE_WIDTH = 58
_TOP = 13
_DEFAULT_WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoView:
    """What the screen shows.

    Attributes:
        snapshot: The run; `None` before its start.
        losses: Time and loss of each printed step.
        act: What the last key did.
        up_lines: The output of `clusterctl up`, without steps.
        why_lines: The output of `clusterctl why`; empty before its first call.
        note: A key that does nothing here, and the reason.
    """

    snapshot: RunSnapshot | None
    losses: Sequence[tuple[float, float]]
    act: str
    up_lines: Sequence[str]
    why_lines: Sequence[str]
    note: str


def render_demo(view: DemoView, now: float, terminal: Terminal, height: int) -> list[str]:
    """Return a screen of exactly `height` lines that are no wider than the terminal."""
    width = terminal.width or _DEFAULT_WIDTH
    run = "" if view.snapshot is None else view.snapshot.state.run
    left_width = max(MIN_WIDTH, width - _TABLE_WIDTH - 2)
    top = min(_TOP, max(5, height - 10))
    loss = f"loss {view.losses[-1][1]:.4f}" if view.losses else "loss"
    left = [terminal.style(loss, BOLD), *render_line_chart({"loss": view.losses}, left_width, top - 1, terminal)]
    right = [_name_command(f"status {run}", terminal), *_choose_status_lines(view.snapshot, now, terminal, top - 1)]
    room = height - top - 4 - len(view.why_lines[:6])
    lines = [
        *(f"{pad(a, left_width)}  {b}" for a, b in zip(left, [*right, *[""] * top], strict=False)),
        "",
        _name_command("up", terminal),
        *(f"  {terminal.filter_colours(line)}" for line in view.up_lines[-max(1, room) :]),
    ]
    if view.why_lines:
        lines += [
            _name_command(f"why {run}", terminal),
            *(f"  {terminal.filter_colours(x)}" for x in view.why_lines[:6]),
        ]
    lines = [_fit(line, width, terminal) for line in lines[: height - 2]]
    foot = "k kill a rank  f freeze a rank  c cut a node  d fill a disk  q quit"
    return [
        *lines,
        *[""] * (height - 2 - len(lines)),
        terminal.style(fit(view.act, width, terminal.glyphs), CYAN, BOLD),
        terminal.style(fit(f"{foot}  {view.note}".rstrip(), width, terminal.glyphs), DIM),
    ]


def _name_command(command: str, terminal: Terminal) -> str:
    return terminal.style(f"$ clusterctl {command}".rstrip(), BOLD)


def _choose_status_lines(snapshot: RunSnapshot | None, now: float, terminal: Terminal, room: int) -> list[str]:
    """Return the parts of `status` that have room: first its headline and ranks, then attempts and nodes."""
    if snapshot is None:
        return []
    blocks = [
        list(block)
        for is_blank, block in groupby(render_status(snapshot, now, terminal), lambda x: not x)
        if not is_blank
    ]
    chosen = [blocks[0][0], *(blocks[-1] if len(blocks) > 1 else blocks[0][1:])]
    for block in blocks[1:-1]:
        # Of attempts, the last ones matter.
        rest = [block[0], *block[1:][-max(0, room - len(chosen) - 2) :]]
        if room - len(chosen) >= 3:
            chosen += ["", *rest][: room - len(chosen)]
    return chosen[:room]


def _fit(line: str, width: int, terminal: Terminal) -> str:
    """Return a line that fits; a line that is cut loses its colours."""
    bare = strip_colours(line)
    return line if count_columns(bare) <= width else fit(bare, width, terminal.glyphs)
