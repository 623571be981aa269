"""What `clusterctl` alone shows: a title, the active runs, the commands in groups, and what to type next."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.render.console import Terminal

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Run": ("up", "down", "attach", "wait"),
    "Look": ("ps", "status", "logs", "why", "diff", "report", "stacks", "top", "stats"),
    "Nodes": ("health", "exec", "shell", "port-forward", "cp", "sync", "trust", "clean"),
    "Set-up": ("init", "templates", "config", "export", "schema", "completion", "version"),
}
"""Every command, by what it is for; `--help` and the front page keep this order."""


def show() -> None:
    """Print the front page."""
    from clusterctl._version import __version__
    from clusterctl.render.console import Console

    console = Console.standard()
    here = os.path.isfile("cluster.yaml")
    console.tell(*page(__version__, _active(console.out), console.out, has_file=here))


def page(version: str, active: Sequence[str], terminal: Terminal, *, has_file: bool) -> list[str]:
    """Return the lines of the front page; `active` are those of the runs that go on."""
    width = max(map(len, GROUPS))
    rows = [
        f"  {name.ljust(width)}   {'  '.join(terminal.style(command, '1') for command in commands)}"
        for name, commands in GROUPS.items()
    ]
    first = (
        "`clusterctl up` starts what cluster.yaml says"
        if has_file
        else "No cluster.yaml here: `clusterctl init` writes one"
    )
    return [
        *([*active, ""] if active else []),
        f"clusterctl {version}   train on many machines over SSH",
        "",
        *rows,
        "",
        f"  {first}",
        "  `clusterctl COMMAND -h` says more of a command",
    ]


def _active(terminal: Terminal) -> list[str]:
    """Return the table of the runs of which something may run; nothing is imported for it where there was no run."""
    from clusterctl.run.record.run_lookup import list_runs, load_summary_or_state

    going = [run for run in list_runs() if load_summary_or_state(run).may_run]
    if not going:
        return []
    import time

    from clusterctl.cli.lookup.runs import listed_view_of
    from clusterctl.render.run_list import ps_hints, render_ps, sort_runs

    views = [view for run in going if (view := listed_view_of(run)).state.may_run]
    return [*render_ps(sort_runs(views), time.time(), terminal), *ps_hints(views)]
