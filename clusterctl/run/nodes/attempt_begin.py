"""The begin of an attempt, as the controller's journal has it: from its plan, or from the plan as it was kept."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from clusterctl.run.rules import controller_events

if TYPE_CHECKING:
    from clusterctl.plan.launch import LaunchPlan
    from clusterctl.run.nodes.checkpoints import Checkpoint
    from clusterctl.run.record.rundir import RunDir

_PLACE = ("node", "node_rank", "address")


def from_plan(
    plan: LaunchPlan, why: str, resume_from: str | None, newest: Checkpoint | None
) -> controller_events.Attempt:
    """Return the event that announces an attempt: why there is a new one, and what checkpoints there are for it."""
    return controller_events.Attempt(
        attempt=plan.attempt,
        world_size=plan.world_size or 0,
        master_addr=plan.master_addr,
        master_port=plan.master_port,
        nodes=[
            {"node": n.node, "node_rank": n.node_rank, "address": n.address, "ranks": list(n.ranks)} for n in plan.nodes
        ],
        why=why,
        resume_from=resume_from,
        newest_checkpoint=None if newest is None else newest.label,
    )


def stored(run: RunDir, number: int) -> controller_events.Attempt | None:
    """Return the event of an attempt whose plan was kept; `None` where that is not there or not whole.

    A plan lies on the disk before any of its workers is started.
    """
    try:
        plan = json.loads(run.plan(number).read_text())
        return controller_events.Attempt(
            attempt=number,
            world_size=plan["world_size"],
            master_addr=plan["master_addr"],
            master_port=plan["master_port"],
            nodes=[
                {**{key: node[key] for key in _PLACE}, "ranks": [worker["rank"] for worker in node["workers"]]}
                for node in plan["nodes"]
            ],
            resume_from=plan["nodes"][0]["workers"][0]["env"].get("CLUSTERCTL_RESUME_FROM"),
        )
    except (OSError, ValueError, LookupError, TypeError):
        return None
