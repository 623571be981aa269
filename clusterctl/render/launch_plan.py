"""Renders a launch plan: a table of nodes and commands, then the environment of the ranks."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.formatting import fold_ranks, plural
from clusterctl.render.console import DIM, Terminal
from clusterctl.render.table import make_columns, render_table

_COLUMNS = make_columns("~NODE", "RANKS", "COUNT", "COMMAND")
_COUNTED = "counted at start"
_MOST_SHOWN = 4
"""The largest number of different values of a variable at which all values are shown."""


def render_plan(plan: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a plan (`plan_json`) as lines: a summary, a table of ranks and commands, and the environment."""
    nodes = plan["nodes"]
    lines = [f"{_ranks(plan)} · {_master(plan)}", ""]
    lines += render_table(_COLUMNS, list(_rows(nodes)), terminal)
    envs = [worker["env"] for node in nodes for worker in node["workers"]]
    return [*lines, "", *_environment(envs, terminal)]


def _ranks(plan: Mapping[str, Any]) -> str:
    nodes = plural(len(plan["nodes"]), "node")
    if plan["world_size"] is not None:
        return f"{plural(plan['world_size'], 'rank')} on {nodes}"
    if all(worker["local_rank"] is None for node in plan["nodes"] for worker in node["workers"]):
        return f"{nodes}, one rank per GPU, {_COUNTED}"
    return f"{nodes}, ranks {_COUNTED}"


def _master(plan: Mapping[str, Any]) -> str:
    address, port = plan["master_addr"], plan["master_port"]
    if address is None and not port:
        return "MASTER_ADDR and port chosen at start"
    host = "MASTER_ADDR chosen at start" if address is None else f"MASTER_ADDR {address}"
    return f"{host}, {f'MASTER_PORT {port}' if port else 'port chosen at start'}"


def _rows(nodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row. Consecutive nodes with the same number of ranks and command share a row."""
    for (count, _, command), same in groupby(nodes, _start_of):
        alike = list(same)
        workers = [worker for node in alike for worker in node["workers"]]
        is_known = all(worker["rank"] is not None for worker in workers)
        ranks = fold_ranks(worker["rank"] for worker in workers) if is_known else _COUNTED
        each = str(count) if workers[0]["local_rank"] is not None else "1 per GPU"
        each += " each" if len(alike) > 1 and workers[0]["local_rank"] is not None else ""
        yield fold_hosts(node["node"] for node in alike), ranks, each, command


def _start_of(node: Mapping[str, Any]) -> tuple[int, bool, str]:
    """Return the number of a node's workers, whether this number is still unknown, and the workers' command."""
    workers = node["workers"]
    # Without a configured Python, the node looks for a Python.
    command = shlex.join("python" if word is None else word for word in workers[0]["argv"])
    return len(workers), workers[0]["local_rank"] is None, command


def _environment(envs: Sequence[Mapping[str, str | None]], terminal: Terminal) -> list[str]:
    """Return the variables that are equal on all ranks, then the other variables with their values in order of rank.

    The last line names the variables whose values are known only at the start.
    """
    counted = sorted({name for env in envs for name, value in env.items() if value is None})
    names = sorted({name for env in envs for name in env}.difference(counted))
    values = {name: list(dict.fromkeys(str(env.get(name, "(not set)")) for env in envs)) for name in names}
    alike = [f"  {name}={said[0]}" for name, said in values.items() if len(said) == 1]
    differ = [f"  {name}={_some(said, terminal)}" for name, said in values.items() if len(said) > 1]
    lines = ["every rank has", *(terminal.style(line, DIM) for line in alike)]
    if differ:
        lines += ["by rank", *(terminal.style(line, DIM) for line in differ)]
        if not counted:
            lines.append("`clusterctl config --env RANK` shows all of one rank")
    if counted:
        lines += [_COUNTED, terminal.style(f"  {', '.join(counted)}", DIM)]
    return lines


def _some(values: Sequence[str], terminal: Terminal) -> str:
    if len(values) <= _MOST_SHOWN:
        return ", ".join(values)
    return f"{', '.join(values[:2])} {terminal.glyphs.ellipsis} {values[-1]}"
