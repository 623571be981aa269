"""The steps of the child of one rank: the device alone, then the rounds with other nodes."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from .device_steps import Device, Task
from .network_rounds import Network
from .reporter import Reporter

_WINDOWS = 3


def measure_rank(settings: dict[str, Any]) -> int:
    """Measure the device of this rank, then the rounds; return the exit code."""
    out, limit_s = Reporter(settings["mark"]), float(settings["limit_s"])
    out.begin("context", limit_s)
    device = Device.open()
    out.report("context", **device.describe())
    out.begin("wait for the store", settings["start_limit_s"])
    network = Network(device, settings, out)
    # All ranks work on their devices at once, so that their times are comparable.
    network.meet("devices", settings["start_limit_s"])
    _measure_device(device, settings, out)
    network.meet("rounds", limit_s)
    network.make_rounds()
    network.finish()
    # Without the destructors: those of NCCL wait for peers that may be dead.
    os._exit(0)


def _measure_device(device: Device, settings: dict[str, Any], out: Reporter) -> None:
    limit_s, window_s = float(settings["limit_s"]), float(settings["window_s"])
    out.begin("memory", limit_s)
    out.report("memory", **device.test_memory(settings["share"]))
    work: dict[tuple[str, str], Task] = {}
    for dtype in device.dtypes:
        out.begin("gemm", limit_s)
        work["gemm", dtype] = device.prepare_gemm(dtype)
        out.report("bits", dtype=dtype, **device.repeat_gemm(work["gemm", dtype], settings["repeats"]))
    for what in device.copies:
        work["copy", what] = device.prepare_copy(what)
    # The windows of the steps alternate, so that a short disturbance concerns one window of several steps.
    for _ in range(_WINDOWS):
        for (step, kind), task in work.items():
            out.begin(step, limit_s)
            began = time.time()
            rate, cpu_s = device.measure_rate(task, window_s)
            out.report(step, kind=kind, rate=rate, cpu_s=round(cpu_s, 4), began=began)


torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(measure_rank(json.loads(sys.argv[1])))
