"""A launch plan for people: a table of what starts where, then the environment, each fact once."""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import TYPE_CHECKING, Any

from clusterctl.render.ranks import fold_nodes, fold_ranks
from clusterctl.render.terminal.console import DIM
from clusterctl.render.terminal.table import Column, render_table
from clusterctl.wording import plural

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.render.terminal.console import Terminal

_COLUMNS = (Column(title="NODE", shrink=True), Column(title="RANKS"), Column(title="COUNT"), Column(title="COMMAND"))
_MOST_SHOWN = 4
"""So many different values of a variable are all shown."""


def render_plan(plan: Mapping[str, Any], terminal: Terminal) -> list[str]:
    """Return a plan (`plan_json`) as lines: a head line, a table of ranks and commands, what is in the environment."""
    nodes = plan["nodes"]
    workers = [worker for node in nodes for worker in node["workers"]]
    lines = [f"{_ranks(plan['world_size'])} on {plural(len(nodes), 'node')} · {_master(plan)}", ""]
    lines += render_table(_COLUMNS, list(_rows(nodes)), terminal)
    if workers:
        lines += ["", *_environment([worker["env"] for worker in workers], terminal)]
    return lines


def _ranks(world_size: int | None) -> str:
    return "ranks as the nodes have GPUs" if world_size is None else plural(world_size, "rank")


def _master(plan: Mapping[str, Any]) -> str:
    address, port = plan["master_addr"], plan["master_port"]
    place = "found at the start" if address is None else address
    if port:
        return f"MASTER_ADDR {place}, MASTER_PORT {port}"
    return f"MASTER_ADDR {place}, on a free port"


def _rows(nodes: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield the cells of each row; neighbours that start as many ranks by the same command share one."""
    for (count, command), same in groupby(nodes, lambda node: (len(node["workers"]), _command(node["workers"]))):
        alike = list(same)
        ranks = fold_ranks(worker["rank"] for node in alike for worker in node["workers"])
        each = f"{count} each" if len(alike) > 1 and count else str(count or "")
        yield fold_nodes(node["node"] for node in alike), ranks or "unknown", each, command


def _command(workers: Sequence[Mapping[str, Any]]) -> str:
    # Where nothing names the interpreter, it is found on the node.
    return shlex.join("python" if word is None else word for word in workers[0]["argv"]) if workers else ""


def _environment(envs: Sequence[Mapping[str, str]], terminal: Terminal) -> list[str]:
    """Return the variables that all ranks have alike, then those that differ, with their values in order of rank."""
    names = sorted({name for env in envs for name in env})
    values = {name: list(dict.fromkeys(env.get(name, "(not set)") for env in envs)) for name in names}
    alike = [f"  {name}={said[0]}" for name, said in values.items() if len(said) == 1]
    differ = [f"  {name}={_some(said, terminal)}" for name, said in values.items() if len(said) > 1]
    lines = ["every rank has", *(terminal.style(line, DIM) for line in alike)]
    if differ:
        lines += ["by rank", *(terminal.style(line, DIM) for line in differ)]
        lines.append("`clusterctl config --env RANK` shows all of one rank")
    return lines


def _some(values: Sequence[str], terminal: Terminal) -> str:
    if len(values) <= _MOST_SHOWN:
        return ", ".join(values)
    return f"{', '.join(values[:2])} {terminal.glyphs.ellipsis} {values[-1]}"
