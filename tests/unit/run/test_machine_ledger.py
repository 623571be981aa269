"""The file with the history of machines: complete, bounded, never torn, and never in the way of a run."""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.linux.filesystems import Mount
from clusterctl.errors import ClusterctlError
from clusterctl.health.deep.measurements import Measure, Measurement, add_measurements
from clusterctl.health.findings import Finding, Status
from clusterctl.run.record import machine_ledger
from clusterctl.run.record.machine_ledger import (
    HistoryError,
    read_histories,
    read_offences,
    read_slower,
    record_check,
    record_run,
)
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import create_run_dir
from clusterctl.run.rules.controller_events import HealthChanged, LinkChanged, RunCreated
from clusterctl.run.rules.machine_history import DAY_S, RecordKind
from tests.unit.health import healthy

NOW = 1_800_000_000.0
DAY = DAY_S


def xid(node: str = "gpu00", gpu: int | None = 3, status: Status = Status.FAIL) -> Finding:
    return Finding(
        check="gpu.xid",
        status=status,
        message="XID 79",
        node=node,
        gpu=gpu,
        action="REBOOT_NODE",
        override_key="xid.79",
    )


def facts(**changes: Any) -> dict[str, Any]:
    return healthy.changed(healthy.facts(), **changes)


def check(state: Path, at: float, *findings: Finding, **changes: Any) -> None:
    record_check(state, {"gpu00": facts(**changes)}, findings, NOW + at)


def records(state: Path, node: str = "gpu00") -> list[tuple[str, float, float, int]]:
    (history,) = read_histories(state, NOW, node)
    return [(r.cause, r.at - NOW, r.last_at - NOW, r.count) for r in reversed(history.records)]


# --- what is stored


def test_a_finding_that_lasts_is_one_record_and_one_that_comes_back_is_another(tmp_path: Path) -> None:
    for at, findings in enumerate([[xid()], [xid()], [], [xid()]]):
        check(tmp_path, at, *findings)
    assert records(tmp_path) == [("xid.79", 0.0, 1.0, 2), ("xid.79", 3.0, 3.0, 1)]


def test_what_passed_and_what_concerns_no_node_is_not_stored(tmp_path: Path) -> None:
    check(tmp_path, 0, xid(status=Status.PASS), xid(status=Status.UNKNOWN), xid(node=None))  # type: ignore[arg-type]
    assert records(tmp_path) == []


def test_a_node_that_cannot_be_reached_is_known_by_its_name_until_it_answers(tmp_path: Path) -> None:
    closed = Finding(check="net.ssh", status=Status.FAIL, message="no route", node="gpu00")
    record_check(tmp_path, {"gpu00": {"unreachable": "no route"}}, [closed], NOW)
    check(tmp_path, 1, xid())
    record_check(tmp_path, {"gpu00": {"unreachable": "no route"}}, [closed], NOW + 2)
    (history,) = read_histories(tmp_path, NOW)
    assert history.machine.identity == "machine-0"
    assert history.counts == {RecordKind.FINDING: 3}


def offend(state: Path) -> None:
    check(state, 0, xid())
    check(state, DAY)
    check(state, 2 * DAY, xid())


OFFENCE = "failed its checks twice this week, both times XID 79"


def offences(state: Path, nodes: tuple[str, ...] = ("gpu00",)) -> Mapping[str, str]:
    return read_offences(state, nodes, NOW + 3 * DAY)


def test_a_machine_that_failed_twice_is_marked(tmp_path: Path) -> None:
    offend(tmp_path)
    assert offences(tmp_path, ("gpu00", "gpu01")) == {"gpu00": OFFENCE}


def test_a_repaired_gpu_and_a_replaced_machine_start_clean(tmp_path: Path) -> None:
    offend(tmp_path)
    check(tmp_path, 2.5 * DAY, gpu3__serial="new")
    assert offences(tmp_path) == {}
    offend(tmp_path / "other")
    record_check(tmp_path / "other", {"gpu00": healthy.facts(1)}, [], NOW + 2.5 * DAY)
    assert offences(tmp_path / "other") == {}


def test_a_gpu_that_is_missing_was_not_replaced(tmp_path: Path) -> None:
    offend(tmp_path)
    lost = facts()
    del lost["groups"]["nvml"]["data"]["devices"][3]
    record_check(tmp_path, {"gpu00": lost}, [], NOW + 2.5 * DAY)
    assert offences(tmp_path) == {"gpu00": OFFENCE}


def test_a_gpu_takes_its_history_along_into_another_machine(tmp_path: Path) -> None:
    offend(tmp_path)
    moved = healthy.changed(
        healthy.facts(1), gpu5__serial=healthy.facts()["groups"]["nvml"]["data"]["devices"][3]["v"]["serial"]
    )
    record_check(tmp_path, {"gpu01": moved}, [], NOW + 2.5 * DAY)
    assert offences(tmp_path, ("gpu01",)) == {"gpu01": OFFENCE}


def test_a_run_stores_its_losses_and_findings_once(tmp_path: Path) -> None:
    check(tmp_path, 0)
    writer = RunDirWriter(create_run_dir("llm", tmp_path / "runs"))
    failed = {"check": "gpu.xid", "key": "gpu.xid 79", "status": "FAIL", "message": "XID 79", "action": "REBOOT_NODE"}
    for at, event in enumerate(
        (
            RunCreated(run="llm", name="llm", path=""),
            HealthChanged(node="gpu00", gpu=3, **failed),  # type: ignore[arg-type]
            LinkChanged(node="gpu00", link="lost"),
            LinkChanged(node="gpu09", link="lost"),
        )
    ):
        writer.append(event, NOW + at)
        record_run(writer.run, NOW + at)
    writer.close()
    assert records(tmp_path) == [("xid.79", 1.0, 1.0, 1), ("xid.79", 2.0, 2.0, 1)]
    assert records(tmp_path, "gpu09") == [("", 3.0, 3.0, 1)]


def measured(state: Path, day: float, tflops: float, **changes: Any) -> None:
    told = facts(**changes)
    usual = {"measure": Measure.GEMM_TFLOPS, "variant": "bf16", "gpu": 3}
    values = [Measurement(node="gpu00", value=value, **usual) for value in (tflops - 50, tflops)]  # type: ignore[arg-type]
    pair = Measurement(node="gpu00", measure=Measure.PAIR_ALL_REDUCE, peers=("gpu01",), value=tflops)
    add_measurements({"gpu00": told}, [*values, pair])
    record_check(state, {"gpu00": told}, [], NOW + day * DAY)


def test_a_gpu_is_compared_with_its_own_past_and_a_new_one_has_none(tmp_path: Path) -> None:
    for day in range(40):
        measured(tmp_path, day, 700.0)
        measured(tmp_path, day + 0.01, 698.0)
    assert read_slower(tmp_path, ["gpu00"], NOW + 40 * DAY) == {}
    measured(tmp_path, 40, 620.0)
    assert read_slower(tmp_path, ["gpu00"], NOW + 40 * DAY) == {
        "gpu00": ["GPU 3: gemm tflops bf16 11% below its own last month"]
    }
    assert read_slower(tmp_path, ["gpu00"], NOW + 60 * DAY) == {}
    measured(tmp_path, 41, 500.0, gpu3__serial="new")
    assert read_slower(tmp_path, ["gpu00"], NOW + 41 * DAY) == {}


# --- bounds


def test_old_records_and_too_many_warnings_are_removed(tmp_path: Path) -> None:
    def noise(word: str) -> list[Finding]:
        return [
            Finding(check=f"{word}{i}", status=Status.WARN, message="x" * 1000, node="gpu00", action="NONE")
            for i in range(150)
        ]

    for at, findings in ((-200 * DAY, [xid()]), (-1, [xid()]), (0, noise("a")), (1, noise("b"))):
        check(tmp_path, at, *findings)
    (history,) = read_histories(tmp_path, NOW, "gpu00")
    causes = [r.cause for r in history.records]
    assert len(causes) == 200
    assert causes.count("xid.79") == 1
    assert sum(cause.startswith("b") for cause in causes) == 150
    assert max(len(r.text) for r in history.records) == 300


# --- troubles with the file


def test_nothing_is_written_by_a_reader(tmp_path: Path) -> None:
    assert read_histories(tmp_path, NOW) == []
    assert offences(tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("told", [{"groups": 1}, {"groups": {"nvml": {"data": {"devices": [{"index": "x"}]}}}}])
def test_invalid_facts_of_a_node_are_an_error_of_the_history_alone(tmp_path: Path, told: dict[str, Any]) -> None:
    with pytest.raises(HistoryError):
        record_check(tmp_path, {"gpu00": told}, [], NOW)
    check(tmp_path, 1, xid())
    assert len(records(tmp_path)) == 1


def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "machines.db").write_bytes(b"no database" * 1000)
    with pytest.raises(HistoryError, match="not written: file is not a database") as raised:
        check(tmp_path, 0)
    assert "machines.db" in str(raised.value.hint)
    assert isinstance(raised.value, ClusterctlError)


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    check(tmp_path, 0, xid())
    with contextlib.closing(sqlite3.connect(tmp_path / "machines.db")) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(HistoryError, match="newer clusterctl"):
        check(tmp_path, 1)


@pytest.mark.parametrize(
    ("fstype", "mode"), [("ext4", "wal"), ("nfs4", "delete"), ("fuse.sshfs", "delete"), ("fuse.odd", "delete")]
)
def test_a_network_filesystem_gets_no_write_ahead_log(fstype: str, mode: str) -> None:
    mounts = (Mount("dev", "/", "ext4", "rw"), Mount("filer:/home", "/home", fstype, "rw"))
    assert machine_ledger.choose_journal_mode("/home/ann/.local/state/clusterctl", mounts) == mode
    assert machine_ledger.choose_journal_mode("/var/clusterctl", mounts) == "wal"


# --- several writers, and their end

WRITER = """\
import sys, time
from pathlib import Path
from tests.unit.run.test_machine_ledger import check, xid
state, first = Path(sys.argv[1]), int(sys.argv[2])
for number in range(first, first + int(sys.argv[3])):
    check(state, number, xid(gpu=number % 8), xid(gpu=None))
    print(number, flush=True)
"""


def writer(state: Path, first: int, count: int) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", WRITER, str(state), str(first), str(count)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def count_checks(state: Path) -> int:
    with contextlib.closing(sqlite3.connect(state / "machines.db")) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (checks,) = db.execute("SELECT checks FROM machines").fetchone()
        (found,) = db.execute("SELECT sum(count) FROM records WHERE gpu = -1").fetchone()
    assert checks == found  # A check and its findings are one transaction.
    return int(checks)


def test_two_heads_write_at_once_and_lose_nothing(tmp_path: Path) -> None:
    with writer(tmp_path, 0, 5) as one, writer(tmp_path, 1000, 5) as other:
        assert len([*one.communicate(timeout=60)[0].split(), *other.communicate(timeout=60)[0].split()]) == 10
    assert count_checks(tmp_path) == 10


IS_LONG = bool(os.environ.get("CLUSTERCTL_LONG"))
KILLS = 200 if IS_LONG else 3


@pytest.mark.timeout(3600)
def test_a_writer_that_is_killed_tears_nothing_and_what_it_has_stored_is_there(tmp_path: Path) -> None:
    stored, rng = 0, random.Random(1)
    for round_number in range(KILLS):
        with writer(tmp_path, 1000 * round_number, 1000) as process:
            assert process.stdout is not None
            process.stdout.readline()
            select.select([], [], [], rng.uniform(0, 0.1))  # The moment of the kill is random.
            process.kill()
            printed = process.stdout.read().splitlines()
        assert process.returncode == -signal.SIGKILL
        stored += 1 + len(printed)
        found = count_checks(tmp_path)
        assert stored <= found <= stored + 1
        stored = found


# --- size and speed

RUNS, NODES = (1000, 200) if IS_LONG else (6, 20)


@pytest.mark.timeout(3600)
def test_a_thousand_runs_of_two_hundred_nodes_stay_small_and_are_read_in_a_moment(tmp_path: Path) -> None:
    rng = random.Random(1)
    names = [f"gpu{node:03d}" for node in range(NODES)]
    cards = [{"index": gpu, "v": {"name": "NVIDIA H100 80GB HBM3"}} for gpu in range(8)]
    told = {
        name: {
            "groups": {
                "host": {"data": {"machine_id": f"{number:032x}"}},
                "nvml": {
                    "data": {"devices": [{**c, "v": {**c["v"], "serial": f"{name}-{c['index']}"}} for c in cards]}
                },  # type: ignore[dict-item]
            }
        }
        for number, name in enumerate(names)
    }
    for number in range(RUNS):
        at = NOW - (RUNS - number) * 180 * DAY / RUNS
        findings = [
            Finding(check="host.governor", status=Status.WARN, message="powersave" * 5, node=name, action="FIX_CONFIG")
            for name in names
        ]
        findings += [xid(name, rng.randrange(8)) for name in names if rng.random() < 0.05]
        findings += [
            Finding(check=f"host.{rng.choice('abcd')}", status=Status.WARN, message="x" * 80, node=name, action="NONE")
            for name in names
            if rng.random() < 0.1
        ]
        rates = (Measure.GEMM_TFLOPS, Measure.MEMORY_BANDWIDTH, Measure.HOST_TO_DEVICE, Measure.DEVICE_TO_HOST)
        values = [
            Measurement(node=name, measure=rate, gpu=gpu, value=rng.gauss(700, 10), variant="bf16")
            for rate in rates
            for name in names
            for gpu in range(8)
        ]
        add_measurements(told, values if number >= RUNS - 150 and number % 5 == 0 else [])
        record_check(tmp_path, told, findings, at, f"llm-{number}")
    assert sum(path.stat().st_size for path in tmp_path.glob("machines.db*")) < 20e6
    began = time.process_time()
    assert len(read_histories(tmp_path, NOW)) == NODES
    assert time.process_time() - began < 0.3
