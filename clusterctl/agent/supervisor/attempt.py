"""One attempt on this node, from prepare to swept."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.inject import status
from clusterctl.agent.linux import cgroup, ports, proc, syscalls
from clusterctl.agent.node_state import fencing
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import dataclass_json, events, request_errors, requests
from clusterctl.agent.supervisor import adoption, claims, ends, ladder, waiter, workers
from clusterctl.agent.supervisor.ending import Ending, Parts
from clusterctl.agent.supervisor.forkserver import forked_waiter, starts
from clusterctl.agent.supervisor.output_space import Outputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.journal import NodeState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.protocol.process_types import ExitRecord
    from clusterctl.agent.supervisor.workers import Worker

_HOLD_S = 1.0
"""What a rank leaves behind when it ends well may go by itself for so long; then it is named, and ended."""
Record = Callable[[events.Event], events.Stamp]


class Attempt:
    """The workers of one attempt, what is held for them, and how they end.

    Every change is an event first; `record` writes it down.
    """

    def __init__(
        self,
        loop: EventLoop,
        run: RunDir,
        markers: RunMarkers,
        prepare: requests.Prepare,
        record: Record,
        claimed: claims.Claims,
        held: ports.ReservedPorts,
        dropped: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Begin with nothing. What is claimed and held is the run's, and stays so between its attempts."""
        self._loop, self._run, self._markers, self._record = loop, run, markers, record
        self.prepare = prepare
        self.number = prepare.attempt
        self.workers: dict[int, Worker] = {}
        self.python = ""
        self.claims, self.ports = claimed, held
        self.known_processes = run_processes.KnownProcesses(stop_signal=signal.Signals[prepare.stop_signal])
        self.started = False
        self.begin_all: starts.BeginAll = starts.anew
        self._has_failures = False
        self._groups: dict[int, int] = {}
        self._oom = ends.oom_counts()
        self._watched_ports = ports.IntruderCheck([], self._users)
        self.outputs = Outputs(run, prepare.attempt, prepare.reserve, prepare.max_size, record, dropped)
        self.known_processes.protected |= {who for who in [proc.read_identity(os.getpid())] if who is not None}
        parts = Parts(record, self._used_gpus, self.look, lambda: self.living, self.outputs.close, self._ranks)
        self.ending = Ending(loop, run.run, markers, self.number, self.known_processes, parts)

    # --- prepare

    def make_ready(self) -> None:
        """Take and make everything that the workers will need.

        Raises:
            RequestError: Something is not to be had; nothing new is then held.
        """
        self.python = workers.look_at_files(self._run, self.prepare)
        with contextlib.ExitStack() as undo:
            try:
                undo.callback(self.claims.release, self.claims.take(self.prepare.gpus))
                undo.callback(self.ports.release, self.ports.reserve(self.prepare.ports))
                undo.callback(self.outputs.close)
                self._make_folders()
                adoption.store(self._run, self.prepare, self.python)
            except (claims.ClaimError, ports.PortError) as error:
                raise request_errors.make_refused_error(str(error)) from error
            except OSError as error:
                if syscalls.is_disk_full(error):
                    whose = "1 worker" if len(self.prepare.ranks) == 1 else f"{len(self.prepare.ranks)} workers"
                    raise request_errors.make_refused_error(f"no space left for the output of {whose}") from error
                raise request_errors.convert_to_request_error(error) from error
            undo.pop_all()
        self.ports.release_unused()

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
        if self.ending.since is not None or self.ending.swept:
            raise request_errors.make_refused_error(f"attempt {self.number} is stopped on this node already")
        if not self.python:
            raise request_errors.make_refused_error(
                f"what attempt {self.number} was prepared with is lost on this node"
            )
        try:
            self.claims.take(self.prepare.gpus)
        except claims.ClaimError as error:
            raise request_errors.make_refused_error(str(error)) from error
        if start.inject and not workers.install_shim(self._run):
            start = dataclasses.replace(start, inject=False)
        planned = [dataclass_json.parse_dataclass(requests.WorkerStart, one) for one in start.workers]
        self.started = True
        self.watch_ports(self.ports.numbers)
        if self.known_processes.cgroup is None:
            self.known_processes.cgroup = cgroup.create_cgroup(f"{self._run.key[:16]}-{self.number}")
        ranks = [[one.rank, one.local_rank] for one in planned]
        syscalls.write_json(self._run.start(self.number), {"workers": ranks, "cgroup": self.known_processes.cgroup})
        wanted = [one for one in planned if one.rank not in self.workers]
        for worker in self.begin_all([(one, self._post(start, one)) for one in wanted]):
            self.take_in(worker)
            self._record_started(worker)

    def _post(self, start: requests.Start, one: requests.WorkerStart) -> waiter.Post:
        if one.rank not in self.outputs:
            self.outputs.open(one.rank)
        return waiter.Post(
            program=workers.program(self._run, self._markers, self.prepare, start, one, self.python),
            output=self.outputs.descriptor(one.rank),
            spawn_file=self._run.of_rank(self.number, one.rank, "spawn"),
            exit_file=self._run.of_rank(self.number, one.rank, "exit"),
            keep=self.claims.descriptors,
            stop_after=self.prepare.stop_after,
            lease=self._run.lease,
            enforce=self._enforce,
            cgroup=cgroup.find_procs_file(self.known_processes.cgroup),
            title=f"{self._run.short} rank {one.rank}",
            told=forked_waiter.told(self._run, self.number, self.prepare.grace, self.known_processes),
        )

    def _enforce(self, _out: HelperOutput) -> dict[str, Any]:
        return ladder.enforce(self._run, self._markers, self.number, self.known_processes, self.prepare.grace)

    def _record_started(self, worker: Worker) -> None:
        who = worker.identity
        self._record(events.Started(self.number, worker.rank, worker.local_rank, who.pid, who.start_time))

    def take_in(self, worker: Worker) -> None:
        """Watch over a worker from now on."""
        self.workers[worker.rank] = worker
        self.known_processes.workers[worker.identity] = None
        self.known_processes.protected.add(worker.waiter)
        worker.seen = time.monotonic()
        self._watch(worker)

    def adopt(self, worker: Worker, state: NodeState) -> None:
        """Watch over a worker that an earlier supervisor started; what it did not write down is written down now."""
        self.take_in(worker)
        if worker.rank not in state.started:
            self._record_started(worker)
        if worker.rank in state.exited:
            worker.exited = True
            self.known_processes.workers[worker.identity] = proc.convert_to_ticks(state.exited[worker.rank].latest)

    def _watch(self, worker: Worker) -> None:
        if worker.watch is not None:
            self._loop.forget(worker.watch)
        workers.watch(worker)
        if worker.watch is not None:
            self._loop.on_readable(worker.watch, self.look)

    # --- ports

    def watch_ports(self, numbers: Iterable[int]) -> None:
        """See to it from now on that nobody else listens where the workers will."""
        self._watched_ports = ports.IntruderCheck(numbers, self._users)

    def look_at_ports(self) -> None:
        """End the attempt where somebody else listens on a port of the workers': their peers may be talking to him."""
        now = time.monotonic()
        if self.ending.since is not None or not self._watched_ports.is_due(now):
            return
        intruder = self._watched_ports.find_intruder(now)
        if intruder is not None:
            self._alarm(events.PORT_TAKEN, intruder)
            self.ending.stop(self.prepare.grace, requests.StopReason.PORT_TAKEN.value)

    def look_at_groups(self) -> None:
        """Tell in which process group the workers of this node are, once they are in one."""
        places = status.group_places(self._run.status_dir(self.number)) if self.started else {}
        if places and places != self._groups:
            self._groups = places
            self._record(events.Grouped(self.number, sorted(places)[:4096], max(places.values())))

    def _users(self) -> set[int | None]:
        seen = dataclasses.replace(self.known_processes, processes=set(self.known_processes.processes))
        return {proc.read_uid(one.pid) for one in run_processes.find_run_processes(self._markers, seen)}

    # --- ends

    @property
    def living(self) -> list[Worker]:
        """The workers whose end was not seen yet."""
        return [worker for worker in self.workers.values() if not worker.exited]

    def reaped(self, ended: dict[int, int]) -> None:
        """Take note of children of ours that have ended: wait statuses by pid."""
        for worker in self.living:
            if worker.identity.pid in ended:
                worker.status = ended[worker.identity.pid]
        if ended:
            self.ending.poke()
        self.look()

    def look(self) -> None:
        """See which workers have ended, and do what follows from that."""
        before = len(self.living)
        for worker in self.living:
            end = self._end_of(worker)
            if end is not None and not self.ending.swept:
                self._exited(worker, end)
        if self.ending.begun:
            if len(self.living) < before:
                self.ending.poke()
        elif self.started and not self.ending.swept and not self.living:
            self.look_at_groups()
            hold_s = 0.0 if self._has_failures else _HOLD_S
            self.ending.sweep(time.monotonic() + self.prepare.grace, hold_s)

    def _ranks(self) -> dict[int, int]:
        return {worker.identity.pid: rank for rank, worker in self.workers.items()}

    def _end_of(self, worker: Worker) -> ExitRecord | None:
        """Return how a worker ended, or `None` while it lives."""
        path = self._run.of_rank(self.number, worker.rank, "exit")
        end = ends.end_of(worker, path, lambda: self.outputs.make_way(worker.rank))
        if end is None and worker.watched is not None and not proc.is_alive(worker.watched):
            self._watch(worker)
        return end

    def _exited(self, worker: Worker, said: ExitRecord) -> None:
        if (since := fencing.read_fence_time(self._run.fence(self.number), said)) is not None:
            self.ending.fenced(since, requests.StopReason.FENCE.value, self.prepare.grace)
        self._let_go(worker)
        event = self._exit_event(worker, said)
        self._record(event)
        failed = event.exit_code != 0 or event.error is not None
        self._has_failures |= failed or event.stopped
        if failed:
            # First: one that finds its port taken has only the name of the error.
            self.look_at_ports()
        if failed and not event.stopped and self.living and self.ending.since is None:
            self.ending.stop(self.prepare.grace, requests.StopReason.PEER_FAILED.value)

    def _let_go(self, worker: Worker) -> None:
        """Watch no longer over a worker that has ended."""
        worker.exited = True
        if worker.watch is not None:
            self._loop.forget(worker.watch)
        workers.unwatch(worker)
        self.known_processes.workers[worker.identity] = proc.convert_to_ticks(time.monotonic())

    def _exit_event(self, worker: Worker, said: ExitRecord) -> events.Exited:
        latest = float(said["mono"])
        stopped = self.ending.caused(worker.rank, latest)
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
            error=self._error_of(worker, bad=bad),
            tail="" if stopped else workers.last_words(of_rank(self.number, worker.rank, "log"), has_failed=bad),
        )

    def _error_of(self, worker: Worker, *, bad: bool) -> dict[str, Any] | None:
        if bad:
            return workers.error_of(self._run.of_rank(self.number, worker.rank, "error.json"))
        return status.swallowed_failure(self._run.status_dir(self.number), worker.rank, worker.identity.pid)

    def _killed_for_memory(self, worker: Worker) -> str | None:
        evidence, self._oom = ends.oom_evidence(self._oom, worker.identity.pid)
        return evidence

    # --- the end

    def abandon(self) -> None:
        """Close an attempt none of whose workers was asked for; any other goes on."""
        if not self.started and not self.ending.begun and not self.ending.swept:
            self.ending.close([])

    def _used_gpus(self) -> list[int]:
        return self.prepare.gpus if self.started else []

    def _alarm(self, code: str, message: str) -> None:
        self._record(events.Alarm(self.number, code, message))
