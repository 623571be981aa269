"""Samples the activity of the workers of a node from `/proc` and from the status files of their shims.

A sample takes little time, so the supervisor samples every few seconds. The head decides whether a run is stalled
(`run/rules/stall_detection.py`).
"""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.inject.shim_files import list_foreign_ranks, read_status
from clusterctl.agent.linux import proc
from clusterctl.agent.linux.proc import ProcessIdentity, list_process_tree, read_all_processes
from clusterctl.agent.linux.syscalls import read_or_empty, sleep_interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from clusterctl.agent.protocol import record_types

_SCAN_INTERVAL_S = 15.0
_MAX_WATCHED = 200
_TAIL_BYTES = 8192
_NAMED_STEPS = 3
"""After so many signs of progress from the shim, the sampler does not search the output of the rank for steps."""
_STEP_WORDS = rb"(?:global[_ ]?)?(?:step|iter|iteration|epoch|batch|update|round|episode)s?"
_NUMBER = rb"(\d{1,12}(?:\.\d{1,6})?)"
_PRINTED_STEP = re.compile(
    rb"\b" + _STEP_WORDS + rb"\b[\W_]{0,4}" + _NUMBER + rb"\b"
    rb"|^[ \t]*(?:(?:train(?:ing)?|" + _STEP_WORDS + rb")\b[^%|]{0,40})?\d{1,3}%\|[^|]*\| *" + _NUMBER + rb"/\d",
    re.IGNORECASE | re.MULTILINE,
)
"""Matches `step 24`, `Epoch [2/10]`, `iter: 7`, and progress bars of steps, but not of downloads."""


@dataclass(frozen=True)
class WatchedWorker:
    """One worker of this node.

    Attributes:
        rank: The global rank.
        identity: The process that the supervisor has started. The process that is the rank may be its descendant.
        output: The path of the output file.
    """

    rank: int
    identity: ProcessIdentity
    output: str


class ActivitySampler:
    """Samples all workers of one node and attempt.

    Args:
        workers: The started workers.
        status_dir: The folder with the status files of the shims.
        gpus: Whether the node has GPUs. With GPUs, CPU time says little about progress.
    """

    def __init__(self, workers: Iterable[WatchedWorker], status_dir: str, gpus: bool = False) -> None:
        self._workers = tuple(workers)
        self._status_dir = status_dir
        self._gpus = gpus
        self._trees: dict[int, list[ProcessIdentity]] = {}
        self._printed: dict[int, tuple[int, tuple[int, float] | None]] = {}
        self._scanned: float | None = None

    def sample(self, now: float | None = None) -> record_types.ActivitySample:
        """Sample all workers once.

        Args:
            now: CLOCK_MONOTONIC of this node in seconds.

        Returns:
            The samples of all ranks, by rank. `pid`, `state` and `wchan` describe the process that is the rank. The
            output is searched for `printed_steps` only while the shim has seen fewer than `_NAMED_STEPS` steps.
        """
        now = time.monotonic() if now is None else now
        if self._scanned is None or now - self._scanned >= _SCAN_INTERVAL_S:
            self._scan()
            self._scanned = now
        ranks = {str(worker.rank): self._sample_rank(worker.rank, now, worker) for worker in self._workers}
        for rank in list_foreign_ranks(self._status_dir, (worker.rank for worker in self._workers)):
            ranks[str(rank)] = self._sample_rank(rank, now)
        return {"m": round(now, 3), "gpus": self._gpus, "ranks": ranks}

    def _scan(self) -> None:
        """Find the process tree of each worker. Until the next scan, only these processes are sampled."""
        processes = read_all_processes()
        for worker in self._workers:
            members = list_process_tree(worker.identity.pid, processes)
            self._trees[worker.rank] = [process.identity for process in members]

    def _sample_rank(self, rank: int, now: float, worker: WatchedWorker | None = None) -> record_types.RankActivity:
        """Sample a rank. `worker` is `None` if a launcher such as torchrun has started the rank."""
        status = read_status(self._status_dir, rank, now)
        subject = proc.read_stat(status["pid"]) if status else None
        if worker is None:
            root, members = subject, [subject] if subject else []
        else:
            members = self._read_members(worker)
            root = next((each for each in members if each.identity == worker.identity), None)
            subject = subject if status else root
        transfers = [transfer for each in members if (transfer := _read_transfers(each.pid)) is not None]
        starved_s = proc.read_run_delay(subject.pid) if subject else None
        # Do not count the bytes of stack dumps, which the agent has requested.
        dumped = _read_size(os.path.join(self._status_dir, f"rank-{rank}.stacks")) or 0
        output = _read_size(worker.output) if worker else None
        reports_steps = status is not None and status["beats"] >= _NAMED_STEPS
        return {
            "alive": root is not None and root.state not in "ZX",
            "pid": subject.pid if subject else worker.identity.pid if worker else None,
            "state": subject.state if subject else None,
            "wchan": (proc.read_wait_channel(subject.pid) or None) if subject else None,
            "procs": len(members),
            "cpu_s": round(sum(each.ticks for each in members) / proc.TICKS_PER_SECOND, 2),
            "read": sum(read for read, _ in transfers) if transfers else None,
            "written": sum(written for _, written in transfers) - dumped if transfers else None,
            "output": output,
            "printed_steps": self._find_printed_steps(worker, output)
            if worker and output and not reports_steps
            else None,
            "starved_s": None if starved_s is None else round(starved_s, 2),
            "faults": subject.faults if subject else None,
            "inside": status,
        }

    def _find_printed_steps(self, worker: WatchedWorker, size: int) -> tuple[int, float] | None:
        """Return the steps that `find_printed_steps` finds in the output.

        Read the output only if its size has changed.
        """
        known_size, found = self._printed.get(worker.rank, (0, None))
        if size != known_size:
            found = find_printed_steps(_read_tail(worker.output, size))
            self._printed[worker.rank] = (size, found)
        return found

    def _read_members(self, worker: WatchedWorker) -> list[proc.ProcessStat]:
        identities = self._trees.get(worker.rank) or [worker.identity]
        processes = ((proc.read_stat(identity.pid), identity) for identity in identities)
        return [process for process, identity in processes if process and process.identity == identity]


class FileScanner:
    """Scans files whose changes show progress, in a thread of its own, because a dead mount may block a scan.

    Args:
        patterns: Glob patterns; relative patterns start at `workdir`.
        workdir: The working directory of the workers.
        seconds: The pause between two scans.

    Attributes:
        files: The result of the last complete scan: time (nanoseconds) and size (bytes) by path. `None` before the
            first scan has ended.
    """

    def __init__(self, patterns: Sequence[str], workdir: str, seconds: float) -> None:
        self._patterns = [os.path.join(workdir, os.path.expanduser(pattern)) for pattern in patterns]
        self._seconds = seconds
        self.files: dict[str, list[int]] | None = None

    def start(self) -> None:
        """Start a thread that scans repeatedly. Without patterns, scan once and start no thread."""
        if not self._patterns:
            self.scan()
        else:
            threading.Thread(target=self._scan_repeatedly, daemon=True).start()

    def _scan_repeatedly(self) -> None:
        while True:
            self.scan()
            sleep_interval(self._seconds)

    def scan(self) -> None:
        """Scan once and store the result in `files`."""
        self.files = dict(itertools.islice(self._list_files(), _MAX_WATCHED))

    def _list_files(self) -> Iterator[tuple[str, list[int]]]:
        for pattern in self._patterns:
            for path in glob.iglob(pattern, recursive=True):
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    yield path, [status.st_mtime_ns, status.st_size]


def find_printed_steps(tail: bytes) -> tuple[int, float] | None:
    """Return how many printed steps are higher than all earlier ones, and the last step; `None` without steps.

    Args:
        tail: The last lines of an output. A carriage return also ends a line.
    """
    numbers = [float(a or b) for a, b in _PRINTED_STEP.findall(tail.replace(b"\r", b"\n"))]
    if not numbers:
        return None
    return sum(high > low for low, high in zip([-1.0, *itertools.accumulate(numbers, max)], numbers)), numbers[-1]


def _read_tail(path: str, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except OSError:
        return b""


def _read_transfers(pid: int) -> tuple[int, int] | None:
    """Return the numbers of bytes that a process and its reaped children have read and written by system calls."""
    data = read_or_empty(f"/proc/{pid}/io")
    if not data:
        return None
    fields = dict(line.split(b": ", 1) for line in data.splitlines())
    return int(fields[b"rchar"]), int(fields[b"wchar"])


def _read_size(path: str) -> int | None:
    try:
        return os.stat(path).st_size
    except OSError:
        return None
