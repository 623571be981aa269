"""What there is to know of a run on this node, from its files and from `/proc`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from clusterctl.agent.linux import cgroup, proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.processes import run_markers, run_processes, supervisor_lookup
from clusterctl.agent.record import authority, journal
from clusterctl.agent.record.state import NodeState, fold
from clusterctl.agent.supervisor import adoption

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_types import RunSummary, WorkerState
    from clusterctl.agent.protocol.process_types import SurvivingProcess
    from clusterctl.agent.record.rundir import RunDir


def list_survivors(state: NodeState) -> list[SurvivingProcess]:
    """Return what could not be ended and is still there: what the kernel held may have gone since."""
    if state.swept is None or state.boot != proc.read_boot_id():
        return []
    return [one for one in state.swept.remaining if proc.is_alive(ProcessIdentity(one["pid"], one["start_time"]))]


def has_supervisor(run: RunDir) -> bool:
    """Whether a supervisor of the run is there."""
    return supervisor_lookup.find_supervisor(run) is not None


def list_workers(run: RunDir, state: NodeState) -> list[WorkerState]:
    """Return the workers of the newest attempt, those too that nobody wrote down in the journal."""
    started = adoption.started(run, state)
    workers: list[WorkerState] = []
    for rank, local_rank in started.places if started is not None else []:
        worker = adoption.worker(run, state, rank, local_rank)
        if worker is not None:
            who = worker.identity
            workers.append(
                {
                    "rank": rank,
                    "local_rank": local_rank,
                    "pid": who.pid,
                    "start_time": who.start_time,
                    "alive": proc.is_alive(who),
                }
            )
    return workers


def find_remaining_processes(run: RunDir, state: NodeState) -> list[proc.ProcessStat]:
    """Return every process of the run on this node, its waiters apart."""
    if state.seq and state.boot != proc.read_boot_id():
        return []
    return run_processes.find_run_processes(run_markers.make_run_markers(run), collect_known_processes(run, state))


def collect_known_processes(run: RunDir, state: NodeState) -> run_processes.KnownProcesses:
    """Return who is known to belong to the newest attempt of a run, and who guards it."""
    started = adoption.started(run, state)
    group = None if started is None else started.cgroup
    known_processes = run_processes.KnownProcesses(
        protected=supervisor_lookup.list_supervisor_and_waiters(run),
        cgroup=group if cgroup.list_members(group) else None,
    )
    known_processes.stop_signal = signal.Signals[(syscalls.read_json(run.prepare) or {}).get("stop_signal", "SIGTERM")]
    for worker in list_workers(run, state):
        # Of one that has ended nobody knows when: only who was there with it at its start counts as of its session.
        ended = None if worker["alive"] else worker["start_time"]
        known_processes.workers[ProcessIdentity(worker["pid"], worker["start_time"])] = ended
    return known_processes


def summarize_run(run: RunDir, state: NodeState | None = None) -> RunSummary:
    """Return what there is to know of a run for a list; `state` is what its journal says, read here by default."""
    state = state or fold(journal.read(run.journal))
    prepared = syscalls.read_json(run.prepare) or {}
    is_over = state.state in ("new", "swept", "finished")
    is_live = has_supervisor(run) or any(worker["alive"] for worker in list_workers(run, state))
    # What a worker left behind lives on where supervisor, waiters and workers were all killed.
    is_live = is_live or (not is_over and bool(find_remaining_processes(run, state)))
    return {
        "run": run.run,
        "node": run.node,
        "name": prepared.get("name", ""),
        "live": is_live and not is_over,
        "supervisor": has_supervisor(run),
        "state": state.state,
        "epoch": authority.current(run.epoch),
        "attempt": state.attempt,
        "workdir": prepared.get("workdir"),
        "grace": prepared.get("grace"),
        "gpus": prepared.get("gpus", []),
        "started": state.began,
        "finished": state.ended,
        "remaining": list_survivors(state),
    }
