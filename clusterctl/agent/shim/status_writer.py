"""A thread that checks the main thread, collectives and descriptors once a second, and writes the status file."""

from __future__ import annotations

import _thread
import errno
import os
import time
from time import monotonic

from .file_writer import encode_json, remove_file, replace_file
from .profile_recorder import ProfileRecorder
from .rank_claim import has_claim

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .collective_counters import CollectiveCounters
    from .main_thread_probe import MainThreadProbe
    from .progress_counters import ProgressCounters
    from .stack_dumper import StackDumper

BLINDNESS = "recorder"
"""The part of the status (`degraded`) that says which collectives the shim cannot see."""
INTERVAL_S = 1.0
STOP_TIMEOUT_S = 0.5
"""The seconds for which a fork or the exit of the process waits for the end of the thread."""


class StatusWriter:
    """The thread that writes the status file. The thread pauses while the process forks, and ends before Python."""

    def __init__(
        self, counters: ProgressCounters, dumper: StackDumper, status_dir: str, rank: int, start_time: int
    ) -> None:
        self._counters = counters
        self._dumper = dumper
        self._status_dir = status_dir
        self._path = os.path.join(status_dir, f"rank-{rank}.status.json")
        self._pid = os.getpid()
        self._start_time = start_time
        self._rank = rank
        self._attempt = os.environ.get("CLUSTERCTL_ATTEMPT")
        self._ticks = 0
        self._forks = 0
        self._tid = 0
        self._running = self._stopping = False
        self._lock = _thread.allocate_lock()
        self._wake = _thread.allocate_lock()
        self._done = _thread.allocate_lock()
        self._wake.acquire()
        self._main_thread_probe: MainThreadProbe | None = None
        self._collectives: CollectiveCounters | None = None
        self._profile = ProfileRecorder(status_dir, rank)

    def start(self) -> None:
        """Register the signal for stack dumps, and start the thread."""
        self._run_part("stacks", self._dumper.register)
        self._start()

    def pause(self) -> None:
        """Before a fork, end the thread.

        Then the child inherits no locked lock, and Python does not warn about a fork with several threads.
        """
        self._forks += 1
        self._run_part("fork", self._stop)
        self._run_part("profile", lambda: self._profile.end("the process forked"))

    def resume(self) -> None:
        """After a fork, start the thread again in the parent."""
        self._forks -= 1
        if self._forks == 0 and self._pid == os.getpid():
            self._start()

    def finish(self) -> None:
        """At the exit of the process, write the status with the final step."""
        if self._pid == os.getpid():
            self._run_part("exit", self._stop)
            self._run_part("profile", lambda: self._profile.end("the process ends"))
            if not self._is_rank():
                return
            self._run_part("collectives", self._check_collectives)
            self._run_part("status", self._write)

    def abandon_thread(self) -> None:
        """In a forked child, stop without waiting for the thread, which exists in the parent only."""
        self._pid = -1
        self._running = False

    def _start(self) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            self._stopping = False
            if self._running:  # The thread did not end while `_stop` waited.
                return
            self._running = True
        self._done.acquire(False)
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError:  # The limit of threads is reached, or the interpreter is ending.
            self._running = False

    def _stop(self) -> None:
        if not self._running or self._pid != os.getpid():
            return
        self._stopping = True
        if self._wake.locked():
            self._wake.release()
        # The thread may be blocked, as in an import that waits for the calling thread, so limit the wait.
        if not self._done.acquire(True, STOP_TIMEOUT_S):
            return
        task = f"/proc/self/task/{self._tid}"
        for _ in range(100):
            if not os.path.exists(task):
                return
            time.sleep(0.0001)

    def _run(self) -> None:
        self._tid = _thread.get_native_id()
        try:
            while not self._stop_if_requested():
                self._tick()
                self._wake.acquire(True, self._profile.limit_wait(INTERVAL_S))
        finally:
            self._done.release()

    def _stop_if_requested(self) -> bool:
        with self._lock:
            self._running = not self._stopping
            return self._stopping

    def _tick(self) -> None:
        if not self._is_rank():
            return
        self._run_part("dump", self._dumper.dump_if_requested)
        # Parts that import modules begin after a second, so these parts do not slow down the start of the script.
        if self._ticks > 0:
            self._run_part("main_thread", self._check_main_thread)
            self._run_part("collectives", self._check_collectives)
            self._run_part("stacks", self._dumper.check_registration)
        self._ticks += 1
        self._run_part("status", self._write)
        self._run_part("profile", lambda: self._profile.update(lambda seconds: self._wake.acquire(True, seconds)))

    def _is_rank(self) -> bool:
        """Return whether this process trains, or still has the claim because no script has taken its place."""
        counters = self._counters
        return bool(counters.frameworks or counters.beats) or has_claim(self._status_dir, self._rank, self._start_time)

    def _run_part(self, part: str, action: Callable[[], None]) -> None:
        try:
            action()
            if part in self._counters.degraded:
                del self._counters.degraded[part]
        except Exception as error:  # The worker must continue, even without this part of the status.
            self._counters.degraded[part] = f"{type(error).__name__}: {error}"

    def _check_main_thread(self) -> None:
        if self._main_thread_probe is None:
            from .main_thread_probe import MainThreadProbe, allow_tracer

            self._main_thread_probe = MainThreadProbe()
            tracer = os.environ.get("CLUSTERCTL_TRACER_PID", "")
            if tracer.isdigit():
                allow_tracer(int(tracer))
        self._main_thread_probe.update()

    def _check_collectives(self) -> None:
        if "torch" not in self._counters.frameworks:
            return
        if self._collectives is None:
            from .collective_counters import CollectiveCounters

            self._collectives = CollectiveCounters()
        before = self._collectives.setup
        record_path = self._path.replace(".status.", ".recorded.")
        if self._collectives.update():
            self._counters.progress_time = monotonic()
            remove_file(record_path)  # Its entries are older than the counters.
        self._counters.degraded.pop(BLINDNESS, None)
        if self._collectives.blindness is not None:
            self._counters.degraded[BLINDNESS] = self._collectives.blindness
        setup = self._collectives.setup
        if setup is not None and setup != before:
            replace_file(self._path.replace(".status.", ".group."), encode_json(setup))
        entries = self._collectives.read_flight_record()
        if entries is not None:
            record = {"pid": self._pid, "start_time": self._start_time, "time": monotonic(), "entries": entries}
            replace_file(record_path, encode_json(record))

    def _write(self) -> None:
        content = encode_json(self.build_status(monotonic()))
        try:
            replace_file(self._path, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # The tmpfs is full. Overwrite the present file; JSON readers ignore blanks at the end.
            with open(self._path, "r+b", buffering=0) as file:
                file.write(content.encode("ascii").ljust(os.fstat(file.fileno()).st_size))

    def build_status(self, now: float) -> dict[str, Any]:
        """Return the content of the status file.

        Times are CLOCK_MONOTONIC of the node in seconds; `start_time` is in ticks since boot. `tid` is the thread that
        writes the file. `ProgressCounters` and `CollectiveCounters` document their fields. `main_time` is the last time
        at which the main thread ran Python code.
        """
        counters, collectives, phase = self._counters, self._collectives, self._counters.get_longest_phase()
        return {
            "pid": self._pid,
            "start_time": self._start_time,
            "tid": self._tid,
            "rank": self._rank,
            "attempt": self._attempt,
            "time": now,
            "step": counters.step,
            "source": counters.source,
            "beats": counters.beats,
            "progress_time": counters.progress_time,
            "seq": collectives.seq if collectives else {},
            "backend": collectives.backend if collectives else None,
            "timeout_s": collectives.timeout_s if collectives else None,
            "looks": collectives.looks if collectives else 0,
            "held": collectives.held if collectives else 0,
            "main_time": self._main_thread_probe.last_bytecode_time if self._main_thread_probe else None,
            "phase": {"name": phase[0], "since": phase[1], "limit_s": phase[2]} if phase else None,
            "facts": dict(counters.facts),
            "frameworks": list(counters.frameworks),
            "degraded": dict(counters.degraded),
        }
