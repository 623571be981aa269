"""Finding every process of a run, and ending it. Never by name, never by parent, never what another run owns."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from clusterctl.agent.linux import cgroup, helper_process, proc
from clusterctl.agent.linux.proc import ProcessIdentity, ProcessStat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.protocol.process_types import LeftoverProcess, SurvivingProcess

_ROOT = 0
_QUERY_TIMEOUT_S, _ALL_QUERIES_TIMEOUT_S = 1.0, 5.0
"""How long the look at one process, and at all that are left, may take. A process that is stuck in a driver or in an
exec keeps its memory and more locked, and whoever reads the wrong file of it in `/proc` waits with it."""

_MAX_COMMANDS = 256
"""Of so many survivors the command line is told; of thousands that a dead mount holds all have to fit in one event."""

T = TypeVar("T")


@dataclass
class KnownProcesses:
    """Who is known to belong to the run, and who must not be touched.

    Attributes:
        workers: Each worker, and the ticks at which it was seen gone (`None` while it lives).
        found: Processes that an earlier look found.
        ours: Supervisor and waiters.
        strangers: Processes of our user that carry no mark. None comes to one later: all are there from birth.
        forged: Processes of another user that carry the tag and nothing else of the run; anybody can set it.
        silent: Pids at which a look has hung; nobody looks there again.
        unasked: The last look came to no end, for lack of time.
        stop_signal: What asks a process to end.
        cgroup: Folder of the run's own cgroup, or `None`.
    """

    workers: dict[ProcessIdentity, int | None] = field(default_factory=dict)
    processes: set[ProcessIdentity] = field(default_factory=set)
    protected: set[ProcessIdentity] = field(default_factory=set)
    unrelated: set[ProcessIdentity] = field(default_factory=set)
    foreign_tagged: set[ProcessIdentity] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    is_scan_incomplete: bool = False
    stop_signal: int = signal.SIGTERM
    cgroup: str | None = None

    @property
    def earliest_start_ticks(self) -> int:
        """Ticks before which no process of the attempt can have started: all come of a worker."""
        return min((worker.start_time for worker in self.workers), default=0)


def find_run_processes(markers: RunMarkers, known_processes: KnownProcesses) -> list[ProcessStat]:
    """Return every process of the run on this node that has not ended, and remember it in the ledger.

    One that changed its user may be beyond our signals; it is of the run nevertheless, and has to be named.
    """
    pids = [pid for pid in proc.list_pids() if pid not in known_processes.unreadable and pid != os.getpid()]
    answers, stuck = _query_processes(
        pids, functools.partial(classify_process, markers, known_processes, cgroup.list_members(known_processes.cgroup))
    )
    known_processes.unreadable |= stuck
    known_processes.is_scan_incomplete = len(answers) + len(stuck) < len(pids)
    result = [ProcessStat(**answer["member"]) for answer in answers.values() if "member" in answer]
    known_processes.unrelated.update(
        ProcessIdentity(pid, answer["unrelated"]) for pid, answer in answers.items() if "unrelated" in answer
    )
    known_processes.foreign_tagged.update(
        ProcessIdentity(pid, answer["foreign"]) for pid, answer in answers.items() if "foreign" in answer
    )
    known_processes.processes.update(process.identity for process in result)
    return result


def list_known_processes(known_processes: KnownProcesses) -> list[ProcessStat]:
    """Return the processes that are known already and have not ended, without looking at any other."""
    stats = (
        proc.read_stat(who.pid)
        for who in (*known_processes.workers, *(known_processes.processes - known_processes.workers.keys()))
    )
    return [
        process
        for process in stats
        if process is not None and not process.is_gone and _is_known(process, known_processes)
    ]


def classify_process(
    markers: RunMarkers, known_processes: KnownProcesses, inside: set[int], pid: int
) -> dict[str, Any]:
    """Say whether a process is a `member` of the run, a `stranger` for good, `forged`, or nothing in particular."""
    process = proc.read_stat(pid)
    if (
        process is None
        or process.is_gone
        or process.is_kernel_thread
        or process.identity in known_processes.protected
        or pid == os.getpid()
    ):
        return {}
    if pid in inside or _is_known(process, known_processes) or _in_session(process, known_processes):
        return {"member": vars(process)}
    if markers.has_tag(pid):
        # Anybody can copy the tag, but nobody of another user can come of a process of ours without being of the run.
        ours = proc.read_uid(pid) == markers.uid or _descends_from_run(markers, known_processes, process)
        return {"member": vars(process)} if ours else {"foreign": process.start_time}
    # What follows can be copied by a process of somebody else, so its user must be ours, and its time.
    if (
        process.start_time < known_processes.earliest_start_ticks
        or process.identity in known_processes.unrelated
        or proc.read_uid(pid) != markers.uid
    ):
        return {}
    named = markers.has_run_environment(pid)
    if named or proc.has_output_open(pid, markers.run_dir):
        return {"member": vars(process)}
    return {} if named is None else {"unrelated": process.start_time}


def _is_known(process: ProcessStat, known_processes: KnownProcesses) -> bool:
    return process.identity in known_processes.workers or process.identity in known_processes.processes


def _in_session(process: ProcessStat, known_processes: KnownProcesses) -> bool:
    """Whether a process is in the POSIX session of one of the workers.

    The pid of a worker that has ended may be used again, by a new session too: so only who was there before its end
    counts once it has ended. (Who came later carries other marks.)
    """
    for worker, ended in known_processes.workers.items():
        # A worker of another boot has the pid 0, and 0 is the session of whoever never was given one.
        if worker.pid and process.sid == worker.pid and process.start_time >= worker.start_time:
            return process.start_time <= ended if ended is not None else proc.is_alive(worker)
    return False


def _descends_from_run(markers: RunMarkers, known_processes: KnownProcesses, process: ProcessStat) -> bool:
    """Whether a process descends from one that is known, or from one of our user that carries the tag.

    Sessions and parents are handed on by the kernel, so they cannot be copied. Orphans of the run are children of its
    supervisor.
    """
    todo, seen = [process], {process.pid}
    while todo:
        one = todo.pop()
        of_us = (
            one.identity in known_processes.protected
            or _is_known(one, known_processes)
            or _in_session(one, known_processes)
        )
        if of_us or (markers.has_tag(one.pid) and proc.read_uid(one.pid) == markers.uid):
            return True
        before = (proc.read_stat(pid) for pid in {one.ppid, one.sid} - seen - {0, 1})
        seen |= {one.ppid, one.sid}
        # A pid that was given out again is nobody's parent.
        todo += [each for each in before if each is not None and each.start_time <= one.start_time]
    return False


def _query_processes(pids: list[int], question: Callable[[int], T]) -> tuple[dict[int, T], set[int]]:
    """Look at processes in a fork; return what was seen of each, and at which the look hangs.

    Some may be in neither, for lack of time.
    """
    looks: dict[int, T] = {}
    stuck: set[int] = set()
    deadline = time.monotonic() + _ALL_QUERIES_TIMEOUT_S
    while pids and time.monotonic() < deadline:
        try:
            answers = helper_process.run_in_helper(functools.partial(_query_each, pids, question), _QUERY_TIMEOUT_S)
        except OSError:
            # Not even a process is to be had: better to look here than not at all.
            return {**looks, **{pid: question(pid) for pid in pids}}, stuck
        seen = [answer["seen"] for answer in answers if "seen" in answer]
        looks.update(zip(pids, seen))
        stuck.update(pids[len(seen) : len(seen) + 1])
        pids = pids[len(seen) + 1 :]
    return looks, stuck


def _query_each(pids: list[int], question: Callable[[int], Any], out: HelperOutput) -> dict[str, Any]:
    for pid in pids:
        out.message({"seen": question(pid)})
    return {}


# --- ending


def terminate_groups(processes: list[ProcessStat], signalled: set[int], known_processes: KnownProcesses) -> None:
    """Send the stop signal and SIGCONT to the processes and their groups, to each group once.

    A stopped process acts on it only once it is continued. Groups whose leader has ended are reached as well.
    """
    ours = _list_protected_groups(known_processes)
    targets = {process.pgid if process.pgid not in ours else -process.pid for process in processes} - signalled
    for target in targets:
        signalled.add(target)
        for number in (known_processes.stop_signal, signal.SIGCONT):
            _send_signal(target, number)


def kill_processes(processes: list[ProcessStat], known_processes: KnownProcesses) -> None:
    """Send SIGKILL to the processes, their groups and their cgroup."""
    cgroup.kill_members(known_processes.cgroup)
    for group in {process.pgid for process in processes} - _list_protected_groups(known_processes):
        _send_signal(group, signal.SIGKILL)
    for process in processes:
        if proc.read_identity(process.pid) == process.identity:
            _send_signal(-process.pid, signal.SIGKILL)


def _list_protected_groups(known_processes: KnownProcesses) -> set[int]:
    """Return the process groups that hold one of us, and those that are none: 0 would be our own, 1 everybody."""
    guardians = (proc.read_stat(who.pid) for who in known_processes.protected)
    return {
        0,
        1,
        os.getpgrp(),
        *(
            guardian.pgid
            for guardian in guardians
            if guardian is not None and guardian.identity in known_processes.protected
        ),
    }


def _send_signal(target: int, number: int) -> None:
    """Signal a process group, or, by its negative pid, one process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if target < 0:
            os.kill(-target, number)
        else:
            os.killpg(target, number)


def describe_survivors(survivors: list[ProcessStat]) -> list[SurvivingProcess]:
    """Return survivors and why they are still there: `{pid, start_time, command, why}` of each.

    Behind the first few hundred the name of the process stands for its command.
    """
    commands, _ = _query_processes([process.pid for process in survivors[:_MAX_COMMANDS]], proc.read_command)
    return [
        {
            "pid": process.pid,
            "start_time": process.start_time,
            "command": commands.get(process.pid) or f"[{process.comm}]",
            "why": _explain_survival(process),
        }
        for process in survivors
    ]


_HELPER_COMMANDS = re.compile(
    r"multiprocessing\.(?:resource_tracker|semaphore_tracker|forkserver)|torch_shm_manager|_inductor[./]compile_worker"
    r"|(?:^|/)(?:wandb-core|wandb-service|gpu_stats|tensorboard|nvidia-smi|dcgmi|rocm-smi|amd-smi)\b"
)
"""Command lines of what libraries start for themselves and of what only looks on: it may outlive a rank."""
_MAX_LEFTOVERS = 64


def describe_leftovers(processes: list[ProcessStat], ranks: Mapping[int, int]) -> list[LeftoverProcess]:
    """Return what is still there and no helper of a library; `ranks` by the POSIX session of their first process."""
    now = proc.convert_to_ticks(time.monotonic())
    seen, _ = _query_processes([process.pid for process in processes[:_MAX_LEFTOVERS]], _read_command_and_rank)
    return [
        {
            "pid": process.pid,
            "rank": ranks.get(process.sid, rank),
            "command": command,
            "age_s": round(max(0.0, (now - process.start_time) / proc.TICKS_PER_SECOND), 1),
        }
        for process in processes[:_MAX_LEFTOVERS]
        for command, rank in [seen.get(process.pid) or (f"[{process.comm}]", None)]
        if not _HELPER_COMMANDS.search(command)
    ]


def _read_command_and_rank(pid: int) -> tuple[str, int | None]:
    rank = proc.read_environment(pid).get(b"RANK", b"")
    return proc.read_command(pid), int(rank) if rank.isdigit() and len(rank) < 8 else None


def _explain_survival(process: ProcessStat) -> str:
    now = proc.read_stat(process.pid) or process
    if now.state == "D":
        place = proc.read_wait_channel(process.pid)
        return "in an uninterruptible wait" + (f" in {place}" if place else "")
    if proc.read_uid(process.pid) not in (os.getuid(), None) and os.getuid() != _ROOT:
        return "belongs to another user"
    if proc.is_exiting(now):
        return "killed, the kernel has not finished ending it"
    return f"still there after SIGKILL, state {now.state}"
