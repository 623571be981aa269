"""The workers of one attempt on this node: preparation, start, exits and shutdown."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import time
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.inject import shim_files
from clusterctl.agent.linux import cgroup, port_reservation, proc, syscalls
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.node_state import fencing
from clusterctl.agent.processes import run_processes, termination
from clusterctl.agent.protocol import command_messages, events
from clusterctl.agent.protocol.run_requests import (
    PrepareArguments,
    StartArguments,
    StopReason,
    WorkerStart,
    parse_dataclass,
)
from clusterctl.agent.supervisor import exit_status, gpu_claims, hidden_failures, waiter, workers
from clusterctl.agent.supervisor.worker_output_files import WorkerOutputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.environment.container_keeper import Keeper
    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.node_state.journal import JournalState
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_processes import RunMarkers
    from clusterctl.agent.protocol.record_types import ExitRecord, LeftoverProcess, OutsideSignal, SurvivingProcess
    from clusterctl.agent.supervisor.workers import Worker

_WAIT_BEFORE_SIGNAL_S = 1.0
"""Processes that outlive their rank get no signal for this many seconds, because they may end by themselves."""
Record = Callable[[events.Event], events.Stamp]
_MAX_EXIT_WAITS = 1000
"""The supervisor waits for exit files at most this many times 10 ms. On a full disk, a waiter writes its file late."""


class Attempt:
    """The workers of one attempt, their GPUs, ports and output files.

    `record` writes an event to the journal.
    """

    def __init__(
        self,
        loop: EventLoop,
        run: RunDir,
        markers: RunMarkers,
        prepare: PrepareArguments,
        record: Record,
        claims: gpu_claims.GpuClaims,
        reserved_ports: port_reservation.ReservedPorts,
        keeper: Keeper,
        dropped: Mapping[tuple[int, int], tuple[int, int]],
    ) -> None:
        """Make an attempt without workers. GPU claims, ports and container belong to the run and outlive it."""
        self._loop, self._run, self._markers, self.record = loop, run, markers, record
        self.prepare = prepare
        self.number = prepare.attempt
        self.workers: dict[int, Worker] = {}
        self.python = ""
        self.claims, self.ports, self.keeper = claims, reserved_ports, keeper
        self.known_processes = run_processes.KnownProcesses(stop_signal=signal.Signals[prepare.stop_signal])
        self.started = False
        self.start_workers: workers.StartWorkers = workers.start_workers
        self._has_failures = False
        self._groups: dict[int, int] = {}
        self._sizes_at_stop: dict[int, int] = {}
        self._oom = exit_status.read_oom_kill_counts()
        self._port_check = port_reservation.PortIntruderCheck([], self._list_user_ids)
        self.outputs = WorkerOutputs(run, prepare.attempt, prepare.reserve, prepare.max_size, record, dropped)
        self.known_processes.protected |= {who for who in [proc.read_identity(os.getpid())] if who is not None}
        self.shutdown = AttemptShutdown(loop, run.run, markers, self)

    # --- prepare

    def prepare_node(self) -> None:
        """Claim the GPUs, reserve the ports and make the files of the attempt.

        Raises:
            RequestError: A GPU, a port or disk space is not available. The new claims and ports are then released.
        """
        self.python = workers.prepare_workdir(self._run, self.prepare, self.keeper)
        with contextlib.ExitStack() as undo:
            try:
                undo.callback(self.claims.release, self.claims.claim(self.prepare.gpus))
                # A server that does not set SO_REUSEADDR could not listen on a reserved port.
                self.ports.release(self.ports.reserve(self.prepare.server_ports))
                undo.callback(self.ports.release, self.ports.reserve(self.prepare.ports))
                undo.callback(self.outputs.close)
                os.makedirs(self._run.attempt_dir(self.number), mode=0o700, exist_ok=True)
                os.makedirs(self._run.status_dir(self.number), mode=0o700, exist_ok=True)
                self.outputs.make_files(self.prepare.ranks)
                record = {**dataclasses.asdict(self.prepare), "interpreter": self.python}
                syscalls.write_json(self._run.prepare_file, record)
            except (gpu_claims.GpuClaimError, port_reservation.PortError) as error:
                raise command_messages.make_refused_error(str(error)) from error
            except OSError as error:
                if syscalls.is_disk_full(error):
                    whose = "1 worker" if len(self.prepare.ranks) == 1 else f"{len(self.prepare.ranks)} workers"
                    text = f"no space left for the output of {whose}"
                    hint = f"free space on the disk of `{self._run.root}`"
                    raise command_messages.make_refused_error(text, hint) from error
                raise command_messages.convert_to_request_error(error) from error
            undo.pop_all()
        self.ports.release_unused()

    def reopen_outputs(self) -> None:
        """Open the workers' output files after a restart of the supervisor."""
        for rank in self.prepare.ranks:
            try:
                self.outputs.make_files([rank])
            except OSError as error:
                self.record_alarm("output", f"rank {rank}: cannot watch its output: {error.strerror}")

    # --- start

    def start(self, start: StartArguments) -> None:
        """Start the workers of the request that have not been started yet.

        Raises:
            RequestError: The attempt is ending or has ended, or a worker did not start.
        """
        if self.shutdown.stopped_at is not None or self.shutdown.is_swept:
            raise command_messages.make_refused_error(f"attempt {self.number} was already stopped on this node")
        if not self.python:
            raise command_messages.make_refused_error(
                f"attempt {self.number} cannot start: this node has lost `{self._run.prepare_file}`"
            )
        try:
            self.claims.claim(self.prepare.gpus)
        except gpu_claims.GpuClaimError as error:
            raise command_messages.make_refused_error(str(error)) from error
        if start.inject and not workers.install_shim(self._run):
            start = dataclasses.replace(start, inject=False)
        planned = [parse_dataclass(WorkerStart, fields) for fields in start.workers]
        self.started = True
        self.watch_ports(self.ports.attempt_ports)
        if self.known_processes.cgroup is None:
            self.known_processes.cgroup = cgroup.create_cgroup(f"{self._run.key[:16]}-{self.number}")
        ranks = [[worker_start.rank, worker_start.local_rank] for worker_start in planned]
        syscalls.write_json(
            self._run.start_file(self.number), {"workers": ranks, "cgroup": self.known_processes.cgroup}
        )
        to_start = [worker_start for worker_start in planned if worker_start.rank not in self.workers]
        if (
            start.inject
            and to_start
            and (pythons := workers.classify_shim_access_in_child(to_start[0].argv, self.prepare.workdir))
        ):
            shim_files.create_python_marker(self._run.status_dir(self.number), pythons)
        configs = [(worker_start, self._make_waiter_config(start, worker_start)) for worker_start in to_start]
        for worker in self.start_workers(configs):
            self.watch_worker(worker)
            self._record_started(worker)

    def _make_waiter_config(self, start: StartArguments, worker_start: WorkerStart) -> waiter.WaiterConfig:
        if worker_start.rank not in self.outputs:
            self.outputs.open_file(worker_start.rank)
        return waiter.WaiterConfig(
            program=workers.build_worker_program(
                self._run, self._markers, self.prepare, start, worker_start, self.python, self.keeper
            ),
            output_fd=self.outputs.get_descriptor(worker_start.rank),
            spawn_file=self._run.rank_file(self.number, worker_start.rank, "spawn"),
            exit_file=self._run.rank_file(self.number, worker_start.rank, "exit"),
            kept_descriptors=[
                *self.claims.descriptors,
                *([self.keeper.descriptor] if self.keeper.descriptor is not None else []),
            ],
            stop_after=self.prepare.stop_after,
            lease_file=self._run.lease_file,
            fence={
                "root": self._run.root,
                "run": self._run.run,
                "node": self._run.node,
                "attempt": self.number,
                "grace": self.prepare.grace,
                "cgroup": self.known_processes.cgroup,
                "stop_signal": int(self.known_processes.stop_signal),
            },
            cgroup_procs=cgroup.find_procs_file(self.known_processes.cgroup),
            title=f"{self._run.short_key} rank {worker_start.rank}",
        )

    def _record_started(self, worker: Worker) -> None:
        who = worker.identity
        self.record(events.Started(self.number, worker.rank, worker.local_rank, who.pid, who.start_time))

    def watch_worker(self, worker: Worker) -> None:
        """Add a worker to the attempt; when its process ends, record its exit."""
        self.workers[worker.rank] = worker
        self.known_processes.workers[worker.identity] = None
        self.known_processes.protected.add(worker.waiter)
        worker.last_alive_at = time.monotonic()
        self._watch_pidfd(worker)

    def adopt_worker(self, worker: Worker, state: JournalState) -> None:
        """Watch a worker that an earlier supervisor started; record the start if it is not in the journal."""
        self.watch_worker(worker)
        if worker.rank not in state.started:
            self._record_started(worker)
        if worker.rank in state.exited:
            worker.exited = True
            self.known_processes.workers[worker.identity] = proc.convert_to_ticks(state.exited[worker.rank].latest)

    def _watch_pidfd(self, worker: Worker) -> None:
        if worker.pidfd is not None:
            self._loop.remove_descriptor(worker.pidfd)
        workers.open_pidfd(worker)
        if worker.pidfd is not None:
            self._loop.on_readable(worker.pidfd, self.poll_exits)

    # --- ports

    def watch_ports(self, port_numbers: Iterable[int]) -> None:
        """Set the ports that `stop_if_port_is_taken` checks."""
        self._port_check = port_reservation.PortIntruderCheck(port_numbers, self._list_user_ids)

    def stop_if_port_is_taken(self) -> None:
        """Stop the attempt if another user's program listens on a workers' port: ranks may have connected to it."""
        now = time.monotonic()
        if self.shutdown.stopped_at is not None or not self._port_check.is_due(now):
            return
        intruder = self._port_check.find_intruder(now)
        if intruder is not None:
            self.record_alarm(events.PORT_TAKEN, intruder)
            self.shutdown.stop(self.prepare.grace, StopReason.PORT_TAKEN.value)

    def record_process_groups(self) -> None:
        """Record which ranks have joined a process group of torch.distributed, and the size of the largest group."""
        groups = shim_files.read_process_group_sizes(self._run.status_dir(self.number)) if self.started else {}
        if groups and groups != self._groups:
            self._groups = groups
            self.record(events.GroupJoined(self.number, sorted(groups)[:4096], max(groups.values())))

    def _list_user_ids(self) -> set[int | None]:
        seen = dataclasses.replace(self.known_processes, processes=set(self.known_processes.processes))
        return {proc.read_uid(process.pid) for process in run_processes.find_run_processes(self._markers, seen)}

    # --- exits

    @property
    def living_workers(self) -> list[Worker]:
        """The workers without a recorded exit."""
        return [worker for worker in self.workers.values() if not worker.exited]

    def store_wait_statuses(self, ended: dict[int, int]) -> None:
        """Store the wait statuses of ended workers; `ended` maps the pid of each reaped child to its wait status."""
        for worker in self.living_workers:
            if worker.identity.pid in ended:
                worker.wait_status = ended[worker.identity.pid]
        if ended:
            self.shutdown.run_next_step()
        self.poll_exits()

    def poll_exits(self) -> None:
        """Record the exits of workers that have ended; stop the other workers if one has failed."""
        before = len(self.living_workers)
        for worker in self.living_workers:
            end = self._collect_exit(worker)
            if end is not None and not self.shutdown.is_swept:
                self._record_exit(worker, end)
        if self.shutdown.has_begun:
            if len(self.living_workers) < before:
                self.shutdown.run_next_step()
        elif self.started and not self.shutdown.is_swept and not self.living_workers:
            self.record_process_groups()
            wait_before_signal_s = 0.0 if self._has_failures else _WAIT_BEFORE_SIGNAL_S
            self.shutdown.start_termination(time.monotonic() + self.prepare.grace, wait_before_signal_s)

    def _collect_exit(self, worker: Worker) -> ExitRecord | None:
        """Return the exit record of a worker, or `None` while the worker lives."""
        path = self._run.rank_file(self.number, worker.rank, "exit")
        end = exit_status.collect_exit_record(worker, path, lambda: self.outputs.release_reserve(worker.rank))
        if end is None and worker.watched_process is not None and not proc.is_alive(worker.watched_process):
            self._watch_pidfd(worker)
        return end

    def _record_exit(self, worker: Worker, exit_record: ExitRecord) -> None:
        if (since := fencing.read_fence_time(self._run.fence_file(self.number), exit_record)) is not None:
            self.shutdown.record_fence_stop(since, StopReason.FENCE.value, self.prepare.grace)
        self._mark_exited(worker)
        event = self._make_exit_event(worker, exit_record)
        self.record(event)
        failed = event.exit_code != 0 or event.error is not None
        self._has_failures |= failed or event.stopped
        if failed:
            # If another process has the port of a worker, the worker fails and cannot name that process.
            self.stop_if_port_is_taken()
        if failed and not event.stopped and self.living_workers and self.shutdown.stopped_at is None:
            self.shutdown.stop(self.prepare.grace, StopReason.PEER_FAILED.value)

    def _mark_exited(self, worker: Worker) -> None:
        """Mark a worker as ended and close its pidfd."""
        worker.exited = True
        if worker.pidfd is not None:
            self._loop.remove_descriptor(worker.pidfd)
        workers.close_pidfd(worker)
        self.known_processes.workers[worker.identity] = proc.convert_to_ticks(time.monotonic())

    def _make_exit_event(self, worker: Worker, exit_record: ExitRecord) -> events.Exited:
        latest = float(exit_record["mono"])
        stopped = self.shutdown.has_stopped_worker(worker.rank, latest)
        code, number = exit_record["exit_code"], exit_record["signal"]
        output = self._run.rank_file(self.number, worker.rank, "log")
        status_dir = self._run.status_dir(self.number)
        bad, size = code != 0, None
        if bad:
            error = exit_status.read_error_file(self._run.rank_file(self.number, worker.rank, "error.json"))
        else:
            error, size = shim_files.read_swallowed_failure(status_dir, worker.rank, worker.identity.pid)
        has_ended_well = not (bad or stopped or error)
        shell_error = output_failure = ""
        if has_ended_well:
            has_python_with_shim = shim_files.has_python_with_shim(status_dir, worker.rank)
            shell_error, output_failure = hidden_failures.find_errors_in_output(
                output, has_python_with_shim=has_python_with_shim
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
            else exit_status.read_final_output(
                output, has_failed=bad, stopped_size=self._sizes_at_stop.get(worker.rank, 0) if stopped else None
            ),
            outside_signal=None if bad or stopped else self._read_outside_signal(worker.rank, latest),
            worked_alone=has_ended_well and shim_files.has_worked_alone(status_dir, worker.rank),
            failed_child=None if stopped else shim_files.read_failed_child(status_dir, worker.rank, has_failed=bad),
            shell_error=shell_error,
            output_failure=output_failure,
            lacks_python=has_ended_well and shim_files.lacks_python(status_dir, worker.rank),
        )

    def store_sizes_at_stop(self) -> None:
        """Store the size of each worker's output before the stop signal, because the signal may cause later output."""
        for worker in self.living_workers:
            with contextlib.suppress(OSError):
                path = self._run.rank_file(self.number, worker.rank, "log")
                self._sizes_at_stop[worker.rank] = os.stat(path).st_size

    def _read_outside_signal(self, rank: int, latest: float) -> OutsideSignal | None:
        handled = shim_files.read_handled_signal(self._run.status_dir(self.number), rank)
        stopped_at = self.shutdown.stopped_at
        if handled is None or (stopped_at is not None and handled[1] >= stopped_at):
            return None
        return {"signal": handled[0], "before_s": max(0.0, latest - handled[1])}

    def record_alarm(self, code: str, message: str, gpu: int | None = None) -> None:
        """Write an alarm about this attempt to the journal."""
        self.record(events.Alarm(self.number, code, message, gpu=gpu))


class AttemptShutdown:
    """The shutdown of one attempt on this node.

    Attributes:
        stopped_at: Monotonic time of the stop signal; `None` before the signal; 0 if a fence stopped the attempt at an
            unknown time.
        is_swept: Whether all processes of the attempt have ended, except those in `remaining`.
        remaining: Processes that SIGKILL did not end.
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
        self._killed_after_grace: list[LeftoverProcess] = []

    @property
    def has_begun(self) -> bool:
        """Whether the supervisor has begun to end the processes of the attempt."""
        return self._terminator is not None

    def has_stopped_worker(self, rank: int, exited_at: float) -> bool:
        """Return whether the stop signal ended the worker of a rank; `exited_at` is the monotonic time of the exit."""
        return self.stopped_at is not None and exited_at >= self.stopped_at and rank not in self._exiting_ranks

    def stop(self, grace: float, reason: str) -> None:
        """Stop all processes of the attempt on this node; a second call may shorten the grace."""
        if self.is_swept and not self.remaining:
            return
        now = time.monotonic()
        if self.is_swept:
            self.is_swept, self._terminator, self._exit_waits = False, None, 0
        if self.stopped_at is None:
            # A worker that is already exiting has ended by itself, so it does not count as stopped.
            self._exiting_ranks = {
                worker.rank for worker in self._attempt.living_workers if proc.is_dying(worker.identity)
            }
            self.stopped_at = now
            self._attempt.store_sizes_at_stop()
            self._attempt.record(events.Stopping(self._attempt.number, reason, grace, sorted(self._exiting_ranks)))
        # `now` is out of date, because writing the event took time.
        self.start_termination(time.monotonic() + grace)

    def record_fence_stop(self, stopped_at: float, reason: str, grace: float) -> None:
        """Record that waiters stopped the attempt while no supervisor ran."""
        if self.stopped_at is None:
            self.stopped_at = stopped_at
            self._attempt.record(events.Stopping(self._attempt.number, reason, grace))

    def resume_stop(self, stopped_at: float, event: events.Stopping) -> None:
        """Continue to stop the attempt, as an earlier supervisor has begun."""
        self.stopped_at, self._exiting_ranks = stopped_at, set(event.exiting_ranks)
        self.start_termination(stopped_at + event.grace)

    def start_termination(self, kill_at: float, wait_before_signal_s: float = 0.0) -> None:
        """Start the termination of all processes; if it has already started, shorten the grace.

        Args:
            kill_at: Monotonic time of SIGKILL.
            wait_before_signal_s: Seconds to wait before the stop signal.
        """
        if self._terminator is None:
            self._terminator = termination.Terminator(
                self._loop,
                self._markers,
                self._known_processes,
                kill_at,
                self._finish_termination,
                self._report_slow_end,
                wait_before_signal_s=wait_before_signal_s,
                on_leftovers=self._record_leftovers,
            )
        else:
            self._terminator.shorten_grace(kill_at)

    def run_next_step(self) -> None:
        """Run the next step of the termination early, because a process has ended."""
        if self._terminator is not None:
            self._terminator.run_next_step()

    def record_swept(self, remaining: list[SurvivingProcess]) -> None:
        """Record the end of the attempt, with the processes that SIGKILL did not end."""
        strays = self._known_processes.processes - set(self._known_processes.workers)
        if not remaining:
            self._attempt.outputs.close()
            cgroup.remove_cgroup(self._known_processes.cgroup)
        self.is_swept, self.remaining = True, remaining
        late = (self._leftovers, self._killed_after_grace)
        self._attempt.record(events.Swept(self._attempt.number, len(strays), remaining, *late))

    def _record_leftovers(self, found: list[proc.ProcessStat], killed: bool) -> None:
        ranks = {worker.identity.pid: rank for rank, worker in self._attempt.workers.items()}
        described = run_processes.describe_leftovers(found, ranks)
        if not killed:
            self._leftovers = described
        elif self.stopped_at is not None:
            self._killed_after_grace = described

    def recheck_remaining_processes(self) -> None:
        """Once the kernel has ended all remaining processes, record the end of the attempt again, without them."""
        if not any(proc.is_alive(ProcessIdentity(entry["pid"], entry["start_time"])) for entry in self.remaining):
            self.record_swept([])

    def _finish_termination(self, remaining: list[SurvivingProcess]) -> bool:
        """If every exit is recorded, record the end of the attempt; return whether every exit is recorded.

        Args:
            remaining: Processes that SIGKILL did not end.
        """
        self._attempt.poll_exits()
        remaining_pids = {entry["pid"] for entry in remaining}
        if self._exit_waits < _MAX_EXIT_WAITS and any(
            worker.identity.pid not in remaining_pids for worker in self._attempt.living_workers
        ):
            # The waiter of an ended worker is about to write the exit file.
            self._exit_waits += 1
            return False
        gpus = self._attempt.prepare.gpus if self._attempt.started else []
        if remaining or not gpus:
            self.record_swept(remaining)
        else:
            # The next attempt or run needs the GPU memory, so wait until it is free.
            report = functools.partial(self._attempt.record_alarm, events.GPU_MEMORY)
            gpu_claims.wait_for_gpu_memory(self._loop, gpus, self._run, report, lambda: self.record_swept([]))
        return True

    def _report_slow_end(self, found: list[proc.ProcessStat]) -> None:
        names = ", ".join(f"{process.pid} ({process.comm})" for process in found[:4])
        text = f"the run waits for killed processes that the kernel has not ended yet: pid {names}"
        self._attempt.record_alarm("slow_end", text)
