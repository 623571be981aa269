"""A run that has ended, in outline: what lists show of it, in a small file, so that many of them cost next to nothing.

The file goes with the journal of the controller as it was; where that has grown since, the outline counts for nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.run.rules.outcome import find_final_cause
from clusterctl.run.rules.state import NodeState, RunPhase, RunState, cause_from_json, cause_to_json

if TYPE_CHECKING:
    from pathlib import Path

_FIELDS = ("run", "name", "path", "attempt", "world_size", "created", "ended", "exit_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What lists show of a run that has ended.

    Attributes:
        state: Its state without workers, and of its nodes the names alone; what ended it stands as `no_exit`.
        step: What its slowest rank had reached, or `None`.
    """

    state: RunState
    step: int | None = None


def encode(state: RunState, step: int | None, events: Path) -> bytes:
    """Return the file of a run that has ended; `events` is the journal of its controller."""
    value = {field: getattr(state, field) for field in _FIELDS}
    value |= {"phase": state.phase.value, "nodes": list(state.nodes), "step": step, "events": os.stat(events).st_size}
    value["remaining"] = list(state.remaining)
    value["cause"] = cause_to_json(find_final_cause(state))
    return json.dumps(value).encode()


def read(path: Path, events: Path) -> Outline | None:
    """Return the outline of a run, or `None` where there is none that holds."""
    try:
        value = json.loads(path.read_bytes())
        if value["events"] != os.stat(events).st_size:
            return None
        nodes = {name: NodeState(node=name, node_rank=place) for place, name in enumerate(value["nodes"])}
        kept = {field: value[field] for field in _FIELDS}
        cause = cause_from_json(value["cause"])
        left = tuple(value["remaining"])
        state = RunState(phase=RunPhase(value["phase"]), nodes=nodes, external_cause=cause, remaining=left, **kept)
        return Outline(state=state, step=value["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
