"""The second look at machines is silent about what was there at the first."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.run.record.machine_ledger import record_check
from clusterctl.run.rules.machine_history import DAY_S
from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    # One warning is certain, whatever the machine is like. What another suite beside us runs comes and goes.
    certain = {"expect": {"python": "2.*"}, "severity": {"version.expected": "warn"}}
    head.write_local({"command": ["true"]}, workers=(1,), health={"ignore": ["run.leftover"], **certain})
    return head


def health_line(said: str) -> str:
    return next(line for line in said.splitlines() if " health " in line)


def test_a_start_says_which_warnings_are_new(head: LocalHead) -> None:
    first, second = head.run("up"), head.run("up")
    assert re.search(r"WARN.* \([a-z]+\.[a-z_]+", health_line(first.stderr)), "the first start names the checks"
    assert "last time" not in first.stderr
    assert "as last time" in health_line(second.stderr)
    assert "new:" not in second.stderr

    (known,) = (Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "health").iterdir()
    kept = json.loads(known.read_bytes())
    known.write_text(json.dumps({**kept, "findings": kept["findings"][1:]}))
    third = head.run("up")
    _, status, check = kept["findings"][0].split()[:3]
    assert health_line(third.stderr).rstrip("0123456789.s ").endswith(", 1 new")
    assert f"new: {status} {check}" in third.stderr


def test_health_shows_all_of_it(head: LocalHead) -> None:
    head.run("health")
    again = head.run("health")
    assert "WARN" in again.stdout or "UNKNOWN" in again.stdout
    assert "new:" not in again.stderr


def test_a_repeat_offender_is_marked_everywhere_and_its_history_is_shown(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": ["true"]}, workers=(1,), restart={"avoid": "repeat_offenders"})
    state, facts = Path(head.env["XDG_STATE_HOME"]) / "clusterctl", head.json("health")["nodes"][0]
    lost = Finding(
        check="gpu.lost", status=Status.FAIL, message="GPU is lost", node=facts["node"], action="REBOOT_NODE"
    )
    for days_ago, findings in ((3, [lost]), (2, []), (1, [lost])):
        record_check(state, {facts["node"]: facts["facts"]}, findings, time.time() - days_ago * DAY_S)

    mark = "failed its checks twice this week, both times gpu.lost"
    assert f"{facts['node']}: {mark}" in head.run("up", "--no-health").stderr
    assert f"{facts['node']}: {mark}" in head.run("who").stdout
    assert head.json("health", "--only", "host.disk")["nodes"][0]["offence"] == mark
    (history,) = head.json(*typed("clusterctl health --history NODE", NODE=facts["node"]))
    assert (history["offence"], history["counts"]["lost"]) == (mark, 0)
    assert mark in head.run(*typed("clusterctl health --history")).stdout
    unknown = head.run("health", "--history", "nobody")
    assert (unknown.returncode, "no history of `nobody`" in unknown.stderr) == (102, True)


def test_a_folder_for_the_vendor_has_serials_findings_history_and_no_secrets(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": ["true"]}, workers=(1,))
    programs = head.folder / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text("#!/bin/sh\necho Serial Number: 165; echo api_key=hunter2; echo 10.1.2.3\n")
    (programs / "nvidia-bug-report.sh").write_text('#!/bin/sh\necho report > "$2.gz"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    node = head.json("health")["nodes"][0]["node"]
    head = replace(head, env=head.env | {"PATH": f"{programs}:{os.environ['PATH']}"})
    done = head.run(*typed("clusterctl health --rma NODE", NODE=node))
    folder = head.folder / done.stdout.splitlines()[-1]
    files = {path.name: path.read_text() for path in folder.iterdir()}

    assert {"README.md", "findings.json", "history.json", "machine.txt", "nvidia-smi.txt"} <= files.keys()
    assert files["nvidia-bug-report.log.gz"] == "report\n"
    assert ("hunter2" in files["nvidia-smi.txt"], "10.1.2.3" in files["nvidia-smi.txt"]) == (False, False)
    assert all(f"`{name}`" in files["README.md"] for name in files if name != "README.md")
    assert "missing: `amd-smi.txt`" in files["README.md"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_node_that_fails_is_told_to_nagios_and_left_out_by_a_file(head: LocalHead) -> None:
    unmet = ("--set", "health.expect={python: '2.7'}", "--set", "health.severity={}", "--only", "version.expected")

    told = head.run("health", *unmet, "--format", "nagios", "--write-exclude", "bad.txt")
    well = head.run("health", "--only", "host.disk", "--skip", "host.disk*", "--format", "nagios")
    left_out = head.run("up", "--dry-run", "--exclude-file", "bad.txt")

    assert (told.returncode, well.returncode) == (2, 3)  # Without a check nobody knows.
    assert told.stdout.startswith("HEALTH CRITICAL - localhost version.expected: ")
    assert (head.folder / "bad.txt").read_text() == "# nodes that failed `clusterctl health`\nlocalhost\n"
    assert left_out.returncode == 102
    assert "bad.txt contains all chosen nodes" in left_out.stderr
