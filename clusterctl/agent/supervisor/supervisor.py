"""The supervisor: one for each run and node. It plans nothing; it starts, watches, writes down, stops and sweeps.

It may be killed at any moment: all that matters is on the disk or in a waiter, and the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
import traceback
from typing import TYPE_CHECKING, Any

from clusterctl.agent import inject
from clusterctl.agent.linux import helper_process, ports, proc
from clusterctl.agent.linux.event_loop import EventLoop
from clusterctl.agent.node_state import fencing, fsync_queue, journal, secrets, supervisor_lock, tmpfiles
from clusterctl.agent.node_state.journal import apply_event, fold_journal
from clusterctl.agent.processes import run_markers, supervisor_lookup
from clusterctl.agent.protocol import commands, dataclass_json, events, request_errors, requests
from clusterctl.agent.supervisor import adoption, claims, listening, sampling
from clusterctl.agent.supervisor.attempt import Attempt
from clusterctl.agent.supervisor.forkserver import forking

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.sample_types import HealthSample

TICK_SECONDS = 0.25
_UNATTENDED_SECONDS = 600.0
"""After so long without a controller, a supervisor with nothing to watch ends; the next command starts another."""
_SLOW_SECONDS = 1.0
_LAST_SYNC_SECONDS = 2.0
_TOUCH_SECONDS = 86400.0
_SAY_AGAIN_SECONDS = 60.0
_STEPS = 10
"""How many times a tick the reserve is looked at while an output grows fast."""


class Supervisor:
    """Everything of one run on this node."""

    def __init__(self, run: RunDir, place: supervisor_lock.SupervisorLock) -> None:
        """Go on from what the run directory says."""
        self._run, self._supervisor_lock = run, place
        self._loop = EventLoop(self._failed)
        self._said = ("", 0.0)
        self._fsync_queue = fsync_queue.FsyncQueue(self._loop)
        # The folder of the archive, too: what is imported late comes from there.
        self._kept = [
            *tmpfiles.lock_against_cleanup(run.path),
            *tmpfiles.lock_against_cleanup(os.path.dirname(helper_process.find_import_root())),
        ]
        self._markers = run_markers.make_run_markers(run)
        self._journal, self._replaced = journal.JournalWriter(run.journal), False
        self._state = fold_journal(journal.read_journal(run.journal))
        self._claims = claims.Claims(run.run, run.node, guards=self._waiters)
        self._ports = ports.ReservedPorts()
        self._samples = sampling.Samples(run.samples)
        self._attempt: Attempt | None = None
        self._activity: sampling.Activity | None = None
        self._health: sampling.Health | None = None
        self._peers = listening.Peers(self._loop, self._do, self._say)
        self._forking = forking.Forking(self._loop, run, self._markers, self._record)
        self._ending, self._heard = False, fencing.read_lease_clock()
        self._commands = {
            commands.Command.PREPARE: self._prepare,
            commands.Command.START: self._start,
            commands.Command.STOP: self._stop,
            commands.Command.FINISH: self._finish,
        }
        self._adopt()

    def _waiters(self) -> list[int]:
        return [who.pid for who in supervisor_lookup.list_waiters(self._run) if proc.is_alive(who)]

    def serve(self) -> None:
        """Work until the run is finished."""
        self._peers.listen(self._supervisor_lock.listener)
        self._loop.on_children(self._reap)
        self._loop.every(TICK_SECONDS, self._tick)
        self._loop.every(_SLOW_SECONDS, self._slow_tick)
        self._loop.after(_SLOW_SECONDS, self._touch)
        self._loop.every(_TOUCH_SECONDS, self._touch)
        signal.signal(signal.SIGTERM, lambda _number, _frame: self._end_soon())
        self._reap()
        self._loop.run()
        for sampler in (self._health, self._activity):
            if sampler is not None:
                sampler.stop()
        self._fsync_queue.flush_and_close(_LAST_SYNC_SECONDS)
        if not self._replaced:
            self._journal.close()

    def _end_soon(self) -> None:
        """End when nothing is left to watch: the machine goes down, or somebody wants us gone."""
        self._ending = True

    # --- the journal

    def _record(self, event: events.Event) -> events.Stamp:
        stamp = self._journal.append(event)
        if isinstance(event, events.Stopping) and event.reason == requests.StopReason.FENCE.value:
            # Nobody may ever come back for them.
            secrets.remove_secrets(self._run)
            self._forking.close()
        apply_event(self._state, stamp, event)
        # Who follows has seen it already.
        self._fsync_queue.add(self._run.journal)
        return stamp

    def _alarm(self, code: str, message: str) -> None:
        self._record(events.Alarm(max(self._state.attempt, 0), code, message))

    def _say(self, text: str) -> None:
        # On a full disk there is no room for it either.
        with contextlib.suppress(OSError):
            os.write(2, f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n".encode("utf-8", "replace"))

    def _failed(self) -> None:
        """Say what an action failed with; what goes on failing in the same way is said once a minute."""
        text, now = traceback.format_exc(), time.monotonic()
        if text != self._said[0] or now - self._said[1] > _SAY_AGAIN_SECONDS:
            self._said = text, now
            self._say(text)

    # --- adoption

    def _adopt(self) -> None:
        """Go on where the last supervisor of this run ended, if there was one."""
        state = self._state
        if state.seq == 0 or state.finished is not None:
            return
        self._record(events.Adopted(state.attempt, os.getpid()))
        if state.attempt < 0:
            return
        prepare, python = adoption.prepared(self._run, state)
        attempt = self._new_attempt(prepare)
        attempt.python = python
        with contextlib.suppress(claims.ClaimError):
            self._claims.take(prepare.gpus)
        if state.swept is not None:
            self._attempt = attempt
            attempt.ending.swept, attempt.ending.remaining = True, state.swept.remaining
            return
        self._set_attempt(attempt)
        attempt.reopen_outputs()
        self._adopt_workers(attempt)
        if state.stopping is not None:
            attempt.ending.resume(*state.stopping)
        attempt.look()

    def _adopt_workers(self, attempt: Attempt) -> None:
        begun = adoption.started(self._run, self._state)
        if begun is None:
            return
        attempt.started = True
        attempt.watch_ports(self._state.ports)
        attempt.known_processes.cgroup = begun.cgroup
        for rank, local_rank in begun.places:
            worker = adoption.worker(self._run, self._state, rank, local_rank)
            if worker is not None:
                attempt.adopt(worker, self._state)

    def _new_attempt(self, prepare: requests.Prepare) -> Attempt:
        kept = (self._claims, self._ports)
        return Attempt(self._loop, self._run, self._markers, prepare, self._record, *kept, self._state.dropped)

    def _set_attempt(self, attempt: Attempt) -> None:
        self._attempt = attempt
        if self._activity is not None:
            self._activity.stop()
        self._activity = sampling.Activity(self._loop, self._run, attempt, self._samples)
        seconds = attempt.prepare.health_seconds
        if seconds > 0 and self._health is None:
            self._health = sampling.Health(self._loop, seconds, self._health_sample, self._sampler_died)

    # --- samples and time

    def _health_sample(self, values: HealthSample) -> None:
        self._samples.write(max(self._state.attempt, 0), "health", values)

    def _sampler_died(self, message: str) -> None:
        self._alarm("sampler_died", message)

    def _tick(self) -> None:
        attempt = self._attempt
        if self._activity is not None:
            self._activity.keep_up()
        if attempt is None or attempt.ending.swept:
            return
        if attempt.outputs.look():
            for step in range(1, _STEPS):
                self._loop.after(step * TICK_SECONDS / _STEPS, attempt.outputs.keep_up)
        attempt.look()
        attempt.look_at_ports()

    def _slow_tick(self) -> None:
        self._journal.flush()
        attempt = self._attempt
        if attempt is not None and not attempt.ending.swept:
            self._keep_seat()
            attempt.look_at_groups()
        if attempt is not None and attempt.ending.remaining:
            attempt.ending.look_at_remaining()
        # Where somebody has removed the file: since it was last there.
        self._heard = fencing.read_lease(self._run.lease) or self._heard
        age = fencing.read_lease_clock() - self._heard
        if attempt is not None and not attempt.ending.swept:
            limit = attempt.prepare.stop_after
            if limit is not None and age > limit and attempt.ending.since is None:
                attempt.ending.stop(attempt.prepare.grace, requests.StopReason.FENCE.value)
        busy = attempt is not None and attempt.started and not attempt.ending.swept
        # Without an attempt there is nothing to lose: who asked for one has left, or was refused.
        if not busy and self._peers.count == 0 and (self._ending or attempt is None or age > _UNATTENDED_SECONDS):
            self._loop.stop()

    def _keep_seat(self) -> None:
        """Stay where the next command looks for us, although somebody has removed files of the run."""
        try:
            replaced = self._supervisor_lock.restore()
        except BlockingIOError:
            # It found nobody at the seat and has taken everything in: two must not act.
            self._say("another supervisor has taken over")
            self._replaced = True
            self._loop.stop()
        except OSError:
            self._failed()
        else:
            if replaced is not None:
                self._loop.forget(replaced.fileno())
                replaced.close()
                self._peers.listen(self._supervisor_lock.listener)

    def _touch(self) -> None:
        """Touch everything that the run will need, so that who tidies up does not take it for forgotten."""
        archive = helper_process.find_import_root()
        paths = [self._run.path, inject.folder(self._run.root), *self._claims.paths]
        tmpfiles.touch_in_child([*paths, archive] if os.path.isfile(archive) else paths)

    def _reap(self) -> None:
        """Take in the ends of all children: waiters, orphans of the run, and helpers."""
        ended: dict[int, int] = {}
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended[pid] = status
        if self._attempt is not None:
            self._attempt.reaped(ended)

    def _do(self, frame: dict[str, Any]) -> listening.Answer:
        command, arguments = frame.get("cmd"), frame.get("args", {})
        fencing.check_epoch(self._run.epoch, int(frame.get("epoch") or 0))
        if command == commands.Command.REPLICATED.value:
            self._replicated(arguments.get("offsets", {}))
            return {}
        for name, action in self._commands.items():
            if command == name.value:
                return action(arguments)
        raise request_errors.RequestError(
            commands.ErrorKind.BAD_REQUEST, f"the supervisor knows no command {command!r}"
        )

    # --- commands

    def _prepare(self, arguments: dict[str, Any]) -> dict[str, Any]:
        prepare = dataclass_json.parse_dataclass(requests.Prepare, arguments)
        if self._state.finished is not None:
            raise request_errors.make_refused_error(f"run {self._run.run} is finished on this node")
        attempt = self._attempt
        if attempt is not None and not attempt.ending.swept:
            if prepare.attempt != attempt.number or attempt.ending.since is not None:
                raise request_errors.make_refused_error(
                    f"attempt {attempt.number} of run {self._run.run} has not ended on this node"
                )
            return self._prepared(attempt)
        if prepare.attempt <= self._state.attempt:
            raise request_errors.make_refused_error(
                f"attempt {prepare.attempt} of run {self._run.run} is over on this node"
            )
        attempt = self._new_attempt(prepare)
        attempt.make_ready()
        self._fsync_queue.add(self._run.prepare)
        fencing.touch_lease(self._run.lease)
        self._set_attempt(attempt)
        self._record(events.Prepared(prepare.attempt, list(attempt.ports.numbers)))
        squatted = self._run.describe_tmpfs_problem()
        if squatted is not None:
            self._alarm("memory", squatted)
        self._forking.prepare(attempt)
        return self._prepared(attempt)

    def _prepared(self, attempt: Attempt) -> dict[str, Any]:
        return {"ports": list(self._state.ports), "run_dir": self._run.path, "python": attempt.python}

    def _start(self, arguments: dict[str, Any]) -> listening.Answer:
        start = dataclass_json.parse_dataclass(requests.Start, arguments)
        attempt = self._attempt
        if attempt is None or attempt.number != start.attempt:
            raise request_errors.make_refused_error(
                f"attempt {start.attempt} of run {self._run.run} is not prepared on this node"
            )
        start = secrets.store_or_restore_secrets(self._run, start, functools.partial(self._alarm, "memory"))
        started = functools.partial(self._fsync_queue.add, self._run.start(attempt.number))
        return self._forking.when_ready(functools.partial(attempt.start, start), started)

    def _stop(self, arguments: dict[str, Any]) -> dict[str, Any]:
        stop = dataclass_json.parse_dataclass(requests.Stop, arguments)
        if self._attempt is not None:
            self._attempt.ending.stop(stop.grace, stop.reason)
            self._forking.run_waiting_starts()
        return {}

    def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        if self._attempt is not None:
            # Where nothing was started there is nothing to wait for: a start that failed elsewhere is undone like this.
            self._attempt.abandon()
            if not self._attempt.ending.swept:
                number = self._attempt.number
                raise request_errors.make_refused_error(
                    f"attempt {number} of run {self._run.run} has not ended on this node"
                )
        if self._state.finished is None:
            self._record(events.Finished(str(arguments.get("state", "")), int(arguments.get("exit_code") or 0)))
        self._forking.close()
        self._claims.release()
        self._ports.release()
        if self._activity is not None:
            self._activity.stop()
        secrets.remove_tmpfs_files(self._run, self._state.attempt + 1)
        self._loop.after(0.05, self._loop.stop)
        return {}

    def _replicated(self, offsets: dict[str, int]) -> None:
        if self._attempt is None:
            return
        for name, offset in offsets.items():
            self._attempt.outputs.replicated_file(name, int(offset))
