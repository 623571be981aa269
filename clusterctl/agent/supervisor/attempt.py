"""One attempt on this node, from its preparation to its last process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import time
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.inject import shim_files
from clusterctl.agent.linux import cgroup, ports, proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.node_state import fencing
from clusterctl.agent.processes import run_processes, termination
from clusterctl.agent.protocol import command_messages, events, run_requests
from clusterctl.agent.supervisor import exit_status, gpu_claims, shell_errors, waiter, workers
from clusterctl.agent.supervisor.output_files import OutputFiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.node_state.journal import NodeState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_processes import RunMarkers
    from clusterctl.agent.protocol.record_types import ExitRecord, LeftoverProcess, OutsideSignal, SurvivingProcess
    from clusterctl.agent.supervisor.workers import Worker

_HOLD_S = 1.0
"""Seconds in which processes that outlive their rank may end by themselves; then they are named and ended."""
Record = Callable[[events.Event], events.Stamp]
_MAX_EXIT_WAITS = 1000
"""Number of waits, 10 ms each, for exit records of the waiters, which take long on a full disk."""


class Attempt:
    """The workers of one attempt, their GPUs, ports and output files.

    `record` writes each change to the journal before it takes effect.
    """

    def __init__(
        self,
        loop: EventLoop,
        run: RunDir,
        markers: RunMarkers,
        prepare: run_requests.PrepareArguments,
        record: Record,
        claims: gpu_claims.GpuClaims,
        reserved_ports: ports.ReservedPorts,
        dropped: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Begin without workers. The GPU claims and the ports belong to the run and outlive this attempt."""
        self._loop, self._run, self._markers, self.record = loop, run, markers, record
        self.prepare = prepare
        self.number = prepare.attempt
        self.workers: dict[int, Worker] = {}
        self.python = ""
        self.claims, self.ports = claims, reserved_ports
        self.known_processes = run_processes.KnownProcesses(stop_signal=signal.Signals[prepare.stop_signal])
        self.started = False
        self.start_workers: workers.StartWorkers = workers.start_workers
        self._has_failures = False
        self._groups: dict[int, int] = {}
        self._sizes_at_stop: dict[int, int] = {}
        self._oom = exit_status.read_oom_kill_counts()
        self._watched_ports = ports.IntruderCheck([], self._list_user_ids)
        self.outputs = OutputFiles(run, prepare.attempt, prepare.reserve, prepare.max_size, record, dropped)
        self.known_processes.protected |= {who for who in [proc.read_identity(os.getpid())] if who is not None}
        self.shutdown = AttemptShutdown(loop, run.run, markers, self)

    # --- prepare

    def prepare_node(self) -> None:
        """Claim the GPUs, reserve the ports and make the files of the attempt.

        Raises:
            RequestError: One of them is not available. Then nothing new stays claimed.
        """
        self.python = workers.prepare_workdir(self._run, self.prepare)
        with contextlib.ExitStack() as undo:
            try:
                undo.callback(self.claims.release, self.claims.claim(self.prepare.gpus))
                undo.callback(self.ports.release, self.ports.reserve(self.prepare.ports))
                undo.callback(self.outputs.close)
                os.makedirs(self._run.attempt(self.number), mode=0o700, exist_ok=True)
                os.makedirs(self._run.status_dir(self.number), mode=0o700, exist_ok=True)
                self.outputs.make(self.prepare.ranks)
                record = {**dataclasses.asdict(self.prepare), "interpreter": self.python}
                syscalls.write_json(self._run.prepare_file, record)
            except (gpu_claims.GpuClaimError, ports.PortError) as error:
                raise command_messages.make_refused_error(str(error)) from error
            except OSError as error:
                if syscalls.is_disk_full(error):
                    whose = "1 worker" if len(self.prepare.ranks) == 1 else f"{len(self.prepare.ranks)} workers"
                    raise command_messages.make_refused_error(f"no space left for the output of {whose}") from error
                raise command_messages.convert_to_request_error(error) from error
            undo.pop_all()
        self.ports.release_unused()

    def reopen_outputs(self) -> None:
        """Open the output files again after a restart of the supervisor."""
        for rank in self.prepare.ranks:
            try:
                self.outputs.make([rank])
            except OSError as error:
                self.alarm("output", f"rank {rank}: cannot watch its output: {error.strerror}")

    # --- start

    def start(self, start: run_requests.StartArguments) -> None:
        """Start the workers that have not been started yet.

        Raises:
            RequestError: The attempt is ending or has ended, or a worker could not be started.
        """
        if self.shutdown.stopped_at is not None or self.shutdown.is_swept:
            raise command_messages.make_refused_error(f"attempt {self.number} is stopped on this node already")
        if not self.python:
            raise command_messages.make_refused_error(
                f"what attempt {self.number} was prepared with is lost on this node"
            )
        try:
            self.claims.claim(self.prepare.gpus)
        except gpu_claims.GpuClaimError as error:
            raise command_messages.make_refused_error(str(error)) from error
        if start.inject and not workers.install_shim(self._run):
            start = dataclasses.replace(start, inject=False)
        planned = [run_requests.parse_dataclass(run_requests.WorkerStart, one) for one in start.workers]
        self.started = True
        self.watch_ports(self.ports.numbers)
        if self.known_processes.cgroup is None:
            self.known_processes.cgroup = cgroup.create_cgroup(f"{self._run.key[:16]}-{self.number}")
        ranks = [[one.rank, one.local_rank] for one in planned]
        syscalls.write_json(
            self._run.start_file(self.number), {"workers": ranks, "cgroup": self.known_processes.cgroup}
        )
        wanted = [one for one in planned if one.rank not in self.workers]
        if (
            start.inject
            and wanted
            and (pythons := workers.classify_shim_access_in_child(wanted[0].argv, self.prepare.workdir))
        ):
            shim_files.note_pythons(self._run.status_dir(self.number), pythons)
        for worker in self.start_workers([(one, self._make_waiter_config(start, one)) for one in wanted]):
            self.watch_worker(worker)
            self._record_started(worker)

    def _make_waiter_config(
        self, start: run_requests.StartArguments, one: run_requests.WorkerStart
    ) -> waiter.WaiterConfig:
        if one.rank not in self.outputs:
            self.outputs.open(one.rank)
        return waiter.WaiterConfig(
            program=workers.build_worker_program(self._run, self._markers, self.prepare, start, one, self.python),
            output=self.outputs.descriptor(one.rank),
            spawn_file=self._run.of_rank(self.number, one.rank, "spawn"),
            exit_file=self._run.of_rank(self.number, one.rank, "exit"),
            kept_descriptors=self.claims.descriptors,
            stop_after=self.prepare.stop_after,
            lease=self._run.lease,
            fence={
                "root": self._run.root,
                "run": self._run.run,
                "node": self._run.node,
                "attempt": self.number,
                "grace": self.prepare.grace,
                "cgroup": self.known_processes.cgroup,
                "stop_signal": int(self.known_processes.stop_signal),
            },
            cgroup=cgroup.find_procs_file(self.known_processes.cgroup),
            title=f"{self._run.short_key} rank {one.rank}",
        )

    def _record_started(self, worker: Worker) -> None:
        who = worker.identity
        self.record(events.Started(self.number, worker.rank, worker.local_rank, who.pid, who.start_time))

    def watch_worker(self, worker: Worker) -> None:
        """Watch a worker from now on."""
        self.workers[worker.rank] = worker
        self.known_processes.workers[worker.identity] = None
        self.known_processes.protected.add(worker.waiter)
        worker.last_alive_at = time.monotonic()
        self._open_watch(worker)

    def adopt_worker(self, worker: Worker, state: NodeState) -> None:
        """Watch a worker of an earlier supervisor, and journal its start if that supervisor did not."""
        self.watch_worker(worker)
        if worker.rank not in state.started:
            self._record_started(worker)
        if worker.rank in state.exited:
            worker.exited = True
            self.known_processes.workers[worker.identity] = proc.convert_to_ticks(state.exited[worker.rank].latest)

    def _open_watch(self, worker: Worker) -> None:
        if worker.pidfd is not None:
            self._loop.forget(worker.pidfd)
        workers.open_pidfd(worker)
        if worker.pidfd is not None:
            self._loop.on_readable(worker.pidfd, self.poll_exits)

    # --- ports

    def watch_ports(self, numbers: Iterable[int]) -> None:
        """From now on, check that no other process listens on the workers' ports."""
        self._watched_ports = ports.IntruderCheck(numbers, self._list_user_ids)

    def check_ports(self) -> None:
        """End the attempt if a foreign process listens on a port of the workers: their peers may be connected to it."""
        now = time.monotonic()
        if self.shutdown.stopped_at is not None or not self._watched_ports.is_due(now):
            return
        intruder = self._watched_ports.find_intruder(now)
        if intruder is not None:
            self.alarm(events.PORT_TAKEN, intruder)
            self.shutdown.stop(self.prepare.grace, run_requests.StopReason.PORT_TAKEN.value)

    def record_process_groups(self) -> None:
        """Journal the process groups (torch.distributed) of the node's workers once they have joined one."""
        places = shim_files.read_group_ranks(self._run.status_dir(self.number)) if self.started else {}
        if places and places != self._groups:
            self._groups = places
            self.record(events.ProcessGroupJoined(self.number, sorted(places)[:4096], max(places.values())))

    def _list_user_ids(self) -> set[int | None]:
        seen = dataclasses.replace(self.known_processes, processes=set(self.known_processes.processes))
        return {proc.read_uid(one.pid) for one in run_processes.find_run_processes(self._markers, seen)}

    # --- exits

    @property
    def living_workers(self) -> list[Worker]:
        """The workers whose exit has not been noticed yet."""
        return [worker for worker in self.workers.values() if not worker.exited]

    def take_wait_statuses(self, ended: dict[int, int]) -> None:
        """Store the wait statuses of ended children, by pid."""
        for worker in self.living_workers:
            if worker.identity.pid in ended:
                worker.wait_status = ended[worker.identity.pid]
        if ended:
            self.shutdown.check_now()
        self.poll_exits()

    def poll_exits(self) -> None:
        """Find the workers that have ended, and act on their exits."""
        before = len(self.living_workers)
        for worker in self.living_workers:
            end = self._collect_exit(worker)
            if end is not None and not self.shutdown.is_swept:
                self._record_exit(worker, end)
        if self.shutdown.has_begun:
            if len(self.living_workers) < before:
                self.shutdown.check_now()
        elif self.started and not self.shutdown.is_swept and not self.living_workers:
            self.record_process_groups()
            hold_s = 0.0 if self._has_failures else _HOLD_S
            self.shutdown.terminate(time.monotonic() + self.prepare.grace, hold_s)

    def _collect_exit(self, worker: Worker) -> ExitRecord | None:
        """Return the exit record of a worker, or `None` while it lives."""
        path = self._run.of_rank(self.number, worker.rank, "exit")
        end = exit_status.read_exit(worker, path, lambda: self.outputs.release_reserve(worker.rank))
        if end is None and worker.watched_process is not None and not proc.is_alive(worker.watched_process):
            self._open_watch(worker)
        return end

    def _record_exit(self, worker: Worker, exit_record: ExitRecord) -> None:
        if (since := fencing.read_fence_time(self._run.fence(self.number), exit_record)) is not None:
            self.shutdown.record_fence(since, run_requests.StopReason.FENCE.value, self.prepare.grace)
        self._untrack(worker)
        event = self._make_exit_event(worker, exit_record)
        self.record(event)
        failed = event.exit_code != 0 or event.error is not None
        self._has_failures |= failed or event.stopped
        if failed:
            # Check the ports first: a worker that fails with EADDRINUSE cannot say which process has the port.
            self.check_ports()
        if failed and not event.stopped and self.living_workers and self.shutdown.stopped_at is None:
            self.shutdown.stop(self.prepare.grace, run_requests.StopReason.PEER_FAILED.value)

    def _untrack(self, worker: Worker) -> None:
        """Stop watching a worker that has ended."""
        worker.exited = True
        if worker.pidfd is not None:
            self._loop.forget(worker.pidfd)
        workers.close_pidfd(worker)
        self.known_processes.workers[worker.identity] = proc.convert_to_ticks(time.monotonic())

    def _make_exit_event(self, worker: Worker, exit_record: ExitRecord) -> events.Exited:
        latest = float(exit_record["mono"])
        stopped = self.shutdown.has_stopped_worker(worker.rank, latest)
        code, number = exit_record["exit_code"], exit_record["signal"]
        output = self._run.of_rank(self.number, worker.rank, "log")
        status_dir = self._run.status_dir(self.number)
        bad, size = code != 0, None
        if bad:
            error = exit_status.read_error_file(self._run.of_rank(self.number, worker.rank, "error.json"))
        else:
            error, size = shim_files.read_swallowed_failure(status_dir, worker.rank, worker.identity.pid)
        has_ended_well = not (bad or stopped or error)
        shell_error = output_failure = ""
        if has_ended_well:
            has_watched_python = shim_files.has_watched_python(status_dir, worker.rank)
            shell_error, output_failure = shell_errors.find_errors_in_output(
                output, has_watched_python=has_watched_python
            )
        oom = None
        if number == signal.SIGKILL and not stopped:
            oom, self._oom = exit_status.find_oom_evidence(self._oom, worker.identity.pid)
        return events.Exited(
            attempt=self.number,
            rank=worker.rank,
            exit_code=code,
            signal=number,
            stopped=stopped,
            earliest=float(exit_record["earliest"]),
            latest=latest,
            oom=oom,
            error=error,
            tail=exit_status.read_output_tail(output, size=size)
            if size is not None and not stopped
            else exit_status.read_last_words(
                output, has_failed=bad, stopped_size=self._sizes_at_stop.get(worker.rank, 0) if stopped else None
            ),
            outside_signal=None if bad or stopped else self._outside_signal(worker.rank, latest),
            worked_alone=has_ended_well and shim_files.has_worked_alone(status_dir, worker.rank),
            failed_child=None if stopped else shim_files.read_failed_child(status_dir, worker.rank, has_failed=bad),
            shell_error=shell_error,
            output_failure=output_failure,
            lacks_python=has_ended_well and shim_files.lacks_python(status_dir, worker.rank),
        )

    def note_output_sizes(self) -> None:
        """Store how much each worker has written before the stop signal: later output may follow from the signal."""
        for worker in self.living_workers:
            with contextlib.suppress(OSError):
                path = self._run.of_rank(self.number, worker.rank, "log")
                self._sizes_at_stop[worker.rank] = os.stat(path).st_size

    def _outside_signal(self, rank: int, latest: float) -> OutsideSignal | None:
        handled = shim_files.read_handled_signal(self._run.status_dir(self.number), rank)
        stopped_at = self.shutdown.stopped_at
        if handled is None or (stopped_at is not None and handled[1] >= stopped_at):
            return None
        return {"signal": handled[0], "before_s": max(0.0, latest - handled[1])}

    def alarm(self, code: str, message: str, gpu: int | None = None) -> None:
        """Journal an alarm of this attempt."""
        self.record(events.Alarm(self.number, code, message, gpu=gpu))


class AttemptShutdown:
    """The shutdown of one attempt on this node.

    Attributes:
        stopped_at: Monotonic time of the stop signal, `None` before; 0 if a fence ended it at an unknown time.
        is_swept: All processes of the attempt have ended, except `remaining`.
        remaining: Processes that could not be ended: `[{pid, start_time, command, why}]`.
    """

    def __init__(self, loop: EventLoop, run: str, markers: RunMarkers, attempt: Attempt) -> None:
        self._loop, self._run, self._markers, self._attempt = loop, run, markers, attempt
        self._known_processes = attempt.known_processes
        self._terminator: termination.Terminator | None = None
        self._exiting_ranks: set[int] = set()
        self._exit_waits = 0
        self.stopped_at: float | None = None
        self.is_swept = False
        self.remaining: list[SurvivingProcess] = []
        self._leftovers: list[LeftoverProcess] = []
        self._past_grace: list[LeftoverProcess] = []

    @property
    def has_begun(self) -> bool:
        """Whether the termination has begun."""
        return self._terminator is not None

    def has_stopped_worker(self, rank: int, latest: float) -> bool:
        """Return whether the stop signal has ended a worker that has ended before `latest` (monotonic seconds)."""
        return self.stopped_at is not None and latest >= self.stopped_at and rank not in self._exiting_ranks

    def stop(self, grace: float, reason: str) -> None:
        """Stop everything of the attempt on this node; a second call may shorten the grace."""
        if self.is_swept and not self.remaining:
            return
        now = time.monotonic()
        if self.is_swept:
            self.is_swept, self._terminator, self._exit_waits = False, None, 0
        if self.stopped_at is None:
            # A worker that is already exiting failed by itself: it does not count as stopped.
            self._exiting_ranks = {
                worker.rank for worker in self._attempt.living_workers if proc.is_dying(worker.identity)
            }
            self.stopped_at = now
            self._attempt.note_output_sizes()
            self._attempt.record(events.Stopping(self._attempt.number, reason, grace, sorted(self._exiting_ranks)))
        # The event took time to write; the grace starts now.
        self.terminate(time.monotonic() + grace)

    def record_fence(self, since: float, reason: str, grace: float) -> None:
        """Record that waiters have ended the attempt while no supervisor was there."""
        if self.stopped_at is None:
            self.stopped_at = since
            self._attempt.record(events.Stopping(self._attempt.number, reason, grace))

    def resume(self, since: float, event: events.Stopping) -> None:
        """Continue a stop that an earlier supervisor began."""
        self.stopped_at, self._exiting_ranks = since, set(event.exiting_ranks)
        self.terminate(since + event.grace)

    def terminate(self, kill_at: float, hold_s: float = 0.0) -> None:
        """Start the termination: no signal for `hold_s` seconds, and SIGKILL at `kill_at` (monotonic seconds)."""
        if self._terminator is None:
            self._terminator = termination.Terminator(
                self._loop,
                self._markers,
                self._known_processes,
                kill_at,
                self._finish_termination,
                self._report_slow_end,
                hold_s=hold_s,
                on_late=self._report_late,
            )
        else:
            self._terminator.shorten_grace(kill_at)

    def check_now(self) -> None:
        """Run the next step of the termination now, because a process has ended."""
        if self._terminator is not None:
            self._terminator.check_now()

    def close(self, remaining: list[SurvivingProcess]) -> None:
        """Record the end of the attempt with the processes that remain."""
        strays = self._known_processes.processes - set(self._known_processes.workers)
        if not remaining:
            self._attempt.outputs.close()
            cgroup.remove_cgroup(self._known_processes.cgroup)
        self.is_swept, self.remaining = True, remaining
        on_late = (self._leftovers, self._past_grace)
        self._attempt.record(events.Swept(self._attempt.number, len(strays), remaining, *on_late))

    def _report_late(self, found: list[proc.ProcessStat], killed: bool) -> None:
        ranks = {worker.identity.pid: rank for rank, worker in self._attempt.workers.items()}
        named = run_processes.describe_leftovers(found, ranks)
        if not killed:
            self._leftovers = named
        elif self.stopped_at is not None:
            self._past_grace = named

    def check_remaining(self) -> None:
        """Record a clean end if the remaining processes are gone: the kernel or a mount has released them."""
        if not any(proc.is_alive(ProcessIdentity(entry["pid"], entry["start_time"])) for entry in self.remaining):
            self.close([])

    def _finish_termination(self, remaining: list[SurvivingProcess]) -> bool:
        """Close the attempt once every exit is recorded; return whether that is so.

        Args:
            remaining: Processes that could not be ended.
        """
        self._attempt.poll_exits()
        left = {entry["pid"] for entry in remaining}
        if self._exit_waits < _MAX_EXIT_WAITS and any(
            worker.identity.pid not in left for worker in self._attempt.living_workers
        ):
            # Its waiter is about to write the exit file.
            self._exit_waits += 1
            return False
        gpus = self._attempt.prepare.gpus if self._attempt.started else []
        if remaining or not gpus:
            self.close(remaining)
        else:
            # The next attempt or run needs the GPU memory.
            report = functools.partial(self._attempt.alarm, events.GPU_MEMORY)
            gpu_claims.wait_for_gpu_memory(self._loop, gpus, self._run, report, lambda: self.close([]))
        return True

    def _report_slow_end(self, found: list[proc.ProcessStat]) -> None:
        names = ", ".join(f"{process.pid} ({process.comm})" for process in found[:4])
        text = f"the kernel has not finished ending killed processes, and the run waits for it: pid {names}"
        self._attempt.alarm("slow_end", text)
