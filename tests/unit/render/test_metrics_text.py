"""The text that Prometheus reads: names by its conventions, and values that no name can break."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol.record_types import HealthSample
from clusterctl.cli.commands.metrics import parse_listen_address
from clusterctl.render.metric_labels import render_labels
from clusterctl.render.metrics_text import MAX_SAMPLE_AGE_S, RunMetrics, render_metrics
from clusterctl.render.status_report import WorkerActivity
from clusterctl.run.rules.controller_events import HealthChanged
from clusterctl.run.rules.goodput import Goodput, measure_goodput
from clusterctl.run.rules.state import RunPhase, RunState
from tests.unit.run.told import RUNNING, told

HOSTILE = 'a"} 1\nclusterctl_run_attended{run="\\"\x1b[2J'
NOW = 1000.0
GPU: dict[str, Any] = {
    "gpu": 0, "util": 58.0, "mem_used": 3, "mem_total": 8, "temp_c": 61.0, "power_w": 99.5, "sm_clock": 1980.0,
    "ecc_unc": 2,
}  # fmt: skip
HEALTH: HealthSample = {
    "t": NOW - 5.0, "cpu": 38.0, "mem_used": 4, "mem_total": 9, "load1": 1.5,
    "disk": [{"path": HOSTILE, "free": 1, "total": 2}], "gpus": [GPU, {"gpu": 1}],
}  # fmt: skip
LINE = re.compile(r'clusterctl_([a-z0-9_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (\S+)')


def run_metrics(state: RunState = RUNNING, **more: Any) -> RunMetrics:
    defaults: dict[str, Any] = {
        "has_controller": True,
        "goodput": measure_goodput(state, NOW),
        "activity": {0: WorkerActivity(step=7, last_progress_s=1.5), 1: WorkerActivity(step=6)},
        "health": {"n0": HEALTH},
    }
    return RunMetrics(state=state, **{**defaults, **more})


def render(*runs: RunMetrics) -> str:
    return render_metrics(runs, omitted=0, read_s=0.1, now=NOW, uid=1000)


def test_the_files_of_two_users_have_no_series_in_common() -> None:
    first, second = (render_metrics([], omitted=0, read_s=0.1, now=NOW, uid=uid) for uid in (1000, 1001))
    series = [{line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"} for text in (first, second)]

    assert series[0].isdisjoint(series[1])


def samples(text: str, name: str) -> list[tuple[dict[str, str], float]]:
    """Read the samples of a family; every line of the text must be of the format."""
    found = []
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith("#"):
            continue
        match = LINE.fullmatch(line)
        assert match, line
        if match[1] == name:
            pairs = re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match[2] or "")
            found.append(({key: unescape(value) for key, value in pairs}, float(match[3])))
    return found


def unescape(value: str) -> str:
    return re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], value)


@given(
    st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.text(st.characters(exclude_categories=["Cs"])))
)
def test_no_text_breaks_out_of_a_label(labels: dict[str, str]) -> None:
    pairs = re.findall(r'([a-z_]+)="((?:[^"\\\n]|\\[\\"n])*)"', render_labels(labels))

    assert {key: unescape(value) for key, value in pairs} == labels


def test_hostile_names_stay_inside_their_labels() -> None:
    trouble = HealthChanged(node=HOSTILE, gpu=3, check="gpu.xid", key=HOSTILE, status="FAIL", message=HOSTILE)
    state = told(replace(RUNNING, run=HOSTILE, name=HOSTILE), trouble)
    text = render(run_metrics(state))

    assert samples(text, "run_attended") == [({"run": HOSTILE}, 1.0)]
    assert samples(text, "node_disk_free_bytes") == [({"run": HOSTILE, "node": "n0", "path": HOSTILE}, 1.0)]
    [(labels, _)] = samples(text, "health_problem")
    assert labels == {"run": HOSTILE, "node": HOSTILE, "gpu": "3", "check": HOSTILE, "status": "FAIL"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("run_step", [({"run": "r-1"}, 6.0)]),
        ("run_progress_age_seconds", [({"run": "r-1"}, 1.5)]),
        ("rank_step", [({"run": "r-1", "node": "n0", "rank": "0"}, 7.0), ({"run": "r-1", "node": "n0", "rank": "1"}, 6.0)]),
        ("node_cpu_utilization_ratio", [({"run": "r-1", "node": "n0"}, 0.38)]),
        ("gpu_utilization_ratio", [({"run": "r-1", "node": "n0", "gpu": "0"}, 0.58)]),
        ("gpu_clock_hertz", [({"run": "r-1", "node": "n0", "gpu": "0"}, 1.98e9)]),
        ("run_exit_code", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_has_its_unit_and_its_labels_and_an_unknown_value_is_absent(
    name: str, expected: list[tuple[dict[str, str], float]]
) -> None:
    assert samples(render(run_metrics()), name) == expected


def test_only_the_gpus_of_the_run_have_series() -> None:
    assert samples(render(run_metrics(gpus={"n0": (1,)})), "gpu_power_watts") == []


def test_an_old_sample_has_no_values_but_its_time() -> None:
    old = HEALTH | {"t": NOW - MAX_SAMPLE_AGE_S - 1.0}
    text = render(run_metrics(health={"n0": old}))

    assert samples(text, "gpu_power_watts") == samples(text, "node_load1") == []
    assert samples(text, "node_sample_timestamp_seconds")[0][1] == NOW - MAX_SAMPLE_AGE_S - 1.0


def test_an_ended_run_tells_how_it_ended_and_nothing_of_its_machines() -> None:
    over = replace(RUNNING, phase=RunPhase.FAILED, exit_code=100, ended=NOW)
    text = render(run_metrics(over, goodput=Goodput(lost_steps=None)))

    assert samples(text, "run_exit_code") == [({"run": "r-1"}, 100.0)]
    assert [labels["state"] for labels, value in samples(text, "run_state") if value] == ["failed"]
    assert [samples(text, name) for name in ("rank_step", "gpu_power_watts", "run_repeated_steps")] == [[], [], []]


def test_every_family_is_declared_once_with_its_samples_below() -> None:
    text = render(run_metrics(), run_metrics(replace(RUNNING, run="r-2")))
    declared = re.findall(r"^# TYPE clusterctl_(\w+) (gauge|counter)$", text, re.MULTILINE)
    in_order = list(dict.fromkeys(re.findall(r"^clusterctl_(\w+)", text, re.MULTILINE)))

    assert [name for name, _ in declared] == in_order
    assert all(name.endswith("_total") == (kind == "counter") for name, kind in declared)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_has_no_complaint() -> None:
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=render(run_metrics()).encode(), capture_output=True, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("text", "address"),
    [("9736", ("127.0.0.1", 9736)), (":80", ("127.0.0.1", 80)), ("localhost:0", ("127.0.0.1", 0)),
     ("[::1]:9", ("::1", 9)), ("0.0.0.0:1", ("0.0.0.0", 1))],
)  # fmt: skip
def test_an_address_to_listen_on(text: str, address: tuple[str, int]) -> None:
    assert parse_listen_address(text) == address
