"""Profiles ranks for some seconds: by torch's profiler in the shim, by py-spy, or by samples of their stacks.

The shim takes samples with the GIL. If C code holds the GIL, samples are dumps by signal. Each rank has a thread and a
file `rank-R.json`. If one method fails, the next one follows; all reasons are reported. A failure never affects the
rank.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import math
import os
import subprocess
import threading
import time
from typing import TYPE_CHECKING

from clusterctl.agent.inject.shim_files import read_profile_answer, read_stack_dump_offer, read_status
from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.protocol.command_messages import make_refused_error
from clusterctl.agent.watch import stack_capture
from clusterctl.agent.watch.evidence_collector import find_rank_process
from clusterctl.agent.watch.stack_capture import NoStacksError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Callable

    from clusterctl.agent.protocol.record_types import RankProcess, RankProfile, ShimProfileAnswer

_MIN_FREE_BYTES = 256 << 20
"""The free disk space that a node needs for a profile."""
_MAX_FILE_BYTES = 512 << 20
_MAX_SHIM_AGE_S = 4.0
"""If the shim, which runs once a second, has not run for this long, C code does not let it run."""
_START_LIMIT_S, _SAVE_LIMIT_S = 4.0, 60.0
_POLL_S = 0.05
_PY_SPY_RATE_HZ = 100
_SAMPLE_INTERVAL_S = 0.1
_MAX_DUMPS_BYTES = 1 << 20


@contextlib.contextmanager
def open_profile_folder(folder: str) -> Iterator[None]:
    """Lock the folder of the profiles of a run, and remove the files of earlier profiles.

    Raises:
        RequestError: The disk is nearly full, or ranks of this node are being profiled.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES:
            raise make_refused_error(f"the disk of {folder} has less than {_MIN_FREE_BYTES >> 20} MiB free")
        for name in os.listdir(folder):
            os.unlink(os.path.join(folder, name))
        yield
    except BlockingIOError:
        raise make_refused_error("another profile of this run is being recorded on this node") from None
    finally:
        os.close(lock)


def profile_ranks(
    workers: Iterable[RankProcess], status_dir: str, folder: str, seconds: float
) -> dict[str, RankProfile]:
    """Profile ranks at the same time, and return what was recorded, by rank.

    Args:
        workers: The process of each rank.
        status_dir: The folder with the status files of the attempt's shims.
        folder: The folder for the files. The folder exists.
        seconds: The length of the recordings.
    """
    processes, profiles = proc.read_all_processes(), dict[str, "RankProfile"]()

    def profile(worker: RankProcess) -> None:
        rank, why = worker["rank"], list[str]()
        path = os.path.join(folder, f"rank-{rank}.json")
        root = processes.get(worker["pid"])
        if root is None or root.start_time != worker["start_time"]:
            profiles[str(rank)] = {"method": "none", "why": ["the worker has ended"], "began": 0.0, "main_thread": None}
            return
        process = find_rank_process(proc.list_process_tree(root.pid, processes), status_dir, rank)
        offer = read_stack_dump_offer(status_dir, rank)
        main_thread = offer["main_thread"] if offer and offer["pid"] == process.pid else None
        for method, record in _METHODS.items():
            try:
                began = record(process, status_dir, rank, path, seconds, why)
                check_file(path)
            except (NoStacksError, OSError, subprocess.SubprocessError) as error:
                why.append(f"{method}: {getattr(error, 'strerror', None) or error}")
            else:
                profiles[str(rank)] = {"method": method, "why": why, "began": began, "main_thread": main_thread}
                return
        profiles[str(rank)] = {"method": "none", "why": why, "began": 0.0, "main_thread": None}

    threads = [threading.Thread(target=profile, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return profiles


def check_file(path: str) -> None:
    """Raise an error if a file is too large for the head, or incomplete. Neither torch nor py-spy reports a full disk.

    Raises:
        NoStacksError: The file cannot be used.
    """
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > _MAX_FILE_BYTES:
            os.unlink(path)
            raise NoStacksError(f"the trace has {size >> 20} MiB, more than {_MAX_FILE_BYTES >> 20}: record less time")
        file.seek(max(0, size - 64))
        if not file.read().rstrip().endswith((b"}", b"]")):
            raise NoStacksError(f"{path} is incomplete: the disk is probably full")


def _record_by_shim(
    method: str, process: proc.ProcessStat, status_dir: str, rank: int, path: str, seconds: float, why: list[str]
) -> float:
    status = read_status(status_dir, rank, time.monotonic())
    if status is None or status["pid"] != process.pid:
        raise NoStacksError("the rank has no shim")
    if method == "torch" and "torch" not in (status["frameworks"] or ()):
        raise NoStacksError("the rank has not imported torch")
    if status["age_s"] > _MAX_SHIM_AGE_S:
        raise NoStacksError(f"the rank has run no Python code for {status['age_s']:.0f} s")
    start_by = time.monotonic() + _START_LIMIT_S
    request, base = repr(start_by), os.path.join(status_dir, f"rank-{rank}")
    identity = proc.ProcessIdentity(process.pid, process.start_time)

    def wait(is_final: Callable[[ShimProfileAnswer], bool], deadline: float) -> ShimProfileAnswer | None:
        while time.monotonic() < deadline:
            answer = read_profile_answer(status_dir, rank, request)
            if answer is not None and is_final(answer):
                return answer
            if not proc.is_alive(identity):
                raise NoStacksError("the rank ended")
            time.sleep(_POLL_S)
        return None

    try:
        text = f"{method} {request} {seconds} {path}"
        syscalls.write_atomically(f"{base}.profile", text.encode("utf-8", "surrogateescape"))
        began = wait(lambda _: True, start_by + _POLL_S)
        if began is None:
            raise NoStacksError(f"the shim has not answered within {_START_LIMIT_S:g} s")
        ended = wait(lambda answer: answer["state"] != "recording", start_by + seconds + _SAVE_LIMIT_S)
        if ended is None or ended["state"] != "saved":
            raise NoStacksError(ended["reason"] if ended else f"no trace within {_SAVE_LIMIT_S:g} s after the end")
        if ended["reason"]:
            why.append(f"{method}: ended early, because {ended['reason']}")
    finally:
        for ending in (".profile", ".profiled.json"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(base + ending)
    return began["time"]


def _record_by_py_spy(
    process: proc.ProcessStat, _status_dir: str, _rank: int, path: str, seconds: float, _why: list[str]
) -> float:
    began, duration_s = time.time(), math.ceil(seconds)
    # Without `--nonblocking`, py-spy would stop the process for each sample. `--idle` shows threads that wait.
    options = f"--nonblocking --idle --format chrometrace --rate {_PY_SPY_RATE_HZ} --duration {duration_s}"
    done = subprocess.run(
        [
            stack_capture.find_py_spy(process.pid),
            "record",
            *options.split(),
            "--output",
            path,
            "--pid",
            f"{process.pid}",
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=duration_s + _SAVE_LIMIT_S,
        check=False,
    )
    if done.returncode != 0:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise NoStacksError(complaint[-1] if complaint else f"exit code {done.returncode}")
    return began


def _record_by_signal(
    process: proc.ProcessStat, status_dir: str, rank: int, path: str, seconds: float, why: list[str]
) -> float:
    end, samples = time.monotonic() + seconds, list[tuple[float, str, str]]()
    dumps = os.path.join(status_dir, f"rank-{rank}.stacks")
    while (now := time.monotonic()) < end:
        # A dump while other threads run Python code may end the process, because faulthandler reads their frames.
        status = read_status(status_dir, rank, now)
        if status is not None and status["age_s"] <= _MAX_SHIM_AGE_S:
            if not samples:
                raise NoStacksError("the rank runs Python code, so its threads could not be read safely")
            break
        began = time.time()
        dump = stack_capture.capture_stacks(process.pid, status_dir, rank, now + _START_LIMIT_S)
        if dump.source == "proc":
            if not samples:
                raise NoStacksError("; ".join(dump.why))
            why.append(f"signal: ended early: {'; '.join(dump.why)}")
            break
        samples.append((began, dump.source, dump.text))
        if dump.source == "signal" and os.stat(dumps).st_size > _MAX_DUMPS_BYTES:
            os.truncate(dumps, 0)  # the rank appends, so its next dump is at the beginning
        time.sleep(max(0.0, now + _SAMPLE_INTERVAL_S - time.monotonic()))
    with open(path, "w", encoding="utf-8") as file:
        json.dump(samples, file)
    return samples[0][0]


_METHODS: dict[str, Callable[[proc.ProcessStat, str, int, str, float, list[str]], float]] = {
    "torch": functools.partial(_record_by_shim, "torch"),
    "py-spy": _record_by_py_spy,
    "samples": functools.partial(_record_by_shim, "samples"),
    "signal": _record_by_signal,
}
