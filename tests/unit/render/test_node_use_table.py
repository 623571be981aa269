"""The table of `who`: equal nodes share their rows, and what a node reports cannot control the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clusterctl.render.node_use_table import render_node_use
from clusterctl.run.rules.node_use import Holder, HolderKind, NodeUse

if TYPE_CHECKING:
    from clusterctl.render.console import Terminal

NOW, H = 1_000_000.0, 3600.0
RUN = Holder(
    kind=HolderKind.RUN,
    gpus=(0, 1),
    user="anna",
    name="llama-1",
    since=NOW - H,
    step=12,
    memory=2**30,
    util=97,
    head="desk",
)
KERNEL = Holder(
    kind=HolderKind.PROCESS,
    gpus=(0,),
    user="ben",
    name="jupyter " + "x" * 99,
    pids=(4711,),
    since=NOW - 9 * H,
    memory=2**31,
    util=0,
    idle_since=NOW - 6 * H,
)
NODES = [
    NodeUse(node="n1", gpus=(0, 1), holders=(RUN,)),
    NodeUse(node="n2", gpus=(0, 1), holders=(replace(RUN, since=NOW - 60, step=11, util=90, memory=2**32),)),
    NodeUse(node="n3", gpus=(0, 1), holders=(KERNEL,), notes=("1 process on GPU 0 cannot be named",)),
    NodeUse(node="n4", gpus=(0, 1)),
    NodeUse(node="n5", gpus=(0, 1)),
    NodeUse(node="n6", holders=(replace(RUN, gpus=(), workers=4, memory=None, util=None, is_here=True),)),
    NodeUse(node="n7", error="no route"),
]


def test_equal_nodes_share_their_rows_with_the_spread_of_their_values(pipe: Terminal) -> None:
    assert render_node_use(NODES, NOW, pipe) == [
        "NODE    GPU  USER  SINCE       MEMORY      UTIL  WHAT",
        "n[1-2]  0-1  anna  1h00m  1.0-4.0 GiB    90-97%  run llama-1, step 11, from desk",
        f"n3      0    ben   9h00m      2.0 GiB  idle 6 h  pid 4711: jupyter {'x' * 49}...",
        "        1    -         -            -         -  free",
        "n[4-5]  0-1  -         -            -         -  free",
        "n6      -    anna  1h00m            -         -  run llama-1, step 12, 4 workers",
        "n7      -    -         -            -         -  no route",
        "",
        "2 of 7 nodes free, 5 of 10 GPUs free, 1 GPU held without use, 1 node without an answer",
        "n3: 1 process on GPU 0 cannot be named",
    ]


@pytest.mark.parametrize(
    ("nodes", "what"),
    [
        pytest.param([(7,)], "pid 7: x", id="a process"),
        pytest.param([(7, 8)], "2 x x", id="processes of a node"),
        pytest.param([(7,), (9,)], "x", id="a process on each node"),
    ],
)
def test_a_process_has_a_pid_if_it_is_the_only_one(pipe: Terminal, nodes: list[tuple[int, ...]], what: str) -> None:
    uses = [
        NodeUse(node=f"n{i}", gpus=(0,), holders=(replace(KERNEL, name="x", pids=pids),))
        for i, pids in enumerate(nodes)
    ]
    assert render_node_use(uses, NOW, pipe)[1].endswith(f"  {what}")


def test_a_narrow_terminal_has_no_memory_and_short_commands(narrow: Terminal) -> None:
    lines = render_node_use(NODES, NOW, narrow)
    assert max(map(len, lines)) <= 80
    assert "MEMORY" not in lines[0]


def test_what_a_node_reports_of_itself_is_only_text(pipe: Terminal) -> None:
    evil = "a\x1b]52;c;eA==\x07\nb"
    held = replace(RUN, user=evil, name=evil, head=evil)
    lines = render_node_use([NodeUse(node="n1", gpus=(0, 1), holders=(held,), notes=(evil,))], NOW, pipe)
    assert not {"\x1b", "\x07"} & set("".join(lines))
    assert len(lines) == len(["titles", "the run", "", "totals", "note"])


def test_a_node_with_many_holders_has_few_rows(pipe: Terminal) -> None:
    many = tuple(replace(KERNEL, gpus=(i % 2,), name=f"c{i}") for i in range(100))
    lines = render_node_use([NodeUse(node="n1", gpus=(0, 1), holders=many)], NOW, pipe)
    assert lines[24].split() == ["77", "holders", "more"]
    assert len(lines) == 27


def test_a_node_that_cannot_be_seen_has_a_row_and_is_not_free(pipe: Terminal) -> None:
    lines = render_node_use([NodeUse(node="n1", gpus=(0,), is_known=False)], NOW, pipe)
    assert lines[1].endswith("its use cannot be seen")
    assert lines[3] == "0 of 1 node free, 0 of 1 GPU free"
