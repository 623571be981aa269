"""Once a second, check the main thread, collectives and descriptors, and write the status file."""

from __future__ import annotations

import _thread
import errno
import os
import time
from time import monotonic

from .file_writer import encode, replace_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .collective_counters import CollectiveCounters
    from .main_thread import MainThreadProbe
    from .progress_counters import ProgressCounters
    from .stack_dump import StackDumper

INTERVAL_S = 1.0
PATIENCE_S = 0.5
"""Seconds for which a fork or the end of the process waits for the thread."""


class StatusWriter:
    """The thread that writes the status file. It pauses while the process forks, and ends before Python does."""

    def __init__(
        self, state: ProgressCounters, dumper: StackDumper, status_dir: str, rank: int, start_time: int
    ) -> None:
        self._state = state
        self._dumper = dumper
        self._path = os.path.join(status_dir, f"rank-{rank}.status.json")
        self._pid = os.getpid()
        self._start_time = start_time
        self._rank = rank
        self._attempt = os.environ.get("CLUSTERCTL_ATTEMPT")
        self._ticks = 0
        self._forks = 0
        self._tid = 0
        self._running = self._stopping = False
        self._turn = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._done = _thread.allocate_lock()
        self._wake.acquire()
        self._stamp: MainThreadProbe | None = None
        self._collectives: CollectiveCounters | None = None

    def start(self) -> None:
        """Arm the stack dump and start the thread."""
        self._try("stacks", self._dumper.arm)
        self._start()

    def pause(self) -> None:
        """Before a fork, end the thread: the child inherits no lock of it, and Python sees no other thread."""
        self._forks += 1
        self._try("fork", self._stop)

    def resume(self) -> None:
        """After a fork, continue in the parent."""
        self._forks -= 1
        if self._forks == 0 and self._pid == os.getpid():
            self._start()

    def finish(self) -> None:
        """At exit, write the status with the final step."""
        if self._pid == os.getpid():
            self._try("exit", self._stop)
            self._try("collectives", self._check_collectives)
            self._try("status", self._write)

    def abandon_thread(self) -> None:
        """In a forked child, stop: the thread belongs to the parent."""
        self._pid = -1
        self._running = False

    def _start(self) -> None:
        if self._pid != os.getpid():
            return
        with self._turn:
            self._stopping = False
            if self._running:  # `_stop` did not wait long enough for the thread, so it has not ended
                return
            self._running = True
        self._done.acquire(False)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # out of threads, or the interpreter is ending
            self._running = False

    def _stop(self) -> None:
        if not self._running or self._pid != os.getpid():
            return
        self._stopping = True
        if self._wake.locked():
            self._wake.release()
        # If it is blocked, as in an import that waits for the calling thread, do not wait any longer.
        if not self._done.acquire(True, PATIENCE_S):
            return
        task = f"/proc/self/task/{self._tid}"
        for _ in range(100):
            if not os.path.exists(task):
                return
            time.sleep(0.0001)

    def _run(self) -> None:
        self._tid = _thread.get_native_id()
        try:
            while not self._ends():
                self._tick()
                self._wake.acquire(True, INTERVAL_S)
        finally:
            self._done.release()

    def _ends(self) -> bool:
        with self._turn:
            self._running = not self._stopping
            return self._stopping

    def _tick(self) -> None:
        # Parts that import modules start after a second, so that they do not slow down the start of the script.
        if self._ticks > 0:
            self._try("main_thread", self._check_main_thread)
            self._try("collectives", self._check_collectives)
            self._try("stacks", self._dumper.check)
        self._ticks += 1
        self._try("status", self._write)

    def _try(self, part: str, action: Callable[[], None]) -> None:
        try:
            action()
            if part in self._state.degraded:
                del self._state.degraded[part]
        except Exception as error:  # a missing value is better than a harmed worker
            self._state.degraded[part] = f"{type(error).__name__}: {error}"

    def _check_main_thread(self) -> None:
        if self._stamp is None:
            from .main_thread import MainThreadProbe, allow_tracer

            self._stamp = MainThreadProbe()
            tracer = os.environ.get("CLUSTERCTL_TRACER_PID", "")
            if tracer.isdigit():
                allow_tracer(int(tracer))
        self._stamp.update()

    def _check_collectives(self) -> None:
        if "torch" not in self._state.frameworks:
            return
        if self._collectives is None:
            from .collective_counters import CollectiveCounters

            self._collectives = CollectiveCounters()
        before, setup_before = self._collectives.group_rank, self._collectives.setup
        if self._collectives.update():
            self._state.progress_time = monotonic()
        if self._collectives.group_rank not in (None, before):
            replace_file(self._path.replace(".status.", ".group."), encode(self._collectives.group_rank))
        setup = self._collectives.setup
        if setup is not None and setup != setup_before:
            replace_file(self._path.replace(".status.", ".setup."), encode(setup))
        entries = self._collectives.read_flight_record()
        if entries is not None:
            record = {"pid": self._pid, "start_time": self._start_time, "time": monotonic(), "entries": entries}
            replace_file(self._path.replace(".status.", ".recorded."), encode(record))

    def _write(self) -> None:
        content = encode(self.status(monotonic()))
        try:
            replace_file(self._path, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The tmpfs is full. Overwrite the present file: JSON readers ignore blanks at its end.
            with open(self._path, "r+b", buffering=0) as file:
                file.write(content.encode("ascii").ljust(os.fstat(file.fileno()).st_size))

    def status(self, now: float) -> dict[str, Any]:
        """Return the content of the status file; all times are CLOCK_MONOTONIC of the node, in seconds.

        pid, start_time (ticks since boot), tid (of the thread that writes this), rank, attempt, time; step, source
        (torch, keras, user), beats (rises with every sign of progress), progress_time; seq {group: [enqueued,
        completed]}, backend, timeout_s of the default process group; looks at it, of which held: its newest collective
        was under way; main_time (when the main thread last ran Python);
        phase {name, since, limit_s}; facts; frameworks; degraded {part: reason}.
        """
        state, collectives, phase = self._state, self._collectives, self._state.get_longest_phase()
        return {
            "pid": self._pid,
            "start_time": self._start_time,
            "tid": self._tid,
            "rank": self._rank,
            "attempt": self._attempt,
            "time": now,
            "step": state.step,
            "source": state.source,
            "beats": state.beats,
            "progress_time": state.progress_time,
            "seq": collectives.seq if collectives else {},
            "backend": collectives.backend if collectives else None,
            "timeout_s": collectives.timeout_s if collectives else None,
            "looks": collectives.looks if collectives else 0,
            "held": collectives.held if collectives else 0,
            "main_time": self._stamp.time if self._stamp else None,
            "phase": {"name": phase[0], "since": phase[1], "limit_s": phase[2]} if phase else None,
            "facts": dict(state.facts),
            "frameworks": list(state.frameworks),
            "degraded": dict(state.degraded),
        }
