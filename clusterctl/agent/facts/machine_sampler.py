"""Samples GPUs and machine during a run, and prints a line of JSON every few seconds, even if the driver hangs.

A child process keeps the driver's library open and reads the GPUs. If the child hangs, the samples report for how long.
The sampler does not start a second child, because a second child would hang too.

The format of a sample:

    {"t": wall clock, "m": monotonic clock, "ms": duration of the sample,
     "status": "ok" | "stuck" | "error" | "absent", "reason": text | null,
     "stuck_s": seconds without an answer (only if stuck, with "state" and "wchan" of the child),
     "cpu": percent | null, "mem": percent, "mem_used": bytes, "mem_total": bytes, "load1": number,
     "disk": [{"path", "free", "total"}],
     "gpus": [{"gpu", "vendor", "uuid", "util", "mem_used", "mem_total", "temp_c", "mem_temp_c", "power_w", "sm_clock",
               "pcie_gen", "pcie_width", "throttle", "ecc_unc", "remap_pending", "remap_failure", "recovery_action",
               "temp_limit_c", "mem_temp_limit_c", "slowdown": [cause that slows the clocks],
               "err": {field: error name}, "codes": {field: the vendor's error number}, "links_lost": n | null}],
     "xids": [{"gpu": index | null, "xid": code}]}   reported by the driver since the previous sample

A value that could not be read is null; "err" has the errors that concern the GPU itself (`gpu_reading_base`), by field.
"links_lost" counts the links that were up at the start and are down now. XGMI links are always counted, NVLinks only
after the GPU has reported a link error. While the driver is stuck, "gpus" is empty, because an old value would look
like a new value.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time

from clusterctl.agent.facts import child_tasks, nvml
from clusterctl.agent.facts.gpu_reading_base import GPU_ERRORS
from clusterctl.agent.facts.gpu_vendor_choice import open_gpu_reader
from clusterctl.agent.linux import kernel_files, proc, spawn, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol import record_types

INTERVAL_S = 15.0
PASS_TIMEOUT_S = 5.0
"""The driver counts as stuck if it has not answered for all GPUs within so many seconds."""

_NVLINK_ERROR = 74
"""The XID of a link error. After this XID the sampler counts the lost links of the GPU, which show a lasting fault."""
_RESTART_DELAY_S = 60.0
_CPU_INTERVAL_S = 0.25
"""The seconds over which a single sample measures the CPU use."""


def sample_machine() -> record_types.MachineSample:
    """Return the machine's part of a single sample. The CPU use is measured over `_CPU_INTERVAL_S`."""
    machine = _MachineReader()
    machine.read()
    time.sleep(_CPU_INTERVAL_S)
    return machine.read()


def main(arguments: list[str]) -> int:
    """Print samples until stdout is closed or the parent has ended. The only argument is the interval in seconds."""
    interval = float(arguments[0]) if arguments else INTERVAL_S
    machine, driver = _MachineReader(), _DriverChild()
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
            # Samples follow a fixed schedule. A sample is skipped if the previous sample ends too late.
            following += interval * (1 + max(0, int((time.monotonic() - following) // interval)))
            time.sleep(max(0.0, following - time.monotonic()))
    except (BrokenPipeError, KeyboardInterrupt):
        # stdout is closed. Without this call, the interpreter would try to write buffered output at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    finally:
        driver.close()
    return 0


class _MachineReader:
    """Reads CPU, memory and disks. The CPU use is the average since the previous reading."""

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
    """Return the space of local file systems only, because a hung mount would stop the sampler."""
    disks: list[record_types.DiskSpace] = []
    for path in ("/", "/tmp", "/dev/shm"):  # noqa: S108, RUF100
        try:
            statvfs = os.statvfs(path)
        except OSError:
            continue
        # Skip read-only images, which are always full.
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
    """The child process that reads the GPUs by the driver's library."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._requests = self._answers = -1
        self._asked_at: float | None = None
        self._buffer = b""
        self._next_start = 0.0

    def ask(self, deadline: float) -> record_types.GpuSamples:
        """Return the GPUs' part of a sample. Wait until `deadline` (monotonic) at most."""
        if self._pid is None:
            if time.monotonic() < self._next_start:
                text = "the child that reads the GPUs has ended; the sampler starts it again later"
                return _make_empty_sample("error", text)
            self._start()
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            try:
                os.write(self._requests, b"\n")
            except OSError:
                return self._reap()
        return self._receive_answer(deadline)

    def close(self) -> None:
        """Kill the child without waiting for its exit, because the child may hang in the kernel."""
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

    def _receive_answer(self, deadline: float) -> record_types.GpuSamples:
        while b"\n" not in self._buffer:
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0 or not select.select([self._answers], [], [], remaining_s)[0]:
                return self._make_stuck_sample()
            chunk = os.read(self._answers, 1 << 16)
            if not chunk:
                return self._reap()
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        # The line may be the late answer to an earlier request. Even a late answer is the newest answer.
        self._asked_at = None
        sample: record_types.GpuSamples = json.loads(line)
        return sample

    def _make_stuck_sample(self) -> record_types.GpuSamples:
        assert self._pid is not None
        assert self._asked_at is not None
        stuck_s = round(time.monotonic() - self._asked_at, 1)
        state, wchan = child_tasks.read_process_state(self._pid)
        sample = _make_empty_sample("stuck", f"the driver has not answered for {stuck_s:.0f} s")
        return {**sample, "stuck_s": stuck_s, "state": state, "wchan": wchan}

    def _reap(self) -> record_types.GpuSamples:
        assert self._pid is not None
        os.close(self._requests)
        os.close(self._answers)
        how = syscalls.describe_exit(os.waitpid(self._pid, 0)[1])
        self._pid = None
        self._next_start = time.monotonic() + _RESTART_DELAY_S
        return _make_empty_sample("error", f"the child that reads the GPUs ended with {how}")


def _serve_requests(requests: int, answers: int) -> None:
    """In the child, write one sample for each received byte; never return."""
    try:
        syscalls.set_parent_death_signal(signal.SIGKILL)
        spawn.redirect_stdio()
        reader = open_gpu_reader()
        xids: Any = None
        links = LostLinkCounter(reader)
        if not isinstance(reader, str) and reader.init_error is None and reader.vendor == "nvidia":
            xids = nvml.XidWatcher([handle for handle, _ in reader.handles])
        while os.read(requests, 1):
            sample = sample_gpus(reader)
            # Read XIDs after the values. If a GPU dies during the reading, its XID is then in the same sample.
            sample["xids"] = xids.take_xid_errors() if xids else []
            links.add_lost_links(sample)
            syscalls.write_all(answers, json.dumps(sample).encode() + b"\n")
    finally:
        os._exit(1)


class LostLinkCounter:
    """Counts the lost links of GPUs: XGMI links always, NVLinks only after the GPU has reported a link error."""

    def __init__(self, reader: Any) -> None:
        readable = not isinstance(reader, str) and reader.init_error is None
        self._reader = reader
        self._first_links = {index: reader.count_active_links(index) for index in reader.indices} if readable else {}
        self._watched = set(self._first_links) if readable and reader.vendor == "amd" else set[int]()

    def add_lost_links(self, sample: record_types.GpuSamples) -> None:
        """Add the number of lost links to each GPU of a sample whose links are counted."""
        self._watched |= {xid["gpu"] for xid in sample["xids"] if xid["xid"] == _NVLINK_ERROR} & set(self._first_links)
        for gpu in sample["gpus"]:
            if gpu["gpu"] in self._watched:
                gpu["links_lost"] = self._first_links[gpu["gpu"]] - self._reader.count_active_links(gpu["gpu"])


def sample_gpus(reader: Any = None) -> record_types.GpuSamples:
    """Return the GPUs' part of a sample, or the reason why this part is missing. Without `reader`, open a reader.

    Call this function in a child process, because the driver may hang.
    """
    if reader is None:
        reader = open_gpu_reader()
    if isinstance(reader, str):
        return _make_empty_sample("absent", reader)
    if reader.init_error is not None:
        return _make_empty_sample("error", f"NVML does not open (code {reader.init_error})")
    return {"status": "ok", "reason": None, "gpus": [_make_gpu_sample(device) for device in reader.read_samples()]}


def _make_empty_sample(status: str, reason: str) -> record_types.GpuSamples:
    return {"status": status, "reason": reason, "gpus": [], "xids": []}


def _make_gpu_sample(device: dict[str, Any]) -> record_types.GpuSample:
    values = device["v"]
    memory, rows = values.get("memory") or {}, values.get("remapped") or [None] * 4
    trouble = {name: word for name, word in device["err"].items() if word in GPU_ERRORS}
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
        "pcie_gen": values.get("pcie_gen"),
        "pcie_width": values.get("pcie_width"),
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
