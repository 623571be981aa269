"""What the code of a job may write where its shim writes: its node looks at it before anybody else does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.inject import shim_files
from clusterctl.agent.linux import proc
from clusterctl.agent.protocol.events import Exited
from clusterctl.agent.protocol.record_types import WorkerStatusSample
from clusterctl.agent.supervisor.exit_status import read_error_file
from clusterctl.run.rules import failure_causes
from clusterctl.validation.derived_validators import derive_object_validator
from tests.agent.controlling import run_on

GOOD: dict[str, Any] = {
    "pid": 0,
    "start_time": 0,
    "tid": 0,
    "time": 1.0,
    "step": 3,
    "source": "user",
    "beats": 3,
    "looks": 0,
    "held": 0,
    "progress_time": 1.0,
    "seq": {},
    "backend": None,
    "timeout_s": None,
    "main_time": 1.0,
    "phase": {"name": "p", "since": 1.0, "limit_s": 60.0},
    "facts": {},
    "frameworks": [],
    "degraded": {},
}
LIES: dict[str, dict[str, Any]] = {
    "a limit that is text": {"phase": {"name": "p", "since": 1.0, "limit_s": "not a number"}},
    "a limit that is none": {"phase": {"name": "p", "since": 1.0, "limit_s": None}},
    "a phase that is a list": {"phase": [1]},
    "a phase without a name": {"phase": {"since": 1.0, "limit_s": 1.0}},
    "a step that is text": {"step": "9\u001b]52;c;x\u0007"},
    "a step that is a list": {"step": [1]},
    "a step beyond all": {"step": 10**40},
    "beats that are text": {"beats": "many"},
    "a time that is text": {"time": "now"},
    "a time that is none": {"time": None},
    "a time without an end": {"progress_time": float("inf")},
    "numbers of groups that are text": {"seq": "x"},
    "numbers of groups in threes": {"seq": {"g": [1, 2, 3]}},
    "a backend that is an object": {"backend": {}},
    "a time limit that is text": {"timeout_s": "x"},
    "a tid that is text": {"tid": "x"},
}


def status_of(lie: dict[str, Any]) -> dict[str, Any]:
    me = proc.read_stat(os.getpid())
    assert me is not None
    return {**GOOD, "pid": me.pid, "start_time": me.start_time, "tid": me.pid, **lie}


@pytest.mark.parametrize("lie", LIES.values(), ids=list(LIES))
def test_a_status_file_that_does_not_fit_is_none(tmp_path: Path, lie: dict[str, Any]) -> None:
    file = tmp_path / "rank-0.status.json"
    file.write_text(json.dumps(status_of({})))
    assert shim_files.read_status(str(tmp_path), 0, 2.0) is not None

    file.write_text(json.dumps(status_of(lie)))

    assert shim_files.read_status(str(tmp_path), 0, 2.0) is None


def test_facts_that_do_not_fit_are_left_out_and_nothing_else(tmp_path: Path) -> None:
    lie = {"facts": {"x": "y" * 5000}, "degraded": [1], "frameworks": "torch"}
    (tmp_path / "rank-0.status.json").write_text(json.dumps(status_of(lie)))

    found = shim_files.read_status(str(tmp_path), 0, 2.0)

    assert found is not None
    assert (found["step"], found["facts"], found["degraded"], found["frameworks"]) == (3, {}, {}, [])
    derive_object_validator(WorkerStatusSample)(found)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"pid": 1e999}', '{"pid":' + "1" * 5000 + "}", "\0"])
def test_a_status_file_that_is_no_json_of_ours_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank-0.status.json").write_text(text)

    assert shim_files.read_status(str(tmp_path), 0, 2.0) is None


@pytest.mark.parametrize(
    "error", [{"message": " "}, {"message": {"message": "\n", "extraInfo": {"py_callstack": " "}}}]
)
def test_an_error_of_blanks_alone_says_nothing(tmp_path: Path, error: dict[str, Any]) -> None:
    (tmp_path / "error.json").write_text(json.dumps(error))
    found = read_error_file(str(tmp_path / "error.json"))

    exited = Exited(attempt=0, rank=0, exit_code=1, error=found)

    assert failure_causes.analyse_exit("n", exited).cause.message == ""


HOSTILE = f"""
import json, os, time
folder = os.environ["CLUSTERCTL_STATUS_DIR"]
good = json.loads({json.dumps(json.dumps(GOOD))})
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
good |= {{"pid": os.getpid(), "start_time": int(fields[19]), "tid": os.getpid(), "time": time.monotonic()}}
for lie in json.loads({json.dumps(json.dumps(list(LIES.values())))}):
    part = os.path.join(folder, "part")
    with open(part, "w") as file:
        json.dump({{**good, **lie}}, file)
    os.replace(part, os.path.join(folder, "rank-0.status.json"))
    time.sleep(0.3)
"""


def test_whatever_a_worker_writes_its_run_has_a_controller_and_ends_as_it_should(tmp_path: Path) -> None:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    with run_on(tmp_path, f"python3 {tmp_path}/hostile.py", ("a",)) as run:
        run.start()

        assert run.ended(60) == 0
        assert "Infinity" not in run.dir.events.read_text()
