"""Samples of the workers, the GPUs and the machine, taken in child processes because the reads may hang."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import TYPE_CHECKING, Any, Callable, NoReturn

from clusterctl.agent.linux import helper_process, syscalls
from clusterctl.agent.protocol import run_files
from clusterctl.agent.watch import activity_sampler

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, Timer
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol import record_types
    from clusterctl.agent.supervisor.attempt import Attempt

_RESTART_DELAY_S = 30.0
_MAX_LINE_BYTES = 1 << 20
_STEADY_AGE_S = 4.0
_STEADY_FOR_S = 60.0
_STEADY_EVERY_S = 10.0


class SampleFile:
    """The samples file of a run. If the file exceeds `max_bytes`, the oldest samples are discarded.

    Args:
        path: The file.
        max_bytes: Bytes to keep.
    """

    def __init__(self, path: str, max_bytes: int = run_files.MAX_SAMPLES_BYTES) -> None:
        self._max_bytes = max_bytes
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def append(self, attempt: int, kind: str, sample: record_types.ActivitySample | record_types.HealthSample) -> None:
        """Append a sample, with the present time if the sample has no time. If the write fails, drop the sample."""
        now = {"t": round(time.time(), 3), "m": round(time.monotonic(), 3)}
        record = {**now, **sample, "attempt": attempt, "kind": kind}
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
    """Skips most samples while every rank of a node makes steady progress.

    If a rank makes no progress, declares a phase, ends or disappears, no sample is skipped. A sample has the mark
    `steady` if samples before it were skipped. Stalls are still detected, because their detection waits much longer
    than the time between two remaining samples.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._written = float("-inf")

    def should_skip(self, sample: record_types.ActivitySample) -> bool:
        """Return whether a sample of `ActivitySampler` can be skipped; set the mark `steady` of the sample."""
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
    """Return whether the shim of a rank has just reported progress."""
    inside = rank["inside"]
    if not rank["alive"] or inside is None or inside["phase"] is not None or inside["progress_age_s"] is None:
        return False
    return bool(max(inside["age_s"], inside["progress_age_s"]) <= _STEADY_AGE_S)


class SamplingChild:
    """A child process that writes samples, one JSON object per line. If a child ends, a new child starts after 30 s.

    Args:
        loop: The event loop.
        start_process: Function that starts the child; returns the child's pid and a descriptor of the child's output.
        on_sample: Called with each sample.
        on_failure: Called with the error if the start of the child fails, and with `None` if the child has ended.
    """

    def __init__(
        self,
        loop: EventLoop,
        start_process: Callable[[], tuple[int, int]],
        on_sample: Callable[[Any], None],
        on_failure: Callable[[OSError | None], None] = lambda _error: None,
    ) -> None:
        self._loop, self._start_process = loop, start_process
        self._on_sample, self._on_failure = on_sample, on_failure
        self._process: tuple[int, int] | None = None
        self._buffer = b""
        self._timer: Timer | None = None

    def start(self) -> None:
        """Start the child."""
        try:
            self._process = self._start_process()
        except OSError as error:
            self._restart_later(error)
        else:
            self._buffer = b""
            self._loop.on_readable(self._process[1], self._read)

    def _read(self) -> None:
        data = b"" if self._process is None else os.read(self._process[1], 65536)
        *lines, rest = (self._buffer + data).split(b"\n")
        self._buffer = rest[-_MAX_LINE_BYTES:]
        for line in lines:
            with contextlib.suppress(ValueError):
                sample = json.loads(line)
                if isinstance(sample, dict):
                    self._on_sample(sample)
        if not data:
            self.stop()
            self._restart_later(None)

    def _restart_later(self, error: OSError | None) -> None:
        self._on_failure(error)
        self._timer = self._loop.call_later(_RESTART_DELAY_S, self.start)

    def stop(self) -> None:
        """End the child."""
        if self._timer is not None:
            self._timer.cancel()
        process, self._process = self._process, None
        if process is not None:
            helper_process.kill_helper(process[0])
            self._loop.remove_descriptor(process[1])
            os.close(process[1])


class ActivityMonitor:
    """Samples the workers of one attempt in a child process, because reads of users' files may hang."""

    def __init__(self, loop: EventLoop, run: RunDir, attempt: Attempt, samples: SampleFile) -> None:
        self._loop, self._run, self._attempt, self._samples = loop, run, attempt, samples
        self._thinning = SampleThinning()
        self._ranks: frozenset[int] = frozenset()
        self._child: SamplingChild | None = None

    def restart_if_workers_changed(self) -> None:
        """At every tick, start a new child if the workers have changed, or end the child if no worker lives."""
        attempt = self._attempt
        ranks = frozenset(attempt.workers) if attempt.living_workers and not attempt.shutdown.is_swept else frozenset()
        if ranks != self._ranks:
            self.stop()
            self._ranks = ranks
            if ranks:
                self._child = SamplingChild(
                    self._loop, lambda: helper_process.start_helper(self._sample_repeatedly), self._write_sample
                )
                self._child.start()

    def _sample_repeatedly(self, out: HelperOutput) -> NoReturn:
        attempt, run = self._attempt, self._run
        prepare, status_dir = attempt.prepare, run.status_dir(attempt.number)
        workers = [
            activity_sampler.WatchedWorker(rank, worker.identity, run.rank_file(attempt.number, rank, "log"))
            for rank, worker in attempt.workers.items()
        ]
        sampler = activity_sampler.ActivitySampler(workers, status_dir, bool(prepare.gpus))
        watch = activity_sampler.FileScanner(prepare.watch, prepare.workdir, prepare.sample_seconds)
        watch.start()
        while True:
            with contextlib.suppress(OSError):
                # systemd-logind may remove the folder when the user's last login session ends.
                os.makedirs(status_dir, mode=0o700, exist_ok=True)
            sample = {**sampler.sample(), "watched": watch.files}
            syscalls.write_all(out.descriptor, json.dumps(sample).encode() + b"\n")
            syscalls.sleep_interval(prepare.sample_seconds)

    def _write_sample(self, sample: record_types.ActivitySample) -> None:
        if not self._thinning.should_skip(sample):
            self._samples.append(self._attempt.number, "activity", sample)
            steps = [s for rank in sample["ranks"].values() if (s := (rank["inside"] or {}).get("step")) is not None]
            if steps:
                self._attempt.claims.announce({"step": min(steps), "step_at": round(time.time())})

    def stop(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.stop()
