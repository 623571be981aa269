"""Runs, as far as journals tell of them: what tests of the folded state begin with and compare with."""

from __future__ import annotations

import json
from typing import Any, cast

from clusterctl.agent.protocol import events as node_events
from clusterctl.render.status_report import RunSnapshot, status_json
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunState
from clusterctl.run.rules.state_updates import apply_controller_event, apply_node_event

LAYOUT = [
    {"node": "n0", "node_rank": 0, "address": "10.0.0.1", "ranks": [0, 1]},
    {"node": "n1", "node_rank": 1, "address": "10.0.0.2", "ranks": [2, 3]},
]


def attempt(number: int = 0, layout: list[dict[str, Any]] = LAYOUT, **more: Any) -> controller_events.AttemptStarted:
    return controller_events.AttemptStarted(
        attempt=number, world_size=4, master_addr="10.0.0.1", master_port=29500, nodes=layout, **more
    )


def told(state: RunState, *written: controller_events.ControllerEvent, at: float = 100.0) -> RunState:
    for event in written:
        state = apply_controller_event(state, at, event)
    return state


def wrote(state: RunState, node: str, *written: node_events.Event) -> RunState:
    for event in written:
        known = state.nodes.get(node) or state.retired[node]
        state = apply_node_event(state, node, node_events.Stamp(known.seq + 1, 0.0, 0.0, f"boot of {node}"), event)
    return state


def started(rank: int, number: int = 0) -> node_events.Started:
    return node_events.Started(attempt=number, rank=rank, local_rank=rank % 2, pid=70 + rank, start_time=1000 + rank)


def exited(rank: int, **how: Any) -> node_events.Exited:
    return node_events.Exited(attempt=0, rank=rank, **how)


CREATED = controller_events.RunCreated(run="r-1", name="r", path="/c.yaml")
BEGUN = told(told(RunState(), CREATED, at=60.0), attempt())
PREPARED = wrote(wrote(BEGUN, "n0", node_events.Prepared(0)), "n1", node_events.Prepared(0))
RUNNING = wrote(wrote(PREPARED, "n0", started(0), started(1)), "n1", started(2), started(3))


def shown(state: RunState) -> dict[str, Any]:
    """What `status --json` says of it, but for its times, its origin, its goodput, and its attempts (`attempts_of`)."""
    value = cast("dict[str, Any]", json.loads(json.dumps(status_json(RunSnapshot(state=state, has_controller=True)))))
    others = ("attempts", "started", "ended", "origin", "start", "goodput")
    return {key: said for key, said in value.items() if key not in others}


def attempts_of(state: RunState) -> list[dict[str, Any]]:
    return cast("list[dict[str, Any]]", status_json(RunSnapshot(state=state, has_controller=True))["attempts"])


NOTHING_YET = {
    "name": "", "state": "starting", "attended": True, "attempt": -1, "exit_code": None, "cause": None, "health": [],
    "idle_since": None, "stall": None, "results": None, "remaining": [], "nodes": [], "workers": [],
    "warnings": [],
}  # fmt: skip


def worker(rank: int, **changes: Any) -> dict[str, Any]:
    return {
        "rank": rank, "local_rank": rank % 2, "node": f"n{rank // 2}", "pid": None, "state": "pending",
        "exit_code": None, "signal": None, "stopped": False, "step": None, "last_output_s": None, "slow": None,
        **changes,
    }  # fmt: skip


def node(number: int, state: str) -> dict[str, Any]:
    address = f"10.0.0.{number + 1}"
    return {
        "node": f"n{number}",
        "node_rank": number,
        "address": address,
        "python": None,
        "image": None,
        "role": None,
        "state": state,
    }
