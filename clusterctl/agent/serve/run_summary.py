"""The state of a run on this node, from its files and from `/proc`."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from clusterctl.agent.linux import cgroup, proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.node_state import fencing, journal
from clusterctl.agent.node_state.journal import JournalState, fold_journal
from clusterctl.agent.processes import run_processes
from clusterctl.agent.supervisor import workers

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.command_payload_types import RunSummary, WorkerState
    from clusterctl.agent.protocol.record_types import SurvivingProcess


def list_survivors(state: JournalState) -> list[SurvivingProcess]:
    """Return the processes that SIGKILL did not end and that still live, according to the journal and `/proc`."""
    if state.swept is None or state.boot_id != proc.read_boot_id():
        return []
    return [each for each in state.swept.remaining if proc.is_alive(ProcessIdentity(each["pid"], each["start_time"]))]


def has_supervisor(run: RunDir) -> bool:
    """Return whether a supervisor of the run is alive."""
    return run_processes.find_supervisor(run) is not None


def list_workers(run: RunDir, state: JournalState) -> list[WorkerState]:
    """Return the workers of the newest attempt, from the journal and the spawn files."""
    ranks, _ = workers.read_start_record(run, state) or ([], None)
    states: list[WorkerState] = []
    for rank, local_rank in ranks:
        worker = workers.read_worker(run, state, rank, local_rank)
        if worker is not None:
            who = worker.identity
            states.append(
                {
                    "rank": rank,
                    "local_rank": local_rank,
                    "pid": who.pid,
                    "start_time": who.start_time,
                    "alive": proc.is_alive(who),
                }
            )
    return states


def find_remaining_processes(run: RunDir, state: JournalState) -> list[proc.ProcessStat]:
    """Return all living processes of the run on this node, except its supervisor and waiters."""
    if state.seq and state.boot_id != proc.read_boot_id():
        return []
    return run_processes.find_run_processes(run_processes.make_run_markers(run), collect_known_processes(run, state))


def collect_known_processes(run: RunDir, state: JournalState) -> run_processes.KnownProcesses:
    """Return the workers of the newest attempt, and the supervisor and waiters as protected processes."""
    _, group = workers.read_start_record(run, state) or ([], None)
    known_processes = run_processes.KnownProcesses(
        protected=run_processes.list_supervisor_and_waiters(run),
        cgroup=group if cgroup.list_members(group) else None,
    )
    known_processes.stop_signal = signal.Signals[
        (syscalls.read_json(run.prepare_file) or {}).get("stop_signal", "SIGTERM")
    ]
    for worker in list_workers(run, state):
        # The exit time of an ended worker is unknown, so use the start time: later processes may not belong to its
        # session.
        ended = None if worker["alive"] else worker["start_time"]
        known_processes.workers[ProcessIdentity(worker["pid"], worker["start_time"])] = ended
    return known_processes


def summarize_run(run: RunDir, state: JournalState | None = None) -> RunSummary:
    """Return the entry of a run in the list of runs; by default, read the state of the run from the journal."""
    state = state or fold_journal(journal.read_journal(run.journal_file))
    prepared = syscalls.read_json(run.prepare_file) or {}
    is_over = state.phase in ("new", "swept", "finished")
    is_live = has_supervisor(run) or any(worker["alive"] for worker in list_workers(run, state))
    # A process of the run may live although its supervisor, waiters and workers were all killed.
    is_live = is_live or (not is_over and bool(find_remaining_processes(run, state)))
    return {
        "run": run.run,
        "node": run.node,
        "name": prepared.get("name", ""),
        "live": is_live and not is_over,
        "supervisor": has_supervisor(run),
        "state": state.phase,
        "epoch": fencing.read_epoch(run.epoch_file),
        "attempt": state.attempt,
        "workdir": prepared.get("workdir"),
        "grace": prepared.get("grace"),
        "gpus": prepared.get("gpus", []),
        "started": state.began_at,
        "finished": state.ended_at,
        "remaining": list_survivors(state),
    }
