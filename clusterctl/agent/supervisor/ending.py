"""How an attempt ends on this node: told to stop, climbed down the ladder, swept; or what of it could not be ended."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.linux import cgroup, proc
from clusterctl.agent.linux.proc import ProcessIdentity
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import events
from clusterctl.agent.supervisor import gpu_memory, ladder

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.processes.run_processes import KnownProcesses
    from clusterctl.agent.protocol.process_types import LeftoverProcess, SurvivingProcess
    from clusterctl.agent.supervisor.workers import Worker

_MOST_UNSAID = 1000
"""Looks, 10 ms apart, at whether waiters have said how their workers ended: on a full disk that takes them a while."""


@dataclass(frozen=True)
class Parts:
    """What an end needs of its attempt.

    Attributes:
        gpus: Device indices whose memory shall be free again; empty where nothing was started.
        look: Looks which workers have ended.
        living: The workers whose end was not seen yet.
        close: Closes their outputs.
        ranks: The rank of each worker by its pid, which is that of its POSIX session.
    """

    record: Callable[[events.Event], events.Stamp]
    gpus: Callable[[], list[int]]
    look: Callable[[], None]
    living: Callable[[], list[Worker]]
    close: Callable[[], None]
    ranks: Callable[[], dict[int, int]]


class Ending:
    """The end of one attempt here.

    Attributes:
        since: When the stop signal went out (monotonic), `None` before; 0 where a fence ended it nobody knows when.
        swept: Nothing of the attempt is left, or `remaining`.
        remaining: What could not be ended: `[{pid, start_time, command, why}]`.
    """

    def __init__(
        self,
        loop: EventLoop,
        run: str,
        markers: RunMarkers,
        attempt: int,
        known_processes: KnownProcesses,
        parts: Parts,
    ) -> None:
        self._loop, self._run, self._markers, self._number, self._known_processes = (
            loop,
            run,
            markers,
            attempt,
            known_processes,
        )
        self._parts = parts
        self._ladder: ladder.Ladder | None = None
        self._exiting_ranks: set[int] = set()
        self._unsaid = 0
        self.since: float | None = None
        self.swept = False
        self.remaining: list[SurvivingProcess] = []
        self._leftovers: list[LeftoverProcess] = []
        self._past_grace: list[LeftoverProcess] = []

    @property
    def begun(self) -> bool:
        """Whether somebody is at it."""
        return self._ladder is not None

    def caused(self, rank: int, latest: float) -> bool:
        """Return whether a worker that was gone at `latest` (monotonic) ended because it was told to."""
        return self.since is not None and latest >= self.since and rank not in self._exiting_ranks

    def stop(self, grace: float, reason: str) -> None:
        """Stop everything of the attempt here; again, to shorten the grace."""
        if self.swept and not self.remaining:
            return
        now = time.monotonic()
        if self.swept:
            self.swept, self._ladder, self._unsaid = False, None, 0
        if self.since is None:
            # A worker that is already exiting failed by itself: it does not count as stopped.
            self._exiting_ranks = {worker.rank for worker in self._parts.living() if proc.is_dying(worker.identity)}
            self.since = now
            self._parts.record(events.Stopping(self._number, reason, grace, sorted(self._exiting_ranks)))
        # Writing that down has taken its time, and the grace is whole.
        self.sweep(time.monotonic() + grace)

    def fenced(self, since: float, reason: str, grace: float) -> None:
        """Take note that waiters have ended the attempt, since no supervisor was there."""
        if self.since is None:
            self.since = since
            self._parts.record(events.Stopping(self._number, reason, grace))

    def resume(self, since: float, event: events.Stopping) -> None:
        """Go on with a stop that an earlier supervisor began."""
        self.since, self._exiting_ranks = since, set(event.exiting_ranks)
        self.sweep(since + event.grace)

    def sweep(self, kill_at: float, hold_s: float = 0.0) -> None:
        """Climb down the ladder: what is left at `kill_at` (monotonic) is killed; nothing is sent for `hold_s`."""
        if self._ladder is None:
            told = (self._empty, self._slow_to_go)
            self._ladder = ladder.Ladder(
                self._loop, self._markers, self._known_processes, kill_at, *told, hold_s=hold_s, late=self._name_late
            )
        else:
            self._ladder.shorten(kill_at)

    def poke(self) -> None:
        """Look at once at what is left: something has ended."""
        if self._ladder is not None:
            self._ladder.poke()

    def close(self, remaining: list[SurvivingProcess]) -> None:
        """Write down that nothing is left, or what."""
        strays = self._known_processes.processes - set(self._known_processes.workers)
        self._name_forgers()
        if not remaining:
            self._parts.close()
            cgroup.remove_cgroup(self._known_processes.cgroup)
        self.swept, self.remaining = True, remaining
        late = (self._leftovers, self._past_grace)
        self._parts.record(events.Swept(self._number, len(strays), remaining, *late))

    def _name_late(self, found: list[proc.ProcessStat], killed: bool) -> None:
        named = run_processes.describe_leftovers(found, self._parts.ranks())
        if not killed:
            self._leftovers = named
        elif self.since is not None:
            self._past_grace = named

    def look_at_remaining(self) -> None:
        """Say so once nothing is left any more of what could not be ended: the kernel, or a mount, has let it go."""
        if not any(proc.is_alive(ProcessIdentity(entry["pid"], entry["start_time"])) for entry in self.remaining):
            self.close([])

    def _empty(self, remaining: list[SurvivingProcess]) -> bool:
        """Nothing is left, or what is left cannot be ended: close the attempt once every exit is written down."""
        self._parts.look()
        left = {entry["pid"] for entry in remaining}
        if self._unsaid < _MOST_UNSAID and any(worker.identity.pid not in left for worker in self._parts.living()):
            # Its waiter is about to say how it ended.
            self._unsaid += 1
            return False
        gpus = self._parts.gpus()
        if remaining or not gpus:
            self.close(remaining)
        else:
            # The next attempt, or run, shall find the memory of its GPUs free.
            gpu_memory.Drain(self._loop, gpus, self._run, self._held, lambda: self.close([]))
        return True

    def _held(self, message: str, gpu: int | None) -> None:
        self._parts.record(events.Alarm(self._number, events.GPU_MEMORY, message, gpu=gpu))

    def _slow_to_go(self, found: list[proc.ProcessStat]) -> None:
        names = ", ".join(f"{process.pid} ({process.comm})" for process in found[:4])
        self._alarm("slow_end", f"the kernel is still taking apart what was killed, and is waited for: pid {names}")

    def _name_forgers(self) -> None:
        """Say who of another user carries the run's tag and is none of its processes: nobody touches it."""
        names = [
            f"pid {who.pid} of uid {proc.read_uid(who.pid)}"
            for who in self._known_processes.foreign_tagged
            if proc.is_alive(who)
        ]
        if names:
            text = f"marked as of this run, but none of its processes, and left alone: {', '.join(names[:4])}"
            self._alarm("forged", text)

    def _alarm(self, code: str, message: str) -> None:
        self._parts.record(events.Alarm(self._number, code, message))
