"""Samples of GPUs and machine during a run: one line of JSON every few seconds, even if the driver hangs.

A child keeps the driver's library open and reads the GPUs. If it hangs, the lines go on and say for how long. No second
child is started, because it would hang too.

A sample:

    {"t": wall clock, "m": monotonic clock, "ms": what the pass took,
     "status": "ok" | "stuck" | "error" | "absent", "reason": text | null,
     "stuck_s": seconds (only if stuck, with "state" and "wchan" of the child),
     "cpu": percent | null, "mem": percent, "mem_used": bytes, "mem_total": bytes, "load1": number,
     "disk": [{"path", "free", "total"}],
     "gpus": [{"gpu", "vendor", "uuid", "util", "mem_used", "mem_total", "temp_c", "mem_temp_c", "power_w", "sm_clock",
               "throttle", "ecc_unc", "remap_pending", "remap_failure", "recovery_action",
               "temp_limit_c", "mem_temp_limit_c", "slowdown": [what holds the clocks down],
               "err": {field: word}, "codes": {field: the vendor's number}, "links_lost": n | null}],
     "xids": [{"gpu": index | null, "xid": code}]}   reported by the driver since the sample before

A value that could not be read is null; "err" has the errors that concern the GPU itself (`gpu_values`), by value.
"links_lost" counts links that were up at the start: NVLinks once the GPU has reported a link error, XGMI links always.
While the driver is stuck, "gpus" is empty, because an old value would look like a new one.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from clusterctl.agent.facts import child_tasks, gpu_library, nvml
from clusterctl.agent.facts.gpu_values import TROUBLE
from clusterctl.agent.linux import kernel_files, proc, spawn, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol import record_types

INTERVAL_S = 15.0
PASS_TIMEOUT_S = 5.0
"""Seconds that one pass over all GPUs may take before the driver counts as stuck."""

_NVLINK_ERROR = 74
"""The XID after which the links of a GPU are watched: lost links show that a fault lasts."""
_RESTART_SECONDS = 60.0
_CPU_SECONDS = 0.25
"""Seconds over which a single sample measures the CPUs."""


def sample_machine() -> record_types.MachineSample:
    """Return the machine's part of a single sample; CPU is measured over the next moment."""
    machine = _Machine()
    machine.read()
    time.sleep(_CPU_SECONDS)
    return machine.read()


def main(arguments: list[str]) -> int:
    """Print samples until stdout is closed. `arguments`: [seconds between samples]."""
    interval = float(arguments[0]) if arguments else INTERVAL_S
    machine, driver = _Machine(), _DriverChild()
    parent = os.getppid()
    following = time.monotonic()
    try:
        while os.getppid() == parent:
            began = time.monotonic()
            deadline = began + min(PASS_TIMEOUT_S, max(0.2, interval * 0.8))
            values = {"t": round(time.time(), 3), "m": round(began, 3), **machine.read(), **driver.ask(deadline)}
            values["ms"] = round((time.monotonic() - began) * 1000, 1)
            sys.stdout.write(json.dumps(values) + "\n")
            sys.stdout.flush()
            # Passes follow a fixed schedule; those that a late pass has missed are skipped.
            following += interval * (1 + max(0, int((time.monotonic() - following) // interval)))
            time.sleep(max(0.0, following - time.monotonic()))
    except (BrokenPipeError, KeyboardInterrupt):
        # Nothing more can be written, and the interpreter would try again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finally:
        driver.close()
    return 0


class _Machine:
    """CPU, memory and disks; CPU is the use since the last reading."""

    def __init__(self) -> None:
        self._before: tuple[float, float] | None = None

    def read(self) -> record_types.MachineSample:
        sizes = proc.read_meminfo()
        total, available = sizes.get("MemTotal", 0), sizes.get("MemAvailable", 0)
        load = (kernel_files.read_text("/", "/proc/loadavg") or "").split()
        return {
            "cpu": self._cpu(),
            "mem": round(100 * (1 - available / total), 1) if total else None,
            "mem_used": total - available,
            "mem_total": total,
            "load1": float(load[0]) if load else None,
            "disk": _read_disks(),
        }

    def _cpu(self) -> float | None:
        words = (kernel_files.read_text("/", "/proc/stat") or "").split("\n", 1)[0].split()[1:9]
        if len(words) < 5:
            return None
        ticks = [float(word) for word in words]
        now = (sum(ticks), ticks[3] + ticks[4])
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        return round(100 * (1 - (now[1] - before[1]) / (now[0] - before[0])), 1)


def _read_disks() -> list[record_types.DiskSpace]:
    """Measure local file systems only: a hung mount must not stop the sampler."""
    disks: list[record_types.DiskSpace] = []
    for path in ("/", "/tmp", "/dev/shm"):  # noqa: S108, RUF100
        try:
            statvfs = os.statvfs(path)
        except OSError:
            continue
        # A read-only image is always full.
        if statvfs.f_flag & os.ST_RDONLY:
            continue
        entry: record_types.DiskSpace = {
            "path": path,
            "free": statvfs.f_bavail * statvfs.f_frsize,
            "total": statvfs.f_blocks * statvfs.f_frsize,
        }
        if entry["total"] and (entry["free"], entry["total"]) not in [(e["free"], e["total"]) for e in disks]:
            disks.append(entry)
    return disks


class _DriverChild:
    """The child that asks the driver, and its state."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._requests = self._answers = -1
        self._asked_at: float | None = None
        self._buffer = b""
        self._not_before = 0.0

    def ask(self, deadline: float) -> record_types.GpuSamples:
        """Return the GPU part of a sample, at `deadline` (monotonic) at the latest."""
        if self._pid is None:
            if time.monotonic() < self._not_before:
                return _make_empty_sample("error", "the child that asks the driver ended; it is started again later")
            self._start()
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            try:
                os.write(self._requests, b"\n")
            except OSError:
                return self._ended()
        return self._answer(deadline)

    def close(self) -> None:
        """Kill the child without waiting: it may hang in the kernel."""
        if self._pid is not None:
            os.close(self._requests)
            os.close(self._answers)
            os.kill(self._pid, signal.SIGKILL)
            self._pid = None

    def _start(self) -> None:
        pid, request_reader, requests, answers, answer_writer = syscalls.fork_with_pipes(2)
        if pid == 0:
            os.close(requests)
            os.close(answers)
            _serve_requests(request_reader, answer_writer)
        os.close(request_reader)
        os.close(answer_writer)
        self._pid, self._requests, self._answers = pid, requests, answers
        self._asked_at, self._buffer = None, b""

    def _answer(self, deadline: float) -> record_types.GpuSamples:
        while b"\n" not in self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([self._answers], [], [], remaining_s)[0]:
                return self._stuck()
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                return self._ended()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        # It may be the late answer to a request that was stuck, and then it is the newest.
        self._asked_at = None
        sample: record_types.GpuSamples = json.loads(line)
        return sample

    def _stuck(self) -> record_types.GpuSamples:
        assert self._pid is not None
        assert self._asked_at is not None
        stuck_s = round(time.monotonic() - self._asked_at, 1)
        state, wchan = child_tasks.read_state(self._pid)
        sample = _make_empty_sample("stuck", f"the driver has not answered for {stuck_s:.0f} s")
        return {**sample, "stuck_s": stuck_s, "state": state, "wchan": wchan}

    def _ended(self) -> record_types.GpuSamples:
        assert self._pid is not None
        os.close(self._requests)
        os.close(self._answers)
        how = syscalls.describe_exit(os.waitpid(self._pid, 0)[1])
        self._pid = None
        self._not_before = time.monotonic() + _RESTART_SECONDS
        return _make_empty_sample("error", f"the child that asks the driver ended with {how}")


def _serve_requests(requests: int, answers: int) -> None:
    """Serve in the fork: one line of answer for each byte received; never return."""
    try:
        syscalls.set_parent_death_signal(signal.SIGKILL)
        spawn.redirect_stdio()
        session = gpu_library.open_gpus()
        xids: Any = None
        links = LinkCounter(session)
        if not isinstance(session, str) and session.init_error is None and session.vendor == "nvidia":
            xids = nvml.XidWatcher([handle for handle, _ in session.handles])
        while os.read(requests, 1):
            sample = sample_session(session)
            # After the values, because a GPU that dies during the reading has reported the reason by then.
            sample["xids"] = xids.take_events() if xids else []
            links.add(sample)
            syscalls.write_all(answers, json.dumps(sample).encode() + b"\n")
    finally:
        os._exit(1)


class LinkCounter:
    """Counts lost links of GPUs: NVLinks after a reported link error, XGMI links always."""

    def __init__(self, session: Any) -> None:
        readable = not isinstance(session, str) and session.init_error is None
        self._session = session
        self._first = {index: session.count_links(index) for index in session.indices} if readable else {}
        self._watched = set(self._first) if readable and session.vendor == "amd" else set[int]()

    def add(self, sample: record_types.GpuSamples) -> None:
        """Add to a sample the number of links that each watched GPU has lost."""
        self._watched |= {xid["gpu"] for xid in sample["xids"] if xid["xid"] == _NVLINK_ERROR} & set(self._first)
        for gpu in sample["gpus"]:
            if gpu["gpu"] in self._watched:
                gpu["links_lost"] = self._first[gpu["gpu"]] - self._session.count_links(gpu["gpu"])


def sample_session(session: Any = None) -> record_types.GpuSamples:
    """Return the GPUs' part of a sample, or why there is none; without a session it opens one.

    It asks the driver in this process, which may hang: call it in a child.
    """
    if session is None:
        session = gpu_library.open_gpus()
    if isinstance(session, str):
        return _make_empty_sample("absent", session)
    if session.init_error is not None:
        return _make_empty_sample("error", f"NVML does not open (code {session.init_error})")
    return {"status": "ok", "reason": None, "gpus": [_make_gpu_sample(device) for device in session.read_samples()]}


def _make_empty_sample(status: str, reason: str) -> record_types.GpuSamples:
    return {"status": status, "reason": reason, "gpus": [], "xids": []}


def _make_gpu_sample(device: dict[str, Any]) -> record_types.GpuSample:
    values = device["v"]
    memory, rows = values.get("memory") or {}, values.get("remapped") or [None] * 4
    trouble = {name: word for name, word in device["err"].items() if word in TROUBLE}
    return {
        "gpu": device["index"],
        "vendor": device["vendor"],
        "uuid": values.get("uuid"),
        "util": values.get("util"),
        "mem_used": memory.get("used"),
        "mem_total": memory.get("total"),
        "temp_c": values.get("temp"),
        "mem_temp_c": values.get("mem_temp"),
        "power_w": values.get("power_w"),
        "sm_clock": values.get("sm_clock"),
        "throttle": values.get("throttle"),
        "ecc_unc": values.get("ecc_unc"),
        "remap_pending": rows[2],
        "remap_failure": rows[3],
        "recovery_action": values.get("recovery_action"),
        "temp_limit_c": values.get("temp_max"),
        "mem_temp_limit_c": values.get("mem_temp_max"),
        "slowdown": values.get("slowdown"),
        "err": trouble,
        "codes": {name: device["codes"][name] for name in trouble},
        "links_lost": None,
    }
