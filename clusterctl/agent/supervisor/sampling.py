"""Samples of the workers, the GPUs and the machine, taken in child processes because they may hang or die."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Callable

from clusterctl.agent.linux import helper_process, syscalls
from clusterctl.agent.protocol import frames, run_files
from clusterctl.agent.watch import activity

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol import record_types
    from clusterctl.agent.supervisor.attempt import Attempt

_FIRST_SECONDS = 5.0
_RESTART_SECONDS = 30.0
_RETRY_SECONDS = 900.0
_MIN_LIFETIME_S = 600.0
_MAX_LINE = 1 << 20
_STEADY_AGE_S = 4.0
_STEADY_FOR_S = 60.0
_STEADY_EVERY_S = 10.0


class SampleFile:
    """The samples file of a run; its front is discarded. A sample that cannot be written is dropped.

    Args:
        path: The file.
        max_bytes: Bytes to keep.
    """

    def __init__(self, path: str, max_bytes: int = run_files.MAX_SAMPLES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, attempt: int, kind: str, values: record_types.ActivitySample | record_types.HealthSample) -> None:
        """Append one sample, by default with the present time."""
        now = {"t": round(time.time(), 3), "m": round(time.monotonic(), 3)}
        record = {**now, **values, "attempt": attempt, "kind": kind}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._fd).st_size
        try:
            syscalls.write_all(self._fd, line)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, before)
            return
        first = run_files.find_first_kept_byte(before + len(line), self._max_bytes)
        if first != run_files.find_first_kept_byte(before, self._max_bytes):
            with contextlib.suppress(OSError):
                syscalls.punch_hole(self._fd, 0, first)


class SampleThinning:
    """Skips samples while every rank of a node makes steady progress.

    The stall rule waits much longer than the interval of the remaining samples. Every sample counts again when a rank
    falls
    behind, declares a phase, ends or disappears. A sample is marked `steady` if samples before it were skipped.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._written = float("-inf")

    def should_skip(self, sample: record_types.ActivitySample) -> bool:
        """Return whether a sample (see `activity.Sampler.sample`) need not be written."""
        now = float(sample["m"])
        if not all(_is_making_progress(rank) for rank in sample["ranks"].values()):
            self._since = None
        elif self._since is None:
            self._since = now
        sample["steady"] = self._since is not None and now - self._since >= _STEADY_FOR_S
        if sample["steady"] and now - self._written < _STEADY_EVERY_S:
            return True
        self._written = now
        return False


def _is_making_progress(rank: record_types.RankActivity) -> bool:
    """Return whether a rank has just made progress and reports this itself."""
    inside = rank["inside"]
    if not rank["alive"] or inside is None or inside["phase"] is not None or inside["progress_age_s"] is None:
        return False
    return bool(max(inside["age_s"], inside["progress_age_s"]) <= _STEADY_AGE_S)


class ActivitySampler:
    """Samples the workers of one attempt in a child, which reads files of the user that may hang."""

    def __init__(self, loop: EventLoop, run: RunDir, attempt: Attempt, samples: SampleFile) -> None:
        self._loop, self._run, self._attempt, self._samples = loop, run, attempt, samples
        self._steadiness = SampleThinning()
        self._ranks: frozenset[int] = frozenset()
        self._child: tuple[int, int] | None = None
        self._decoder = frames.FrameDecoder()
        self._not_before = 0.0

    def update(self) -> None:
        """Sample the present workers while one of them lives. Call this now and then."""
        attempt = self._attempt
        ranks = frozenset(attempt.workers) if attempt.living_workers and not attempt.shutdown.is_swept else frozenset()
        if ranks != self._ranks:
            self.stop()
            self._ranks, self._not_before = ranks, 0.0
        if self._child is None and ranks and time.monotonic() >= self._not_before:
            self._start()

    def _start(self) -> None:
        self._not_before = time.monotonic() + _RESTART_SECONDS
        with contextlib.suppress(OSError):
            self._child = helper_process.start_helper(self._make_task())
            self._decoder = frames.FrameDecoder()
            os.set_blocking(self._child[1], False)
            self._loop.on_readable(self._child[1], self._read)

    def _make_task(self) -> helper_process.Task:
        attempt, run = self._attempt, self._run
        prepare, status_dir = attempt.prepare, run.status_dir(attempt.number)
        ids = [
            activity.WatchedWorker(
                w.rank, w.identity.pid, w.identity.start_time, run.of_rank(attempt.number, w.rank, "log")
            )
            for w in attempt.workers.values()
        ]
        sampler = activity.ActivitySampler(ids, status_dir, bool(prepare.gpus))
        watch = activity.FileWatch(prepare.watch, prepare.workdir, prepare.sample_seconds)

        def sample(out: HelperOutput) -> Mapping[str, object]:
            watch.start()
            while True:
                with contextlib.suppress(OSError):
                    # logind may empty a tmpfs when the user's last session ends.
                    os.makedirs(status_dir, mode=0o700, exist_ok=True)
                out.message({"sample": {**sampler.sample(), "watched": watch.files}})
                syscalls.sleep_interval(prepare.sample_seconds)

        return sample

    def _read(self) -> None:
        child = self._child
        data = b"" if child is None else os.read(child[1], 65536)
        for frame in self._decoder.feed(data):
            if isinstance(frame, dict) and "sample" in frame:
                self._write_sample(frame["sample"])
        if not data:
            self.stop()

    def _write_sample(self, sample: record_types.ActivitySample) -> None:
        """Write a sample unless it can be skipped."""
        if not self._steadiness.should_skip(sample):
            self._samples.write(self._attempt.number, "activity", sample)

    def stop(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if child is not None:
            helper_process.kill_helper(child[0])
            self._loop.forget(child[1])
            os.close(child[1])


def get_retry_delay_s(refused: int) -> float:
    """Return the seconds until the next try after `refused` failed starts."""
    return float(min(_RESTART_SECONDS * 2 ** min(refused, 16), _RETRY_SECONDS))


class HealthSampler:
    """The child that samples GPUs and machine: driver calls may hang, so the supervisor makes none."""

    def __init__(
        self,
        loop: EventLoop,
        seconds: float,
        on_sample: Callable[[record_types.HealthSample], None],
        died: Callable[[str], None],
    ) -> None:
        self._loop, self._seconds = loop, seconds
        self._on_sample, self._on_death = on_sample, died
        self._pid: int | None = None
        self._fd = -1
        self._buffer, self._began = b"", 0.0
        self._may_restart, self._failed_starts = True, 0
        # Delayed: the sampler would compete with starting workers for the processor.
        loop.after(min(_FIRST_SECONDS, seconds), self._start)

    def _start(self) -> None:
        try:
            self._pid, self._fd = helper_process.start_agent_command("sampler", str(self._seconds))
        except OSError as error:
            # A machine may lack processes for days: report this once, and retry ever less often.
            if not self._failed_starts:
                self._on_death(f"GPUs and machine are not watched: {error.strerror}; this is tried again")
            self._loop.after(get_retry_delay_s(self._failed_starts), self._start)
            self._failed_starts += 1
            return
        self._failed_starts = 0
        self._buffer, self._began = b"", time.monotonic()
        self._loop.on_readable(self._fd, self._read)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        if not data:
            self._ended()
            return
        lines = (self._buffer + data).split(b"\n")
        self._buffer = lines.pop()[-_MAX_LINE:]
        for line in lines:
            with contextlib.suppress(ValueError):
                value = json.loads(line)
                if isinstance(value, dict):
                    sample: record_types.HealthSample = value  # type: ignore[assignment]
                    self._on_sample(sample)

    def _close(self) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)
        self._fd = -1

    def _ended(self) -> None:
        self._close()
        self._pid = None
        # Do not restart a child that died soon after its last restart.
        again, self._may_restart = self._may_restart, time.monotonic() - self._began > _MIN_LIFETIME_S
        again = again or self._may_restart
        what = "it is started again" if again else "GPUs and machine are not watched any more"
        self._on_death(f"the sampler of GPUs and machine has ended; {what}")
        if again:
            self._loop.after(_RESTART_SECONDS, self._start)

    def stop(self) -> None:
        """End the child."""
        self._may_restart = False
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            self._pid = None
            self._close()
