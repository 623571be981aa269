"""The end of an attempt on this node: stop request, termination, wait for GPU memory, and the final event.

A child waits for GPU memory, because a broken driver must not block the end of the attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import cgroup, helper_process, proc
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.processes import run_processes, termination
from clusterctl.agent.protocol import events

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, Timer
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.processes.run_processes import KnownProcesses
    from clusterctl.agent.protocol.process_types import LeftoverProcess, SurvivingProcess
    from clusterctl.agent.supervisor.workers import Worker


_GPU_WAIT_S = 10.0
"""Seconds in which GPU memory may become free."""
_FIRST_ANSWER_S = 6.0
"""Seconds in which the driver may give its first answer; the sampler keeps it open, so it need not start up."""
_GPU_WAIT_SLACK_S = 5.0
_GIB = 1024**3

Tell = Callable[[str, "int | None"], None]


class GpuMemoryWait:
    """One wait. Calls `on_message` for each GPU that is not free, then `on_done`, exactly once and in time."""

    def __init__(
        self, loop: EventLoop, gpus: list[int], run: str, on_message: Tell, on_done: Callable[[], None]
    ) -> None:
        self._loop, self._on_message, self._on_done = loop, on_message, on_done
        self._output = b""
        try:
            self._pid, self._fd = helper_process.start_agent_command(
                "gpu-memory-wait", ",".join(map(str, gpus)), str(_GPU_WAIT_S), run
            )
        except OSError as error:
            on_message(f"nobody knows whether GPU memory is free: {error.strerror}", None)
            on_done()
            return
        self._timer: Timer = loop.after(_FIRST_ANSWER_S, self._time_out)
        loop.on_readable(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        self._timer.cancel()
        self._output += data
        if data:
            self._timer = self._loop.after(_GPU_WAIT_S + _GPU_WAIT_SLACK_S, self._time_out)
        else:
            self._end(_parse_gpu_messages(self._output))

    def _time_out(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._end([("the GPU driver does not answer: nobody knows whether GPU memory is free", None)])

    def _end(self, messages: list[tuple[str, int | None]]) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)
        for message, gpu in messages:
            self._on_message(message, gpu)
        self._on_done()


def _parse_gpu_messages(output: bytes) -> list[tuple[str, int | None]]:
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        return [("the look at GPU memory died: nobody knows whether it is free", None)]
    if answer["status"] == "error":
        return [(f"nobody knows whether GPU memory is free: {answer['reason']}", None)]
    return [(_format_gpu_message(gpu), int(gpu["gpu"])) for gpu in answer["gpus"]]


def _format_gpu_message(gpu: dict[str, Any]) -> str:
    sizes = f"{gpu['used'] / _GIB:.1f} of {gpu['total'] / _GIB:.0f} GiB still in use"
    if not gpu["procs"]:
        return f"{sizes}, by no process that the driver names"
    return f"{sizes}, held by {', '.join(map(_format_gpu_process, gpu['procs'][:4]))}"


def _format_gpu_process(process: dict[str, Any]) -> str:
    if not process["visible"]:
        return f"pid {process['pid']}, which cannot be seen from here (a container, or another user's)"
    run = f", run {process['run']}" if process["run"] else ""
    return f"pid {process['pid']} ({process['comm']}, {proc.find_user_name(process['user'])}{run})"


_MAX_EXIT_WAITS = 1000
"""Number of waits, 10 ms each, for exit records of the waiters, which take long on a full disk."""


@dataclass(frozen=True)
class ShutdownHooks:
    """What a shutdown needs from its attempt.

    Attributes:
        list_gpus: Device indices whose memory must become free; empty if nothing was started.
        poll_exits: Finds the workers that have ended.
        list_living: Returns the workers whose exit was not noticed yet.
        close: Closes their outputs.
        rank_by_pid: The rank of each worker by its pid, which is that of its POSIX session.
        on_stop: Takes note of what is there before the first stop signal goes out.
    """

    record: Callable[[events.Event], events.Stamp]
    list_gpus: Callable[[], list[int]]
    poll_exits: Callable[[], None]
    list_living: Callable[[], list[Worker]]
    close: Callable[[], None]
    rank_by_pid: Callable[[], dict[int, int]]
    on_stop: Callable[[], None]


class AttemptShutdown:
    """The shutdown of one attempt on this node.

    Attributes:
        stopped_at: Monotonic time of the stop signal, `None` before; 0 if a fence ended it at an unknown time.
        is_swept: Nothing of the attempt is left except `remaining`.
        remaining: Processes that could not be ended: `[{pid, start_time, command, why}]`.
    """

    def __init__(
        self,
        loop: EventLoop,
        run: str,
        markers: RunMarkers,
        attempt: int,
        known_processes: KnownProcesses,
        parts: ShutdownHooks,
    ) -> None:
        self._loop, self._run, self._markers, self._number, self._known_processes = (
            loop,
            run,
            markers,
            attempt,
            known_processes,
        )
        self._hooks = parts
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

    def was_requested(self, rank: int, latest: float) -> bool:
        """Return whether the stop signal ended a worker that was gone at `latest` (monotonic seconds)."""
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
                worker.rank for worker in self._hooks.list_living() if proc.is_dying(worker.identity)
            }
            self.stopped_at = now
            self._hooks.on_stop()
            self._hooks.record(events.Stopping(self._number, reason, grace, sorted(self._exiting_ranks)))
        # The event took time to write; the grace starts now.
        self.terminate(time.monotonic() + grace)

    def record_fence(self, since: float, reason: str, grace: float) -> None:
        """Record that waiters have ended the attempt while no supervisor was there."""
        if self.stopped_at is None:
            self.stopped_at = since
            self._hooks.record(events.Stopping(self._number, reason, grace))

    def resume(self, since: float, event: events.Stopping) -> None:
        """Continue a stop that an earlier supervisor began."""
        self.stopped_at, self._exiting_ranks = since, set(event.exiting_ranks)
        self.terminate(since + event.grace)

    def terminate(self, kill_at: float, hold_s: float = 0.0) -> None:
        """Start the termination: no signal for `hold_s` seconds, and SIGKILL at `kill_at` (monotonic seconds)."""
        if self._terminator is None:
            told = (self._finish_termination, self._report_slow_end)
            self._terminator = termination.Terminator(
                self._loop,
                self._markers,
                self._known_processes,
                kill_at,
                *told,
                hold_s=hold_s,
                on_late=self._report_late,
            )
        else:
            self._terminator.shorten(kill_at)

    def check_now(self) -> None:
        """Run the next step of the termination now, because a process has ended."""
        if self._terminator is not None:
            self._terminator.check_now()

    def close(self, remaining: list[SurvivingProcess]) -> None:
        """Record the end of the attempt with the processes that remain."""
        strays = self._known_processes.processes - set(self._known_processes.workers)
        self._report_foreign_tagged()
        if not remaining:
            self._hooks.close()
            cgroup.remove_cgroup(self._known_processes.cgroup)
        self.is_swept, self.remaining = True, remaining
        on_late = (self._leftovers, self._past_grace)
        self._hooks.record(events.Swept(self._number, len(strays), remaining, *on_late))

    def _report_late(self, found: list[proc.ProcessStat], killed: bool) -> None:
        named = run_processes.describe_leftovers(found, self._hooks.rank_by_pid())
        if not killed:
            self._leftovers = named
        elif self.stopped_at is not None:
            self._past_grace = named

    def check_remaining(self) -> None:
        """Record a clean end once the remaining processes are gone, because the kernel or a mount has released them."""
        if not any(proc.is_alive(ProcessIdentity(entry["pid"], entry["start_time"])) for entry in self.remaining):
            self.close([])

    def _finish_termination(self, remaining: list[SurvivingProcess]) -> bool:
        """Close the attempt when every exit is recorded and nothing is left that can be ended."""
        self._hooks.poll_exits()
        left = {entry["pid"] for entry in remaining}
        if self._exit_waits < _MAX_EXIT_WAITS and any(
            worker.identity.pid not in left for worker in self._hooks.list_living()
        ):
            # Its waiter is about to write the exit file.
            self._exit_waits += 1
            return False
        gpus = self._hooks.list_gpus()
        if remaining or not gpus:
            self.close(remaining)
        else:
            # The next attempt or run needs the GPU memory.
            GpuMemoryWait(self._loop, gpus, self._run, self._report_gpu_memory, lambda: self.close([]))
        return True

    def _report_gpu_memory(self, message: str, gpu: int | None) -> None:
        self._hooks.record(events.Alarm(self._number, events.GPU_MEMORY, message, gpu=gpu))

    def _report_slow_end(self, found: list[proc.ProcessStat]) -> None:
        names = ", ".join(f"{process.pid} ({process.comm})" for process in found[:4])
        self._alarm("slow_end", f"the kernel is still taking apart what was killed, and is waited for: pid {names}")

    def _report_foreign_tagged(self) -> None:
        """Report processes of other users that carry the run's tag but do not belong to it; they are not touched."""
        names = [
            f"pid {who.pid} of uid {proc.read_uid(who.pid)}"
            for who in self._known_processes.foreign_tagged
            if proc.is_alive(who)
        ]
        if names:
            text = f"marked as of this run, but none of its processes, and left alone: {', '.join(names[:4])}"
            self._alarm("forged", text)

    def _alarm(self, code: str, message: str) -> None:
        self._hooks.record(events.Alarm(self._number, code, message))
