"""Collectives as torch's flight recorder dumps them, and the names of torch that the shim uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.shim import torch_names
from clusterctl.agent.shim.collective_counters import DeviceWaits, are_collectives_timed

WHY = Path(__file__).resolve().parents[3] / "docs" / "why.md"


def recorded(record_id: int, duration_ms: float | None, group: str = "0", **more: Any) -> dict[str, Any]:
    """An entry as `FlightRecorder::dump_json` of torch 2.14.1 writes it (FlightRecorderDetail.hpp)."""
    entry = {
        "record_id": record_id,
        "pg_id": 0,
        "process_group": [group, "default_pg"],
        "thread_name": "python",
        "thread_id": "139",
        "collective_seq_id": record_id,
        "p2p_seq_id": 0,
        "op_id": record_id,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1795807132_000000000 + record_id,
        "input_sizes": [[1024]],
        "input_dtypes": ["Float"],
        "output_sizes": [[1024]],
        "output_dtypes": ["Float"],
        "state": "scheduled" if duration_ms is None else "completed",
        "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0 if duration_ms is None else 1795807133_000000000,
        "retired": duration_ms is not None,
        "timeout_ms": 600000,
        "is_p2p": False,
        **more,
    }
    return entry if duration_ms is None else {**entry, "duration_ms": duration_ms}


def test_each_collective_of_the_default_group_counts_once_with_its_time_on_the_gpu() -> None:
    waits = DeviceWaits()

    assert waits.add([recorded(0, 900.0), recorded(1, 600.5), recorded(2, None)]) == 1
    assert waits.add([recorded(1, 600.5), recorded(2, 1500.0), recorded(3, None)]) == 3
    assert waits.add([recorded(4, 9000.0, group="1"), recorded(5, 9000.0, is_p2p=True)]) == 3


@pytest.mark.parametrize("text", ["0", "", "no"])
def test_without_its_times_nothing_is_counted_on_the_gpu(text: str) -> None:
    assert not are_collectives_timed("nccl", {"TORCH_NCCL_ENABLE_TIMING": text})


def test_the_page_lists_every_name_of_torch_that_the_shim_uses() -> None:
    table = WHY.read_text().partition("| name of torch |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `([\w.]+)`", table, re.MULTILINE)

    assert sorted(listed) == sorted(torch_names.NAMES)
