"""The screen of the demo before there is a run; `tests/e2e/test_demo.py` has one with a run."""

from __future__ import annotations

import io

import pytest

from clusterctl.render.console import Terminal
from clusterctl.render.demo_screen import DemoView, render_demo


@pytest.mark.parametrize(("width", "height"), [(100, 40), (80, 24), (60, 16), (200, 60)], ids=str)
def test_the_screen_fits(width: int, height: int) -> None:
    view = DemoView(
        snapshot=None,
        losses=[(float(x), 1.0 / (x + 1)) for x in range(50)],
        act="k: kill -KILL 7, which is rank 2 on node3",
        up_lines=[f"line {number} {'x' * 150}" for number in range(80)],
        why_lines=["crash", *["  evidence"] * 9],
        note="(d: only root may mount a small disk here)",
    )
    terminal = Terminal(io.StringIO(), colour=False, live=True, unicode=True, width=width)

    lines = render_demo(view, 0.0, terminal, height)

    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert any(line.startswith("  line 79") for line in lines)
    assert lines[-1].startswith("k kill a rank")
