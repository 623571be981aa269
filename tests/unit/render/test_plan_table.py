from __future__ import annotations

import io
from typing import Any

import pytest

from clusterctl.render.console import Terminal
from clusterctl.render.launch_plan import render_plan

PIPE = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=0)


def node(rank: int, count: int = 2, argv: tuple[str | None, ...] = (None, "train.py"), **env: str) -> dict[str, Any]:
    first = rank * count
    workers = [
        {
            "rank": first + i,
            "local_rank": i,
            "argv": list(argv),
            "env": {"RANK": str(first + i), "WORLD_SIZE": "8", **env},
        }
        for i in range(count)
    ]
    return {"node": f"gpu{rank + 1:02}", "node_rank": rank, "workers": workers}


def plan(*nodes: dict[str, Any], **more: Any) -> dict[str, Any]:
    ranks = sum(len(one["workers"]) for one in nodes)
    return {"world_size": ranks, "master_addr": None, "master_port": None, "nodes": list(nodes), **more}


def test_nodes_that_start_alike_share_a_row() -> None:
    lines = render_plan(plan(*map(node, range(4))), PIPE)
    assert lines[:4] == [
        "8 ranks on 4 nodes · MASTER_ADDR and port chosen at start",
        "",
        "NODE        RANKS  COUNT   COMMAND",
        "gpu[01-04]  0-7    2 each  python train.py",
    ]


def test_a_node_that_starts_something_else_has_a_row_of_its_own() -> None:
    lines = render_plan(plan(node(0), node(1, argv=(None, "other.py", "--data", "/a b")), node(2)), PIPE)
    assert lines[3:6] == [
        "gpu01  0-1    2      python train.py",
        "gpu02  2-3    2      python other.py --data '/a b'",
        "gpu03  4-5    2      python train.py",
    ]


def test_what_all_ranks_have_is_told_once_and_what_differs_by_its_values() -> None:
    lines = render_plan(plan(*map(node, range(4))), PIPE)
    assert lines[5:] == [
        "every rank has",
        "  WORLD_SIZE=8",
        "by rank",
        "  RANK=0, 1 … 7",
        "`clusterctl config --env RANK` shows all of one rank",
    ]


def test_a_variable_that_some_ranks_do_not_have_is_told_as_such() -> None:
    lines = render_plan(plan(node(0, DATA="/d"), node(1)), PIPE)
    assert "  DATA=/d, (not set)" in lines


@pytest.mark.parametrize(
    ("more", "told"),
    [
        pytest.param({"master_port": 29500}, "MASTER_ADDR chosen at start, MASTER_PORT 29500", id="port"),
        pytest.param({"master_addr": "10.0.0.1"}, "MASTER_ADDR 10.0.0.1, port chosen at start", id="address"),
    ],
)
def test_the_head_line_tells_what_the_file_says_of_the_meeting(more: dict[str, Any], told: str) -> None:
    assert render_plan(plan(node(0), **more), PIPE)[0] == f"2 ranks on 1 node · {told}"


def test_where_nodes_must_be_asked_for_their_gpus_it_is_said() -> None:
    worker = {"rank": None, "local_rank": None, "argv": [None, "train.py"], "env": {"A": "1", "RANK": None}}
    nodes = [{"node": f"gpu0{i}", "node_rank": i, "workers": [worker]} for i in range(2)]
    assert render_plan(plan(*nodes, world_size=None), PIPE) == [
        "2 nodes, one rank per GPU, counted at start · MASTER_ADDR and port chosen at start",
        "",
        "NODE        RANKS             COUNT      COMMAND",
        "gpu[00-01]  counted at start  1 per GPU  python train.py",
        "",
        "every rank has",
        "  A=1",
        "counted at start",
        "  RANK",
    ]
