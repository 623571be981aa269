"""What an earlier supervisor of the run wrote about its attempt: the prepared request, the start and the workers.

The journal alone is enough to end an attempt. The other files may be missing or empty after a power loss or a clean-up.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import syscalls
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import dataclass_json, frames, requests
from clusterctl.agent.supervisor import workers

if TYPE_CHECKING:
    from clusterctl.agent.node_state.journal import NodeState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.supervisor.workers import Worker


@dataclass(frozen=True)
class StartRecord:
    """What an attempt started on this node.

    Attributes:
        ranks: Rank and local rank of each worker.
        cgroup: The folder of the run's own cgroup, or `None`.
    """

    ranks: list[list[int]]
    cgroup: str | None = None


def read_prepare(run: RunDir, state: NodeState) -> tuple[requests.Prepare, str]:
    """Return the `Prepare` of the newest attempt and its interpreter, which is "" if no worker can start any more."""
    stored = syscalls.read_json(run.prepare) or {}
    try:
        prepare = dataclass_json.parse_dataclass(requests.Prepare, stored)
    except frames.FrameError:
        prepare = requests.Prepare(run.run, run.node, -1, workdir="/", health_seconds=0.0)
    if prepare.attempt == state.attempt:
        return prepare, str(stored.get("interpreter", ""))
    return dataclasses.replace(prepare, attempt=state.attempt, ranks=sorted(state.started)), ""


def read_start_record(run: RunDir, state: NodeState) -> StartRecord | None:
    """Return what the newest attempt started, or `None` if it did not get so far."""
    stored = syscalls.read_json(run.start(state.attempt))
    if stored is not None:
        return StartRecord(stored["workers"], stored.get("cgroup"))
    places = [[event.rank, event.local_rank] for event in state.started.values()]
    return StartRecord(places) if places else None


def read_worker(run: RunDir, state: NodeState, rank: int, local_rank: int) -> Worker | None:
    """Return a worker from its spawn file or else from the journal; `None` if it was never started."""
    spawned = run_dir.read_spawn_record(run.of_rank(state.attempt, rank, "spawn"))
    event = state.started.get(rank)
    if spawned is None and event is not None:
        spawned = {"pid": event.pid, "start_time": event.start_time, "boot": state.start_boots[rank]}
    return None if spawned is None else workers.make_worker(rank, local_rank, spawned)


def write_prepare(run: RunDir, prepare: requests.Prepare, interpreter: str) -> None:
    """Write the `Prepare` of an attempt and its interpreter.

    Raises:
        OSError: No space, or not writable.
    """
    value: dict[str, Any] = {**asdict(prepare), "interpreter": interpreter}
    syscalls.write_json(run.prepare, value)
