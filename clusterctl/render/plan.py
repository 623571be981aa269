"""A launch plan for people."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from clusterctl.render.ranks import fold_ranks
from clusterctl.render.terminal.console import DIM

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.render.terminal.console import Terminal


def render_plan(plan: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a plan (`plan_json`) as lines: a head line, then each node with its ranks, argv and environment."""
    world = "unknown: nodes must be asked for their GPUs" if plan["world_size"] is None else plan["world_size"]
    lines = [f"world size {world} · master {_master(plan['master_addr'], plan['master_port'])}"]
    for node in plan["nodes"]:
        workers = node["workers"]
        ranks = f"rank {fold_ranks(w['rank'] for w in workers)}" if workers else "ranks unknown"
        lines.append(f"{node['node']}  node rank {node['node_rank']}  {ranks}")
        if workers:
            argv = ["python" if a is None else a for a in workers[0]["argv"]]
            lines.append(f"  {shlex.join(argv)}")
            env = sorted(workers[0]["env"].items())
            lines += [terminal.style(f"    {k}={v}", DIM) for k, v in env]
    return lines


def _master(address: str | None, port: int | None) -> str:
    if address is None:
        return "found at the start" + (f", port {port}" if port else "")
    return f"{address}:{port}" if port else f"{address}, on a free port"
