"""Prints the output of `clusterctl` without a command: active runs, all commands, and a suggestion."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clusterctl._version import __version__
from clusterctl.cli.command_table import GROUPS
from clusterctl.cli.run_views import load_run_list_view
from clusterctl.render.console import Console
from clusterctl.render.run_list import ps_hints, render_ps, sort_runs
from clusterctl.run.record.state_reader import list_runs, load_summary_or_state

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal


def print_overview() -> None:
    """Print the overview."""
    console = Console.for_standard_streams()
    here = os.path.isfile("cluster.yaml")
    console.write_stdout_wrapped(
        *render_overview(__version__, _render_active_runs(console.out), console.out, has_file=here)
    )


def render_overview(version: str, active: Sequence[str], terminal: Terminal, *, has_file: bool) -> list[str]:
    """Return the lines of the overview; `active` contains the lines about active runs."""
    width = max(map(len, GROUPS))
    rows = [
        f"  {name.ljust(width)}  {'  '.join(terminal.style(command, '1') for command in commands)}"
        for name, commands in GROUPS.items()
    ]
    first = (
        "`clusterctl up` starts the job of cluster.yaml"
        if has_file
        else "There is no cluster.yaml here: `clusterctl init` writes one"
    )
    return [
        *([*active, ""] if active else []),
        f"clusterctl {version}   train on many machines over SSH",
        "",
        *rows,
        "",
        f"  {first}",
        "  `clusterctl COMMAND -h` explains a command",
    ]


def _render_active_runs(terminal: Terminal) -> list[str]:
    """Return the table of the runs whose processes may still run."""
    views = [load_run_list_view(run) for run in list_runs() if load_summary_or_state(run).may_run]
    views = [view for view in views if view.state.may_run]
    return [*render_ps(sort_runs(views), time.time(), terminal), *ps_hints(views)] if views else []
