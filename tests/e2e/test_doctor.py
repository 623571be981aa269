"""`doctor` tells whether a head can start runs, and which controllers it has."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from tests import json_shapes
from tests.documented import typed
from tests.e2e.conftest import MakeHead


def test_a_head_with_a_live_run_is_fit_and_shows_its_controller(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": ["sleep", "60"], "grace": "1s"})
    run = head.start()

    told = head.json(*typed("clusterctl doctor"))

    json_shapes.check(json_shapes.DOCTOR, told)
    assert told["verdict"] in ("PASS", "WARN")
    (controller,) = told["controllers"]
    assert controller["run"] == run
    assert controller["memory"] > 1 << 20
    lines = head.run("doctor").stdout.splitlines()
    assert sum(f"{run}: pid {controller['pid']}, " in line for line in lines) == 1
    warnings = sum(finding["status"] == "WARN" for finding in told["findings"])
    assert lines[-1] == ("OK" if not warnings else f"OK with {warnings} warning" + "s" * (warnings > 1))


def test_a_head_that_cannot_keep_runs_is_not_fit_and_says_what_to_set(make_head: MakeHead) -> None:
    head = make_head()
    blocked = head.folder / "blocked"
    blocked.write_text("a file where a folder should be")

    done = replace(head, env={**head.env, "XDG_STATE_HOME": str(blocked)}).run("doctor")

    assert done.returncode == 5
    assert "hint: set XDG_STATE_HOME to a folder on a local disk" in done.stdout
    assert done.stdout.splitlines()[-1] == "FAIL: no run can start from here"


def test_only_doctor_imports_psutil() -> None:
    program = "import sys; from clusterctl.cli.main import run; run(['{}']); sys.exit('psutil' in sys.modules)"

    for command in ("version", "ps"):
        assert subprocess.run([sys.executable, "-c", program.format(command)], check=False).returncode == 0
