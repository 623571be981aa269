"""One attempt on this node, from prepare to swept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import aside, cgroup, ports, proc, syscalls
from clusterctl.agent.linux.proc import Identity
from clusterctl.agent.members import guardians, sweep
from clusterctl.agent.protocol import encoding, events, refusals, requests
from clusterctl.agent.record import rank_files, secrets, workspace
from clusterctl.agent.supervisor import (
    adoption,
    claims,
    ends,
    gpu_memory,
    ladder,
    oom,
    portwatch,
    torchrun,
    waiter,
    workers,
)
from clusterctl.agent.supervisor.outputs import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.linux.loop import Loop
    from clusterctl.agent.members.marks import Marks
    from clusterctl.agent.record.rundir import RunDir
    from clusterctl.agent.record.state import NodeState
    from clusterctl.agent.supervisor.workers import Worker

_MOST_UNSAID = 1000
"""Looks, 10 ms apart, at whether waiters have said how their workers ended: on a full disk that takes them a while."""
_FILES_SECONDS = 10.0
"""How long a user's file system may take to answer."""
_CODE_SECONDS = 40.0
"""How long the look at every file of the code may take."""

Record = Callable[[events.Event], events.Stamp]


class Attempt:
    """The workers of one attempt, what is held for them, and how they end.

    Every change is an event first; `record` writes it down.
    """

    def __init__(
        self,
        loop: Loop,
        run: RunDir,
        marks: Marks,
        prepare: requests.Prepare,
        record: Record,
        claimed: claims.Claims,
        held: ports.Ports,
        dropped: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Begin with nothing. What is claimed and held is the run's, and stays so between its attempts."""
        self._loop, self._run, self._marks, self._record = loop, run, marks, record
        self.prepare = prepare
        self.number = prepare.attempt
        self.workers: dict[int, Worker] = {}
        self.python = ""
        self.claims, self.ports = claimed, held
        self.ledger = sweep.Ledger()
        self.stopping: float | None = None
        self._leaving: set[int] = set()
        self.swept = False
        self.remaining: list[dict[str, Any]] = []
        self.started = False
        self._ladder: ladder.Ladder | None = None
        self._unsaid = 0
        self.launcher: Worker | None = None
        self._places: list[list[int]] = []
        self._oom = oom.counts()
        self._watched_ports = portwatch.PortWatch([], self._users)
        self.outputs = Outputs(run, prepare.attempt, prepare.reserve, prepare.max_size, record, dropped)
        us = proc.identify(os.getpid())
        if us is not None:
            self.ledger.ours.add(us)

    # --- prepare

    def make_ready(self) -> None:
        """Take and make everything that the workers will need.

        Raises:
            RequestError: Something is not to be had; nothing new is then held.
        """
        self.python = self._look_at_files()
        with contextlib.ExitStack() as undo:
            try:
                undo.callback(self.claims.release, self.claims.take(self.prepare.gpus))
                undo.callback(self.ports.release, self.ports.hold(self.prepare.ports))
                undo.callback(self.outputs.close)
                self._make_folders()
                adoption.store(self._run, self.prepare, self.python)
            except (claims.ClaimError, ports.PortError) as error:
                raise refusals.refused(str(error)) from error
            except OSError as error:
                if syscalls.is_full(error):
                    raise refusals.refused(
                        f"no space left for the output of {len(self.prepare.ranks)} workers"
                    ) from error
                raise refusals.refusal_of(error) from error
            undo.pop_all()
        self.ports.release_others()

    def _look_at_files(self) -> str:
        """Make the folder of the code; return the interpreter. What users keep may lie on a mount that hangs."""
        wanted = self.prepare
        find = functools.partial(workers.make_ready, wanted.workdir, wanted.python, wanted.python_hint)
        python = _aside(find, _FILES_SECONDS)["python"]
        if self.prepare.code_hash is not None:
            _aside(self._check_code, _CODE_SECONDS)
        return str(python)

    def _check_code(self, out: Out) -> dict[str, Any]:
        prepare = self.prepare
        out.message({"at": prepare.workdir})
        difference = workspace.Workspace(prepare.workdir, self._run.root).difference(prepare.code_hash or "")
        if difference is not None:
            text = f"{prepare.workdir} does not hold the code that was synced for run {self._run.run}: {difference}"
            raise refusals.refused(text, "start it again, or set another `workdir`")
        return {}

    def _make_folders(self) -> None:
        os.makedirs(self._run.attempt(self.number), mode=0o700, exist_ok=True)
        os.makedirs(self._run.status_dir(self.number), mode=0o700, exist_ok=True)
        self.outputs.make(self.prepare.ranks)

    def reopen_outputs(self) -> None:
        """Open the output files again after a restart of the supervisor."""
        for rank in self.prepare.ranks:
            try:
                self.outputs.make([rank])
            except OSError as error:
                self._alarm("output", f"rank {rank}: cannot watch its output: {error.strerror}")

    # --- start

    def start(self, start: requests.Start) -> None:
        """Start the workers that are not started yet.

        Raises:
            RequestError: The attempt is ending or has ended, or a worker could not be started.
        """
        if self.stopping is not None or self.swept:
            raise refusals.refused(f"attempt {self.number} is stopped on this node already")
        if not self.python:
            raise refusals.refused(f"what attempt {self.number} was prepared with is lost on this node")
        try:
            self.claims.take(self.prepare.gpus)
        except claims.ClaimError as error:
            raise refusals.refused(str(error)) from error
        if start.inject and not workers.install_shim(self._run):
            start = dataclasses.replace(start, inject=False)
        planned = [encoding.from_wire(requests.WorkerStart, one) for one in start.workers]
        self.started = True
        self.watch_ports(self.ports.numbers)
        if self.ledger.cgroup is None:
            self.ledger.cgroup = cgroup.make(f"{self._run.key[:16]}-{self.number}")
        ranks = [place for one in planned for place in torchrun.places(one)]
        launcher = next((one for one in planned if one.hosts), None)
        known = {"workers": ranks, "cgroup": self.ledger.cgroup, "launcher": launcher.rank if launcher else None}
        syscalls.write_json(self._run.start(self.number), known)
        if launcher is not None and self.launcher is None:
            report = self._begin(start, launcher, torchrun.FILES)
            self.attend(workers.begun(launcher.rank, launcher.local_rank, report), ranks)
        wanted = [one for one in planned if one.rank not in self.workers and not one.hosts]
        reports = [(one, self._begin(start, one)) for one in wanted]
        for one, report in reports:
            worker = workers.begun(one.rank, one.local_rank, report)
            self.take_in(worker)
            self._record_started(worker)

    def _begin(self, start: requests.Start, one: requests.WorkerStart, files: str = "") -> int:
        if one.rank not in self.outputs:
            self.outputs.open(one.rank)
        post = waiter.Post(
            program=workers.program(self._run, self._marks, self.prepare, start, one, self.python),
            output=self.outputs.descriptor(one.rank),
            spawn_file=self._run.of_rank(self.number, one.rank, files + "spawn"),
            exit_file=self._run.of_rank(self.number, one.rank, files + "exit"),
            keep=[*self.claims.descriptors, *self.claims.folder],
            stop_after=self.prepare.stop_after,
            lease=self._run.lease,
            enforce=self._enforce,
            cgroup=cgroup.procs(self.ledger.cgroup),
            title=f"{self._run.short} rank {one.rank}",
        )
        return workers.begin(one.rank, post)

    def _enforce(self, _out: Out) -> dict[str, Any]:
        """End everything of the run here; done aside by a waiter whose fence has expired."""
        self.ledger.ours |= guardians.of_run(self._run)
        secrets.forget(self._run)
        return {"left": ladder.end_all(self._marks, self.ledger, self.prepare.grace)}

    def _record_started(self, worker: Worker) -> None:
        who = worker.identity
        self._record(events.Started(self.number, worker.rank, worker.local_rank, who.pid, who.start_time))

    def take_in(self, worker: Worker) -> None:
        """Watch over a worker from now on."""
        self.workers[worker.rank] = worker
        self.ledger.workers[worker.identity] = None
        self.ledger.ours.add(worker.waiter)
        worker.seen = time.monotonic()
        self._watch(worker)

    def adopt(self, worker: Worker, state: NodeState) -> None:
        """Watch over a worker that an earlier supervisor started; what it did not write down is written down now."""
        self.take_in(worker)
        if worker.rank not in state.started:
            self._record_started(worker)
        if worker.rank in state.exited:
            worker.exited = True
            self.ledger.workers[worker.identity] = proc.ticks_at(state.exited[worker.rank].latest)

    def _watch(self, worker: Worker) -> None:
        if worker.watch is not None:
            self._loop.forget(worker.watch)
        workers.watch(worker)
        if worker.watch is not None:
            self._loop.on_readable(worker.watch, self.look)

    # --- ports

    def watch_ports(self, numbers: Iterable[int]) -> None:
        """See to it from now on that nobody else listens where the workers will."""
        self._watched_ports = portwatch.PortWatch(numbers, self._users)

    def look_at_ports(self) -> None:
        """End the attempt where somebody else listens on a port of the workers': their peers may be talking to him."""
        now = time.monotonic()
        if self.stopping is not None or not self._watched_ports.due(now):
            return
        intruder = self._watched_ports.look(now)
        if intruder is not None:
            self._alarm(events.PORT_TAKEN, intruder)
            self.stop(self.prepare.grace, requests.StopReason.PORT_TAKEN.value)

    def _users(self) -> set[int | None]:
        seen = dataclasses.replace(self.ledger, found=set(self.ledger.found))
        return {proc.owner(one.pid) for one in sweep.find(self._marks, seen)}

    # --- ends

    @property
    def living(self) -> list[Worker]:
        """The workers whose end was not seen yet."""
        return [worker for worker in self.workers.values() if not worker.exited]

    def reaped(self, ended: dict[int, int]) -> None:
        """Take note of children of ours that have ended: wait statuses by pid."""
        for worker in [*self.living, *([self.launcher] if self.launcher else [])]:
            if worker.identity.pid in ended:
                worker.status = ended[worker.identity.pid]
        if ended and self._ladder is not None:
            self._ladder.poke()
        self.look()

    def look(self) -> None:
        """See which workers have ended, and do what follows from that."""
        self._look_at_launcher()
        before = len(self.living)
        for worker in self.living:
            said = self._end_of(worker)
            if said is not None and not self.swept:
                self._exited(worker, said)
        if self._ladder is not None:
            if len(self.living) < before:
                self._ladder.poke()
        elif self.started and not self.swept and not self.living and (self.launcher is None or self.launcher.exited):
            self._sweep(time.monotonic() + self.prepare.grace)

    def _end_of(self, worker: Worker) -> dict[str, Any] | None:
        """Return how a worker ended, or `None` while it lives."""
        path = self._run.of_rank(self.number, worker.rank, worker.files + "exit")
        said = ends.end_of(worker, path, lambda: self.outputs.make_way(worker.rank))
        if said is None and worker.watched is not None and not proc.alive(worker.watched):
            self._watch(worker)
        return said

    def _exited(self, worker: Worker, said: dict[str, Any]) -> None:
        worker.exited = True
        if said.get("fenced") and self.stopping is None:
            # The waiter had to end it, since no supervisor was there.
            self.stopping = 0.0
            self._record(events.Stopping(self.number, requests.StopReason.FENCE.value, self.prepare.grace))
        if worker.watch is not None:
            self._loop.forget(worker.watch)
        workers.unwatch(worker)
        self.ledger.workers[worker.identity] = proc.ticks_at(time.monotonic())
        event = self._exit_event(worker, said)
        self._record(event)
        if event.exit_code != 0:
            # Before its peers are stopped for it: one that finds its port taken has only the name of the error.
            self.look_at_ports()
        if not event.stopped and event.exit_code != 0 and self.living and self.stopping is None:
            self.stop(self.prepare.grace, requests.StopReason.PEER_FAILED.value)

    def _exit_event(self, worker: Worker, said: dict[str, Any]) -> events.Exited:
        latest = float(said["mono"])
        stopped = self.stopping is not None and latest >= self.stopping and worker.rank not in self._leaving
        code, number = said["exit_code"], said["signal"]
        bad = code != 0
        of_rank = self._run.of_rank
        return events.Exited(
            attempt=self.number,
            rank=worker.rank,
            exit_code=code,
            signal=number,
            stopped=stopped,
            earliest=float(said["earliest"]),
            latest=latest,
            oom=self._killed_for_memory(worker) if number == signal.SIGKILL and not stopped else None,
            error=workers.error_of(of_rank(self.number, worker.rank, "error.json")),
            tail=workers.tail_of(of_rank(self.number, worker.rank, "log")) if bad and not stopped else "",
        )

    def _killed_for_memory(self, worker: Worker) -> str | None:
        found, self._oom = oom.evidence(self._oom, worker.identity.pid)
        return found

    # --- a launcher of the node, and the workers that it starts

    def attend(self, launcher: Worker, places: list[list[int]]) -> None:
        """Watch over a launcher, and take in the workers that it starts: rank and local rank of each."""
        launcher.files = torchrun.FILES
        self.launcher, self._places = launcher, places
        self.ledger.workers[launcher.identity] = None
        self.ledger.ours.add(launcher.waiter)
        launcher.seen = time.monotonic()
        self._watch(launcher)

    def _look_at_launcher(self) -> None:
        launcher = self.launcher
        if launcher is None or self.swept:
            return
        # Asked first: what it had started when it ended is then seen for certain.
        said = None if launcher.exited else self._end_of(launcher)
        for rank, local_rank in self._places:
            spawned = (
                None if rank in self.workers else rank_files.read_spawn(self._run.of_rank(self.number, rank, "spawn"))
            )
            if spawned is not None:
                worker = workers.from_spawn(rank, local_rank, spawned)
                self.take_in(worker)
                self._record_started(worker)
        if said is not None:
            self._launcher_ended(launcher, said)

    def _launcher_ended(self, launcher: Worker, said: dict[str, Any]) -> None:
        launcher.exited = True
        if launcher.watch is not None:
            self._loop.forget(launcher.watch)
        workers.unwatch(launcher)
        self.ledger.workers[launcher.identity] = proc.ticks_at(time.monotonic())
        for rank, local_rank in self._places:
            if rank not in self.workers:
                # It never came to be: how the launcher ended, and what it wrote, is all that can be said of it.
                self.workers[rank] = dataclasses.replace(launcher, rank=rank, local_rank=local_rank)
                self._record_started(self.workers[rank])
                event = self._exit_event(launcher, said)
                self._record(dataclasses.replace(event, rank=rank, stopped=event.stopped or rank != launcher.rank))
        if self.living and self.stopping is None:
            self._alarm("launcher", "the launcher of this node has ended before its workers")
            self.stop(self.prepare.grace, requests.StopReason.PEER_FAILED.value)

    # --- stop and sweep

    def stop(self, grace: float, reason: str) -> None:
        """Stop everything of the attempt here; again, to shorten the grace."""
        if self.swept and not self.remaining:
            return
        now = time.monotonic()
        if self.swept:
            self.swept, self._ladder, self._unsaid = False, None, 0
        if self.stopping is None:
            # Who is ending by itself now was not stopped by us, even if nobody has looked yet.
            self._leaving = {worker.rank for worker in self.living if proc.leaving(worker.identity)}
            self.stopping = now
            self._record(events.Stopping(self.number, reason, grace, sorted(self._leaving)))
        self._sweep(now + grace)

    def resume_stopping(self, since: float, event: events.Stopping) -> None:
        """Go on with a stop that an earlier supervisor began."""
        self.stopping, self._leaving = since, set(event.leaving)
        self._sweep(since + event.grace)

    def abandon(self) -> None:
        """Close an attempt none of whose workers was asked for; any other goes on."""
        if not self.started and self._ladder is None and not self.swept:
            self._close([])

    def _sweep(self, kill_at: float) -> None:
        if self._ladder is None:
            self._ladder = ladder.Ladder(self._loop, self._marks, self.ledger, kill_at, self._empty, self._slow_to_go)
        else:
            self._ladder.shorten(kill_at)

    def _slow_to_go(self, found: list[proc.Stat]) -> None:
        names = ", ".join(f"{one.pid} ({one.comm})" for one in found[:4])
        self._alarm("slow_end", f"the kernel is still taking apart what was killed, and is waited for: pid {names}")

    def _empty(self, remaining: ladder.Survivors) -> bool:
        """Nothing is left, or what is left cannot be ended: close the attempt once every exit is written down."""
        self.look()
        left = {one["pid"] for one in remaining}
        if self._unsaid < _MOST_UNSAID and any(worker.identity.pid not in left for worker in self.living):
            # Its waiter is about to say how it ended.
            self._unsaid += 1
            return False
        if remaining or not (self.started and self.prepare.gpus):
            self._close(remaining)
        else:
            # The next attempt, or run, shall find the memory of its GPUs free.
            gpu_memory.Drain(self._loop, self.prepare.gpus, self._run.run, self._held, lambda: self._close([]))
        return True

    def _held(self, message: str, gpu: int | None) -> None:
        self._record(events.Alarm(self.number, events.GPU_MEMORY, message, gpu=gpu))

    def _close(self, remaining: list[dict[str, Any]]) -> None:
        strays = self.ledger.found - set(self.ledger.workers)
        self._name_forgers()
        if not remaining:
            self.outputs.close()
            cgroup.remove(self.ledger.cgroup)
        self.swept, self.remaining = True, remaining
        self._record(events.Swept(self.number, len(strays), remaining))

    def _name_forgers(self) -> None:
        """Say who of another user carries the run's tag and is none of its processes: nobody touches it."""
        names = [f"pid {who.pid} of uid {proc.owner(who.pid)}" for who in self.ledger.forged if proc.alive(who)]
        if names:
            self._alarm(
                "forged", f"marked as of this run, but none of its processes, and left alone: {', '.join(names[:4])}"
            )

    def look_at_remaining(self) -> None:
        """Say so once nothing is left any more of what could not be ended: the kernel, or a mount, has let it go."""
        if not any(proc.alive(Identity(one["pid"], one["start_time"])) for one in self.remaining):
            self._close([])

    def _alarm(self, code: str, message: str) -> None:
        self._record(events.Alarm(self.number, code, message))


def _aside(task: aside.Task, seconds: float) -> dict[str, Any]:
    answer = aside.outcome(aside.ask(task, seconds))
    if isinstance(answer, Exception):
        raise answer
    return answer
