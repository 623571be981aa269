"""Finds all processes of a run by markers, and ends them.

The name and the parent of a process do not matter. Processes of other runs are never signalled.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import hashlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from clusterctl.agent.linux import cgroup, helper_process, proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity, ProcessStat
from clusterctl.agent.linux.spawn import encode_text
from clusterctl.agent.node_state import run_dir, supervisor_lock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.record_types import LeftoverProcess, SurvivingProcess

_ROOT = 0
_QUERY_TIMEOUT_S, _ALL_QUERIES_TIMEOUT_S = 1.0, 5.0
"""Timeouts in seconds for the query of one process and of all processes. While a process is stuck in a driver or in an
exec, its memory is locked, and reads of some of its `/proc` files hang.
"""

_MAX_COMMANDS = 256
"""Maximum number of survivors that are described with a command line, because thousands must fit into one event."""

T = TypeVar("T")


@dataclass(frozen=True)
class RunMarkers:
    """Markers that distinguish the processes of one run on one node from all others.

    Attributes:
        run_id: Value of CLUSTERCTL_RUN_ID.
        node_name: Value of CLUSTERCTL_NODE.
        tag: Value of a resource limit that Linux does not enforce. The limit survives setsid, a double fork and a
            cleared environment.
        uid: User id of the processes.
    """

    run_id: bytes
    node_name: bytes
    tag: int
    uid: int

    def environment(self) -> dict[bytes, bytes]:
        """Return the markers that are environment variables."""
        return {b"CLUSTERCTL_RUN_ID": self.run_id, b"CLUSTERCTL_NODE": self.node_name}

    def has_tag(self, pid: int) -> bool:
        """Return whether a process has the tag of the run."""
        return proc.has_resource_limit(pid, self.tag)

    def has_run_environment(self, pid: int) -> bool | None:
        """Return whether the environment of a process names the run and the node; `None` if it cannot be read.

        Call this function in a child process, because the read may hang.
        """
        environ = proc.read_environment(pid)
        return self.environment().items() <= environ.items() if environ else None


def make_run_markers(run: RunDir) -> RunMarkers:
    """Return the markers of a run on this node."""
    digest = hashlib.sha256(b"tag" + run.key.encode()).digest()
    # Bit 60 makes the tag larger than any limit that a person would set, and keeps it below RLIM_INFINITY.
    tag = int.from_bytes(digest[:7], "big") | 1 << 60
    return RunMarkers(encode_text(run.run), encode_text(run.node), tag, os.getuid())


@dataclass
class KnownProcesses:
    """Processes that are known to belong to a run, and processes that must not be signalled.

    Attributes:
        workers: Each worker, with the clock ticks at which its end was noticed (`None` while it lives).
        processes: Processes of the run that an earlier scan found.
        protected: Supervisor and waiters, which must not be signalled.
        unrelated: Processes of this user that do not belong to the run and never will, because only a fork passes on
            the markers.
        unreadable: Pids whose query timed out; no later scan queries them.
        is_scan_incomplete: Whether the last scan timed out before it had queried all processes.
        stop_signal: The signal that asks a process to end.
        cgroup: Folder of the cgroup of the run, or `None`.
    """

    workers: dict[ProcessIdentity, int | None] = field(default_factory=dict)
    processes: set[ProcessIdentity] = field(default_factory=set)
    protected: set[ProcessIdentity] = field(default_factory=set)
    unrelated: set[ProcessIdentity] = field(default_factory=set)
    unreadable: set[int] = field(default_factory=set)
    is_scan_incomplete: bool = False
    stop_signal: int = signal.SIGTERM
    cgroup: str | None = None

    @property
    def earliest_start_ticks(self) -> int:
        """Start of the first worker in clock ticks; no process of the attempt is older, as all descend from workers."""
        return min((worker.start_time for worker in self.workers), default=0)


def find_run_processes(markers: RunMarkers, known_processes: KnownProcesses) -> list[ProcessStat]:
    """Return all living processes of the run on this node, and add them to `known_processes`.

    The result contains processes of other users if a known process has changed its user id.
    """
    pids = [pid for pid in proc.list_pids() if pid not in known_processes.unreadable and pid != os.getpid()]
    answers, stuck = _query_processes(
        pids, functools.partial(classify_process, markers, known_processes, cgroup.list_members(known_processes.cgroup))
    )
    known_processes.unreadable |= stuck
    known_processes.is_scan_incomplete = len(answers) + len(stuck) < len(pids)
    result = [ProcessStat(**answer["member"]) for answer in answers.values() if "member" in answer]
    known_processes.unrelated |= {
        ProcessIdentity(pid, answer["unrelated"]) for pid, answer in answers.items() if "unrelated" in answer
    }
    known_processes.processes.update(process.identity for process in result)
    return result


def list_known_processes(known_processes: KnownProcesses) -> list[ProcessStat]:
    """Return the living processes among `known_processes`, without a scan of all processes."""
    identities = dict.fromkeys((*known_processes.workers, *known_processes.processes))
    stats = (proc.read_stat(who.pid) for who in identities)
    return [stat for stat in stats if stat is not None and not stat.is_gone and _is_member(stat, known_processes)]


def classify_process(
    markers: RunMarkers, known_processes: KnownProcesses, cgroup_pids: set[int], pid: int
) -> dict[str, Any]:
    """Return whether a process belongs to a run.

    Args:
        markers: Markers of the run.
        known_processes: Processes that are known already.
        cgroup_pids: Pids in the cgroup of the run.
        pid: The process.

    Returns:
        `{"member": fields of its ProcessStat}`, `{"unrelated": its start time}`, or `{}` if this is unknown or may
        change.
    """
    process = proc.read_stat(pid)
    if (
        process is None
        or process.is_gone
        or process.is_kernel_thread
        or process.identity in known_processes.protected
        or pid == os.getpid()
    ):
        return {}
    if pid in cgroup_pids or _is_member(process, known_processes) or _in_session(process, known_processes):
        return {"member": vars(process)}
    has_tag = markers.has_tag(pid)
    is_unrelated = (
        process.start_time < known_processes.earliest_start_ticks or process.identity in known_processes.unrelated
    )
    # Any user can copy tag and environment of the run, so ignore processes of other users.
    if (is_unrelated and not has_tag) or proc.read_uid(pid) != markers.uid:
        return {}
    is_marked = has_tag or markers.has_run_environment(pid)
    if is_marked:
        return {"member": vars(process)}
    return {} if is_marked is None else {"unrelated": process.start_time}


def _is_member(process: ProcessStat, known_processes: KnownProcesses) -> bool:
    return process.identity in known_processes.workers or process.identity in known_processes.processes


def _in_session(process: ProcessStat, known_processes: KnownProcesses) -> bool:
    """Return whether a process is in the POSIX session of a worker.

    After the end of a worker, another program may get the worker's pid and start a session with this number. A process
    that started after the worker's end therefore does not count as a member of the session.
    """
    for worker, ended in known_processes.workers.items():
        # A worker from before a reboot has the pid 0, and 0 is also the session id of processes without a session.
        if worker.pid and process.sid == worker.pid and process.start_time >= worker.start_time:
            return process.start_time <= ended if ended is not None else proc.is_alive(worker)
    return False


def _query_processes(pids: list[int], question: Callable[[int], T]) -> tuple[dict[int, T], set[int]]:
    """Query processes in a helper process; return the answers by pid, and the pids whose query timed out.

    Pids that were not queried in time are in neither result.
    """
    answers: dict[int, T] = {}
    stuck: set[int] = set()
    deadline = time.monotonic() + _ALL_QUERIES_TIMEOUT_S

    def query(out: HelperOutput) -> dict[str, Any]:
        for pid in pids:
            out.send_message({"answer": question(pid)})
        return {}

    while pids and time.monotonic() < deadline:
        try:
            messages = helper_process.run_in_helper(query, _QUERY_TIMEOUT_S)
        except OSError:
            # The machine cannot start another process, so query the processes in this process.
            return {**answers, **{pid: question(pid) for pid in pids}}, stuck
        new = [message["answer"] for message in messages if "answer" in message]
        answers.update(zip(pids, new))
        stuck.update(pids[len(new) : len(new) + 1])
        pids = pids[len(new) + 1 :]
    return answers, stuck


# --- supervisor and waiters


def find_supervisor(run: RunDir) -> ProcessIdentity | None:
    """Return the supervisor process of a run, or `None`."""
    try:
        sock = supervisor_lock.connect_to_supervisor(run)
    except BlockingIOError:
        pid = supervisor_lock.find_lock_owner(run)
        return None if pid is None else proc.read_identity(pid)
    if sock is None:
        return None
    with sock:
        pid, uid = syscalls.read_peer_credentials(sock)
    return proc.read_identity(pid) if uid == os.getuid() else None


def list_waiters(run: RunDir) -> set[ProcessIdentity]:
    """Return the waiter processes of all attempts of a run."""
    identities = set()
    for path in glob.glob(os.path.join(glob.escape(run.path), "attempt-*", "rank-*.spawn")):
        spawned = run_dir.read_spawn_record(path)
        if spawned is not None:
            with contextlib.suppress(KeyError):
                identities.add(ProcessIdentity(spawned["waiter_pid"], spawned["waiter_start_time"]))
    return identities


def list_supervisor_and_waiters(run: RunDir) -> set[ProcessIdentity]:
    """Return the supervisor of a run and the waiters of all its attempts."""
    who = find_supervisor(run)
    return list_waiters(run) | ({who} if who is not None else set())


# --- ending


def terminate_groups(processes: list[ProcessStat], signalled: set[int], known_processes: KnownProcesses) -> None:
    """Send the stop signal and SIGCONT once to the process groups of processes; add the groups to `signalled`.

    A stopped process handles the signal only after SIGCONT.
    """
    ours = _list_protected_groups(known_processes)
    targets = {process.pgid if process.pgid not in ours else -process.pid for process in processes} - signalled
    for target in targets:
        signalled.add(target)
        for number in (known_processes.stop_signal, signal.SIGCONT):
            _send_signal(target, number)


def kill_processes(processes: list[ProcessStat], known_processes: KnownProcesses) -> None:
    """Send SIGKILL to the processes, to their process groups, and to the cgroup of the run."""
    cgroup.kill_members(known_processes.cgroup)
    for group in {process.pgid for process in processes} - _list_protected_groups(known_processes):
        _send_signal(group, signal.SIGKILL)
    for process in processes:
        if proc.read_identity(process.pid) == process.identity:
            _send_signal(-process.pid, signal.SIGKILL)


def _list_protected_groups(known_processes: KnownProcesses) -> set[int]:
    """Return the process groups that must not be signalled: those of protected processes and of this process.

    The groups 0 and 1 are also in the result, because `killpg` would signal other processes with these numbers.
    """
    stats = (proc.read_stat(who.pid) for who in known_processes.protected)
    groups = {stat.pgid for stat in stats if stat is not None and stat.identity in known_processes.protected}
    return {0, 1, os.getpgrp(), *groups}


def _send_signal(target: int, number: int) -> None:
    """Signal a process group, or one process if `target` is negative."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if target < 0:
            os.kill(-target, number)
        else:
            os.killpg(target, number)


def describe_survivors(survivors: list[ProcessStat]) -> list[SurvivingProcess]:
    """Describe processes that SIGKILL has not ended, each with the reason.

    For all but the first 256, `command` is only the name of the process.
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
"""Command lines of helpers of libraries and of monitoring tools, which normally end later than their rank."""
_MAX_LEFTOVERS = 64


def describe_leftovers(processes: list[ProcessStat], ranks: Mapping[int, int]) -> list[LeftoverProcess]:
    """Describe processes that outlived their rank, except helpers of libraries; `ranks` maps session ids to ranks."""
    now = proc.convert_to_ticks(time.monotonic())
    found, _ = _query_processes([process.pid for process in processes[:_MAX_LEFTOVERS]], _read_command_and_rank)
    return [
        {
            "pid": process.pid,
            "rank": ranks.get(process.sid, rank),
            "command": command,
            "age_s": round(max(0.0, (now - process.start_time) / proc.TICKS_PER_SECOND), 1),
        }
        for process in processes[:_MAX_LEFTOVERS]
        for command, rank in [found.get(process.pid) or (f"[{process.comm}]", None)]
        if not _HELPER_COMMANDS.search(command)
    ]


def _read_command_and_rank(pid: int) -> tuple[str, int | None]:
    env = proc.read_environment(pid)
    numbers = [env.get(b"RANK", b""), env.get(b"CLUSTERCTL_RANK_OFFSET", b"0")]
    known = all(number.isdigit() and len(number) < 8 for number in numbers)
    return proc.read_command(pid), sum(map(int, numbers)) if known else None


def _explain_survival(process: ProcessStat) -> str:
    now = proc.read_stat(process.pid) or process
    if now.state == "D":
        place = proc.read_wait_channel(process.pid)
        return "in an uninterruptible wait" + (f" in {place}" if place else "")
    if proc.read_uid(process.pid) not in (os.getuid(), None) and os.getuid() != _ROOT:
        return "belongs to another user"
    if proc.is_exiting(now):
        return "killed, but the kernel has not ended it yet"
    return f"SIGKILL has not ended it, state {now.state}"
