"""The supervisor of one run on one node: it starts, watches and ends the workers, and writes the journal.

The head decides when attempts start and stop. A supervisor may be killed at any moment, because all its state is on
disk or in waiters. The next supervisor adopts the run. A supervisor outlives the process that forks it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent import inject
from clusterctl.agent.environment.container_keeper import Keeper
from clusterctl.agent.linux import helper_process, port_reservation, proc, spawn, syscalls
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state import fencing, fsync_queue, journal, secrets, supervisor_lock, tmpfiles_protection
from clusterctl.agent.node_state.journal import apply_event, fold_journal
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import command_messages, events, run_requests
from clusterctl.agent.supervisor import control_server, forkserver_manager, gpu_claims, sampling, workers
from clusterctl.agent.supervisor.attempt import Attempt

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir


TICK_S = 0.25
_UNATTENDED_TIMEOUT_S = 600.0
"""A supervisor without workers ends after this many seconds without a controller; the next command starts a new one."""
_SLOW_TICK_S = 1.0
_HEALTH_DELAY_S = 5.0
_LAST_FSYNC_S = 2.0
_TOUCH_INTERVAL_S = 86400.0
_REPEAT_LOG_AFTER_S = 60.0
_RESERVE_UPDATES_PER_TICK = 10
"""While an output grows fast, the supervisor extends the reserved disk space this many times per tick."""


class Supervisor:
    """Starts, watches and ends the workers of one run on this node."""

    def __init__(self, run: RunDir, lock: supervisor_lock.SupervisorLock) -> None:
        """Read the state of the run from the files of the run directory, and adopt the newest attempt."""
        self._run, self._supervisor_lock = run, lock
        self._loop = EventLoop(self._log_failure)
        self._last_failure = ("", 0.0)
        self._fsync_queue = fsync_queue.FsyncQueue(self._loop)
        # Protect the agent's archive from clean-up too, because later imports read the archive.
        self._cleanup_locks = [
            *tmpfiles_protection.lock_against_cleanup(run.path),
            *tmpfiles_protection.lock_against_cleanup(os.path.dirname(helper_process.find_import_root())),
        ]
        self._markers = run_processes.make_run_markers(run)
        self._journal, self._replaced = journal.JournalWriter(run.journal_file), False
        self._state = fold_journal(journal.read_journal(run.journal_file))
        self._claims = gpu_claims.GpuClaims(run.run, run.node, waiters=self._list_waiter_pids)
        self._ports = port_reservation.ReservedPorts()
        self._keeper, self._has_reported_keeper = Keeper(run.file_path("container")), False
        self._samples = sampling.SampleFile(run.samples_file)
        self._attempt: Attempt | None = None
        self._activity: sampling.ActivityMonitor | None = None
        self._health_sampler: sampling.SamplingChild | None = None
        self._control_server = control_server.ControlServer(self._loop, self._handle_request, self._log)
        self._forking = forkserver_manager.ForkServerManager(self._loop, run, self._markers, self._record)
        self._has_reported_sampler = False
        self._is_ending, self._last_lease_at = False, fencing.read_lease_clock()
        self._commands: dict[str, Callable[[dict[str, Any]], control_server.Reply]] = {
            command_messages.Command.PREPARE.value: self._prepare,
            command_messages.Command.START.value: self._start,
            command_messages.Command.STOP.value: self._stop,
            command_messages.Command.FINISH.value: self._finish,
            command_messages.Command.REPLICATED.value: self._record_replicated,
        }
        self._adopt_attempt()

    def _list_waiter_pids(self) -> list[int]:
        return [who.pid for who in run_processes.list_waiters(self._run) if proc.is_alive(who)]

    def run_event_loop(self) -> None:
        """Handle requests, timers and ended children until the run is finished or this supervisor has to end."""
        self._control_server.listen(self._supervisor_lock.listener)
        self._loop.on_child_exit(self._reap)
        self._loop.call_repeatedly(TICK_S, self._tick)
        self._loop.call_repeatedly(_SLOW_TICK_S, self._slow_tick)
        self._loop.call_later(_SLOW_TICK_S, self._touch_files)
        self._loop.call_repeatedly(_TOUCH_INTERVAL_S, self._touch_files)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._end_after_last_worker())
        self._reap()
        self._loop.run()
        for sampler in (self._health_sampler, self._activity):
            if sampler is not None:
                sampler.stop()
        self._fsync_queue.flush_and_close(_LAST_FSYNC_S)
        if not self._replaced:
            self._journal.close()

    def _end_after_last_worker(self) -> None:
        """Handle SIGTERM: end this supervisor after the last worker has ended."""
        self._is_ending = True

    # --- the journal

    def _record(self, event: events.Event) -> events.Stamp:
        stamp = self._journal.append(event)
        if isinstance(event, events.Stopping) and event.reason == run_requests.StopReason.FENCE.value:
            # Perhaps no controller ever returns, so remove the secrets now.
            secrets.remove_secrets(self._run)
            self._forking.close()
        apply_event(self._state, stamp, event)
        # The fsync follows later; readers of the journal already see the event.
        self._fsync_queue.add(self._run.journal_file)
        return stamp

    def _alarm(self, code: str, message: str) -> None:
        self._record(events.Alarm(max(self._state.attempt, 0), code, message))

    def _log(self, text: str) -> None:
        # The write fails if the disk is full.
        with contextlib.suppress(OSError):
            os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n".encode("utf-8", "replace"))

    def _log_failure(self) -> None:
        """Log the current exception; log a repeated exception at most once a minute."""
        text, now = traceback.format_exc(), time.monotonic()
        if text != self._last_failure[0] or now - self._last_failure[1] > _REPEAT_LOG_AFTER_S:
            self._last_failure = text, now
            self._log(text)

    # --- adoption

    def _adopt_attempt(self) -> None:
        """Continue an attempt that an earlier supervisor of this run began."""
        state = self._state
        if state.seq == 0 or state.finished is not None:
            return
        self._record(events.RunAdopted(state.attempt, os.getpid()))
        self._keeper.adopt()
        if state.attempt < 0:
            return
        prepare, python = workers.read_prepare(self._run, state)
        attempt = self._make_attempt(prepare)
        attempt.python = python
        with contextlib.suppress(gpu_claims.GpuClaimError):
            self._claims.claim(prepare.gpus)
        self._announce(prepare)
        if state.swept is not None:
            self._attempt = attempt
            attempt.shutdown.is_swept, attempt.shutdown.remaining = True, state.swept.remaining
            return
        self._set_attempt(attempt)
        attempt.reopen_outputs()
        self._adopt_workers(attempt)
        if state.stopping is not None:
            attempt.shutdown.resume_stop(*state.stopping)
        attempt.poll_exits()

    def _announce(self, prepare: run_requests.PrepareArguments) -> None:
        since = time.time() if self._state.began_at is None else self._state.began_at
        whose = {"name": prepare.name, "head": prepare.head, "workers": len(prepare.ranks)}
        self._claims.announce({**whose, "since": round(since)})

    def _adopt_workers(self, attempt: Attempt) -> None:
        started = workers.read_start_record(self._run, self._state)
        if started is None:
            return
        attempt.started = True
        attempt.watch_ports(self._state.ports)
        ranks, attempt.known_processes.cgroup = started
        for rank, local_rank in ranks:
            worker = workers.read_worker(self._run, self._state, rank, local_rank)
            if worker is not None:
                attempt.adopt_worker(worker, self._state)

    def _make_attempt(self, prepare: run_requests.PrepareArguments) -> Attempt:
        self._claims.head = prepare.head
        resources = (self._claims, self._ports, self._keeper)
        return Attempt(self._loop, self._run, self._markers, prepare, self._record, *resources, self._state.dropped)

    def _set_attempt(self, attempt: Attempt) -> None:
        self._attempt, self._has_reported_keeper = attempt, False
        if self._activity is not None:
            self._activity.stop()
        self._activity = sampling.ActivityMonitor(self._loop, self._run, attempt, self._samples)
        seconds = attempt.prepare.health_seconds
        if seconds > 0 and self._health_sampler is None:
            # Calls of the GPU driver may hang, so a child process makes these calls.
            self._health_sampler = sampling.SamplingChild(
                self._loop,
                lambda: helper_process.start_agent_command("sampler", str(seconds)),
                lambda sample: self._samples.append(max(self._state.attempt, 0), "health", sample),
                self._report_sampler_failure,
            )
            # Start the sampler later, because it would compete with the starting workers for the processor.
            self._loop.call_later(min(_HEALTH_DELAY_S, seconds), self._health_sampler.start)

    # --- samples and timers

    def _report_sampler_failure(self, error: OSError | None) -> None:
        """Record, once per supervisor, that the sampler of GPUs and machine does not run."""
        if not self._has_reported_sampler:
            self._has_reported_sampler = True
            text = "the sampler of GPUs and machine has ended; the supervisor starts it again"
            if error is not None:
                text = f"cannot start the sampler of GPUs and machine: {error.strerror}; the supervisor tries again"
            self._alarm("sampler_died", text)

    def _tick(self) -> None:
        attempt = self._attempt
        if self._activity is not None:
            self._activity.restart_if_workers_changed()
        if attempt is None or attempt.shutdown.is_swept:
            return
        if attempt.outputs.update_files():
            for step in range(1, _RESERVE_UPDATES_PER_TICK):
                self._loop.call_later(step * TICK_S / _RESERVE_UPDATES_PER_TICK, attempt.outputs.extend_reserves)
        attempt.poll_exits()
        attempt.stop_if_port_is_taken()

    def _slow_tick(self) -> None:
        self._journal.flush()
        attempt = self._attempt
        active = None if attempt is None or attempt.shutdown.is_swept else attempt
        if attempt is not None:
            self._restore_lock_and_socket()
        if active is not None:
            active.record_process_groups()
        if active is not None and active.living_workers and active.prepare.container and not self._keeper.is_alive():
            self._report_ended_keeper()
        if attempt is not None and attempt.shutdown.remaining:
            attempt.shutdown.recheck_remaining_processes()
        # If the lease file was removed, keep the time of its last read.
        self._last_lease_at = fencing.read_last_renewal(self._run.lease_file) or self._last_lease_at
        age = fencing.read_lease_clock() - self._last_lease_at
        if active is not None and active.shutdown.stopped_at is None:
            limit = active.prepare.stop_after
            if limit is not None and age > limit:
                active.shutdown.stop(active.prepare.grace, run_requests.StopReason.FENCE.value)
        busy = active is not None and active.started
        # Without an attempt, this supervisor has nothing to do once its client has gone.
        if (
            not busy
            and self._control_server.connection_count == 0
            and (self._is_ending or attempt is None or age > _UNATTENDED_TIMEOUT_S)
        ):
            self._loop.stop()

    def _report_ended_keeper(self) -> None:
        if not self._has_reported_keeper:
            self._has_reported_keeper = True
            text = "another program has ended the container of this run: its workers may lack files from now on"
            self._alarm("container_ended", text)

    def _restore_lock_and_socket(self) -> None:
        """Make the lock file and the socket again if another process has removed them."""
        try:
            replaced = self._supervisor_lock.restore()
        except BlockingIOError:
            # While the lock file was missing, another supervisor has locked a new lock file and adopted the workers.
            self._log("this supervisor ends, because another supervisor has adopted the run")
            self._replaced = True
            self._loop.stop()
        except OSError:
            self._log_failure()
        else:
            if replaced is not None:
                self._loop.remove_descriptor(replaced.fileno())
                replaced.close()
                self._control_server.listen(self._supervisor_lock.listener)

    def _touch_files(self) -> None:
        """Touch all files that the run will need, so that systemd-tmpfiles does not remove them as old files."""
        agent = helper_process.find_import_root()
        paths = [self._run.path, inject.get_shim_folder(self._run.root), *self._claims.paths]
        is_unpacked = os.path.isfile(f"{agent}.pyz")
        tmpfiles_protection.touch_in_child([*paths, agent, f"{agent}.pyz"] if is_unpacked else paths)

    def _reap(self) -> None:
        """Reap all children: waiters, orphans of the run, and helpers."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended[pid] = status
        if self._attempt is not None:
            self._attempt.store_wait_statuses(ended)

    def _handle_request(self, frame: dict[str, Any]) -> control_server.Reply:
        command, arguments = frame.get("cmd"), frame.get("args", {})
        fencing.check_epoch(self._run.epoch_file, int(frame.get("epoch") or 0))
        if command in self._commands:
            return self._commands[command](arguments)
        raise command_messages.RequestError(
            command_messages.ErrorKind.BAD_REQUEST, f"the supervisor knows no command {command!r}"
        )

    # --- commands

    def _prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        prepare = run_requests.parse_dataclass(run_requests.PrepareArguments, arguments)
        if self._state.finished is not None:
            raise command_messages.make_refused_error(f"run {self._run.run} has already ended on this node")
        attempt = self._attempt
        if attempt is not None and not attempt.shutdown.is_swept:
            if prepare.attempt != attempt.number or attempt.shutdown.stopped_at is not None:
                raise command_messages.make_refused_error(
                    f"attempt {attempt.number} of run {self._run.run} has not ended on this node"
                )
            return self._build_prepared_reply(attempt)
        if prepare.attempt <= self._state.attempt:
            raise command_messages.make_refused_error(
                f"attempt {prepare.attempt} of run {self._run.run} has already ended on this node"
            )
        attempt = self._make_attempt(prepare)
        attempt.prepare_node()
        self._announce(prepare)
        self._fsync_queue.add(self._run.prepare_file)
        fencing.renew_lease(self._run.lease_file)
        self._set_attempt(attempt)
        image = prepare.container["image"] if prepare.container else ""
        self._record(events.Prepared(prepare.attempt, list(attempt.ports.attempt_ports), attempt.python, image))
        self._forking.prepare_forkserver(attempt)
        return self._build_prepared_reply(attempt)

    def _build_prepared_reply(self, attempt: Attempt) -> dict[str, Any]:
        return {"ports": list(self._state.ports), "run_dir": self._run.path, "python": attempt.python}

    def _start(self, arguments: dict[str, Any]) -> control_server.Reply:
        start = run_requests.parse_dataclass(run_requests.StartArguments, arguments)
        attempt = self._attempt
        if attempt is None or attempt.number != start.attempt:
            raise command_messages.make_refused_error(
                f"attempt {start.attempt} of run {self._run.run} is not prepared on this node"
            )
        start = secrets.store_or_restore_secrets(self._run, start, functools.partial(self._alarm, "memory"))
        started = functools.partial(self._fsync_queue.add, self._run.start_file(attempt.number))
        return self._forking.run_when_ready(functools.partial(attempt.start, start), started)

    def _stop(self, arguments: dict[str, Any]) -> dict[str, Any]:
        stop = run_requests.parse_dataclass(run_requests.StopArguments, arguments)
        if self._attempt is not None:
            self._attempt.shutdown.stop(stop.grace, stop.reason)
            self._forking.run_deferred_starts()
        return {}

    def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        attempt = self._attempt
        if attempt is not None and not attempt.shutdown.is_swept:
            if attempt.started or attempt.shutdown.has_begun:
                number = attempt.number
                raise command_messages.make_refused_error(
                    f"attempt {number} of run {self._run.run} has not ended on this node"
                )
            # No worker was started here, because the start failed on another node.
            attempt.shutdown.record_swept([])
        if self._state.finished is None:
            self._record(events.Finished(str(arguments.get("state", "")), int(arguments.get("exit_code") or 0)))
        self._forking.close()
        self._claims.release()
        self._ports.release()
        self._keeper.remove()
        if self._activity is not None:
            self._activity.stop()
        secrets.remove_tmpfs_files(self._run, self._state.attempt + 1)
        self._loop.call_later(0.05, self._loop.stop)
        return {}

    def _record_replicated(self, arguments: dict[str, Any]) -> dict[str, Any]:
        for name, offset in arguments.get("offsets", {}).items():
            if self._attempt is not None:
                self._attempt.outputs.record_replicated_file(name, int(offset))
        return {}


READY = b"ready\n"

TAKEN = b"taken\n"


def fork_supervisor(run: RunDir) -> tuple[int, int]:
    """Fork a supervisor that outlives this process. The calling process must have one thread.

    A double fork and a new POSIX session make the supervisor independent of this process. The supervisor executes no
    new program, because a fork that has all modules loaded starts fast.

    Returns:
        The pid of a short-lived child, and a descriptor of the outcome. The outcome is READY, TAKEN if another
        supervisor runs, or no bytes if the start failed.
    """
    pid, read, write = syscalls.fork_with_pipes()
    if pid == 0:
        try:
            os.setsid()
            if os.fork() == 0:
                _run_supervisor(run, write)
        finally:
            os._exit(0)
    os.close(write)
    return pid, read


def _run_supervisor(run: RunDir, report: int) -> None:
    try:
        _detach_from_parent(run, {report})
        try:
            lock = supervisor_lock.SupervisorLock(run)
        except BlockingIOError:
            os.write(report, TAKEN)
            return
        supervisor = Supervisor(run, lock)
        with contextlib.suppress(OSError):
            os.write(report, READY)
        os.close(report)
        # `serve` has frozen only what it had loaded. A collection would copy the rest, which waiters and sampler share.
        gc.freeze()
        supervisor.run_event_loop()
        lock.release()
    except BaseException:
        traceback.print_exc()
        raise


def _detach_from_parent(run: RunDir, keep: set[int]) -> None:
    """Give up the terminal, working directory, descriptors and signal handlers of the parent."""
    run.make()
    run.make_tmpfs_dir()
    os.chdir("/")
    spawn.reset_signals()
    spawn.redirect_stdio(stderr=os.open(run.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
    spawn.close_descriptors(keep)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    spawn.disable_own_core_dumps()
    syscalls.become_subreaper()
    syscalls.set_process_name("clusterctl-supv")
    # Other users see the title, so it must not contain run and node: these names are markers of the run's processes.
    syscalls.set_process_title(f"clusterctl-agent supervise {run.short_key}")
