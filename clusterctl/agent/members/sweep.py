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

from clusterctl.agent.linux import aside, cgroup, proc
from clusterctl.agent.linux.proc import Identity, Stat

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.members.marks import Marks
    from clusterctl.agent.protocol.process_types import LeftoverProcess, SurvivingProcess

_ROOT = 0
_ASIDE_SECONDS, _ALL_ASIDE_SECONDS = 1.0, 5.0
"""How long the look at one process, and at all that are left, may take. A process that is stuck in a driver or in an
exec keeps its memory and more locked, and whoever reads the wrong file of it in `/proc` waits with it."""

_MOST_COMMANDS = 256
"""Of so many survivors the command line is told; of thousands that a dead mount holds all have to fit in one event."""

T = TypeVar("T")


@dataclass
class Ledger:
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

    workers: dict[Identity, int | None] = field(default_factory=dict)
    found: set[Identity] = field(default_factory=set)
    ours: set[Identity] = field(default_factory=set)
    strangers: set[Identity] = field(default_factory=set)
    forged: set[Identity] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)
    unasked: bool = False
    stop_signal: int = signal.SIGTERM
    cgroup: str | None = None

    @property
    def since(self) -> int:
        """Ticks before which no process of the attempt can have started: all come of a worker."""
        return min((worker.start_time for worker in self.workers), default=0)


def find(marks: Marks, ledger: Ledger) -> list[Stat]:
    """Return every process of the run on this node that has not ended, and remember it in the ledger.

    One that changed its user may be beyond our signals; it is of the run nevertheless, and has to be named.
    """
    pids = [pid for pid in proc.pids() if pid not in ledger.silent and pid != os.getpid()]
    answers, stuck = _aside(pids, functools.partial(look, marks, ledger, cgroup.members(ledger.cgroup)))
    ledger.silent |= stuck
    ledger.unasked = len(answers) + len(stuck) < len(pids)
    result = [Stat(**answer["member"]) for answer in answers.values() if "member" in answer]
    ledger.strangers.update(
        Identity(pid, answer["stranger"]) for pid, answer in answers.items() if "stranger" in answer
    )
    ledger.forged.update(Identity(pid, answer["forged"]) for pid, answer in answers.items() if "forged" in answer)
    ledger.found.update(process.identity for process in result)
    return result


def living(ledger: Ledger) -> list[Stat]:
    """Return the processes that are known already and have not ended, without looking at any other."""
    stats = (proc.stat(who.pid) for who in (*ledger.workers, *(ledger.found - ledger.workers.keys())))
    return [process for process in stats if process is not None and not process.gone and _is_known(process, ledger)]


def look(marks: Marks, ledger: Ledger, inside: set[int], pid: int) -> dict[str, Any]:
    """Say whether a process is a `member` of the run, a `stranger` for good, `forged`, or nothing in particular."""
    process = proc.stat(pid)
    if process is None or process.gone or process.kernel or process.identity in ledger.ours or pid == os.getpid():
        return {}
    if pid in inside or _is_known(process, ledger) or _in_session(process, ledger):
        return {"member": vars(process)}
    if marks.tagged(pid):
        # Anybody can copy the tag, but nobody of another user can come of a process of ours without being of the run.
        ours = proc.owner(pid) == marks.uid or _comes_of_us(marks, ledger, process)
        return {"member": vars(process)} if ours else {"forged": process.start_time}
    # What follows can be copied by a process of somebody else, so its user must be ours, and its time.
    if process.start_time < ledger.since or process.identity in ledger.strangers or proc.owner(pid) != marks.uid:
        return {}
    named = marks.named(pid)
    if named or proc.writes_output(pid, marks.folder):
        return {"member": vars(process)}
    return {} if named is None else {"stranger": process.start_time}


def _is_known(process: Stat, ledger: Ledger) -> bool:
    return process.identity in ledger.workers or process.identity in ledger.found


def _in_session(process: Stat, ledger: Ledger) -> bool:
    """Whether a process is in the POSIX session of one of the workers.

    The pid of a worker that has ended may be used again, by a new session too: so only who was there before its end
    counts once it has ended. (Who came later carries other marks.)
    """
    for worker, ended in ledger.workers.items():
        # A worker of another boot has the pid 0, and 0 is the session of whoever never was given one.
        if worker.pid and process.sid == worker.pid and process.start_time >= worker.start_time:
            return process.start_time <= ended if ended is not None else proc.alive(worker)
    return False


def _comes_of_us(marks: Marks, ledger: Ledger, process: Stat) -> bool:
    """Whether a process descends from one that is known, or from one of our user that carries the tag.

    Sessions and parents are handed on by the kernel, so they cannot be copied. Orphans of the run are children of its
    supervisor.
    """
    todo, seen = [process], {process.pid}
    while todo:
        one = todo.pop()
        of_us = one.identity in ledger.ours or _is_known(one, ledger) or _in_session(one, ledger)
        if of_us or (marks.tagged(one.pid) and proc.owner(one.pid) == marks.uid):
            return True
        before = (proc.stat(pid) for pid in {one.ppid, one.sid} - seen - {0, 1})
        seen |= {one.ppid, one.sid}
        # A pid that was given out again is nobody's parent.
        todo += [each for each in before if each is not None and each.start_time <= one.start_time]
    return False


def _aside(pids: list[int], question: Callable[[int], T]) -> tuple[dict[int, T], set[int]]:
    """Look at processes in a fork; return what was seen of each, and at which the look hangs.

    Some may be in neither, for lack of time.
    """
    looks: dict[int, T] = {}
    stuck: set[int] = set()
    deadline = time.monotonic() + _ALL_ASIDE_SECONDS
    while pids and time.monotonic() < deadline:
        try:
            answers = aside.ask(functools.partial(_ask_of_each, pids, question), _ASIDE_SECONDS)
        except OSError:
            # Not even a process is to be had: better to look here than not at all.
            return {**looks, **{pid: question(pid) for pid in pids}}, stuck
        seen = [answer["seen"] for answer in answers if "seen" in answer]
        looks.update(zip(pids, seen))
        stuck.update(pids[len(seen) : len(seen) + 1])
        pids = pids[len(seen) + 1 :]
    return looks, stuck


def _ask_of_each(pids: list[int], question: Callable[[int], Any], out: Out) -> dict[str, Any]:
    for pid in pids:
        out.message({"seen": question(pid)})
    return {}


# --- ending


def end_groups(processes: list[Stat], signalled: set[int], ledger: Ledger) -> None:
    """Send the stop signal and SIGCONT to the processes and their groups, to each group once.

    A stopped process acts on it only once it is continued. Groups whose leader has ended are reached as well.
    """
    ours = _groups_of_ours(ledger)
    targets = {process.pgid if process.pgid not in ours else -process.pid for process in processes} - signalled
    for target in targets:
        signalled.add(target)
        for number in (ledger.stop_signal, signal.SIGCONT):
            _send(target, number)


def kill(processes: list[Stat], ledger: Ledger) -> None:
    """Send SIGKILL to the processes, their groups and their cgroup."""
    cgroup.kill(ledger.cgroup)
    for group in {process.pgid for process in processes} - _groups_of_ours(ledger):
        _send(group, signal.SIGKILL)
    for process in processes:
        if proc.identify(process.pid) == process.identity:
            _send(-process.pid, signal.SIGKILL)


def _groups_of_ours(ledger: Ledger) -> set[int]:
    """Return the process groups that hold one of us, and those that are none: 0 would be our own, 1 everybody."""
    guardians = (proc.stat(who.pid) for who in ledger.ours)
    return {
        0,
        1,
        os.getpgrp(),
        *(guardian.pgid for guardian in guardians if guardian is not None and guardian.identity in ledger.ours),
    }


def _send(target: int, number: int) -> None:
    """Signal a process group, or, by its negative pid, one process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if target < 0:
            os.kill(-target, number)
        else:
            os.killpg(target, number)


def describe(survivors: list[Stat]) -> list[SurvivingProcess]:
    """Return survivors and why they are still there: `{pid, start_time, command, why}` of each.

    Behind the first few hundred the name of the process stands for its command.
    """
    commands, _ = _aside([process.pid for process in survivors[:_MOST_COMMANDS]], proc.command)
    return [
        {
            "pid": process.pid,
            "start_time": process.start_time,
            "command": commands.get(process.pid) or f"[{process.comm}]",
            "why": _why(process),
        }
        for process in survivors
    ]


_HELPERS = re.compile(
    r"multiprocessing\.(?:resource_tracker|semaphore_tracker|forkserver)|torch_shm_manager|_inductor[./]compile_worker"
    r"|(?:^|/)(?:wandb-core|wandb-service|gpu_stats|tensorboard|nvidia-smi|dcgmi|rocm-smi|amd-smi)\b"
)
"""Command lines of what libraries start for themselves and of what only looks on: it may outlive a rank."""
_MOST_LEFTOVERS = 64


def name_leftovers(processes: list[Stat], ranks: Mapping[int, int]) -> list[LeftoverProcess]:
    """Return what is still there and no helper of a library; `ranks` by the POSIX session of their first process."""
    now = proc.ticks_at(time.monotonic())
    seen, _ = _aside([process.pid for process in processes[:_MOST_LEFTOVERS]], _command_and_rank)
    return [
        {
            "pid": process.pid,
            "rank": ranks.get(process.sid, rank),
            "command": command,
            "age_s": round(max(0.0, (now - process.start_time) / proc.TICKS), 1),
        }
        for process in processes[:_MOST_LEFTOVERS]
        for command, rank in [seen.get(process.pid) or (f"[{process.comm}]", None)]
        if not _HELPERS.search(command)
    ]


def _command_and_rank(pid: int) -> tuple[str, int | None]:
    rank = proc.environ(pid).get(b"RANK", b"")
    return proc.command(pid), int(rank) if rank.isdigit() and len(rank) < 8 else None


def _why(process: Stat) -> str:
    now = proc.stat(process.pid) or process
    if now.state == "D":
        place = proc.wchan(process.pid)
        return "in an uninterruptible wait" + (f" in {place}" if place else "")
    if proc.owner(process.pid) not in (os.getuid(), None) and os.getuid() != _ROOT:
        return "belongs to another user"
    if proc.exiting(now):
        return "killed, the kernel has not finished ending it"
    return f"still there after SIGKILL, state {now.state}"
