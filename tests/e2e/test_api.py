"""Programs: the examples of docs/api.md run, and SKILL.md says what is so."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from clusterctl.errors import ExitCode
from tests.documented import typed
from tests.e2e.conftest import LocalHead, MakeHead

DOCS = Path(__file__).resolve().parents[2] / "docs"
SKILL = (DOCS / "SKILL.md").read_text()


def run_program(head: LocalHead, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        cwd=head.folder, env={**head.env, "FIRST_KEY": "s3same"}, capture_output=True, text=True, timeout=220, check=False,
    )  # fmt: skip


@pytest.mark.timeout(240)
def test_the_examples_of_the_page_run(head: LocalHead) -> None:
    head.write_local({"command": "true"}, sync="none")
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(), re.DOTALL)

    done = run_program(head, "\n".join(blocks))

    assert done.returncode == 0, done.stdout + done.stderr
    assert "first-" in done.stdout


ERRORS = """
import threading, time
from clusterctl import api, errors
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
said = []
local = {"host": "localhost", "transport": "local", "gpus": 0}
def caught(call):
    try:
        call()
    except api.ClusterctlError as error:
        said.append([type(error).__name__, int(error.exit_code), str(error)])
caught(lambda: api.make_spec({"hosts": [local], "jobs": {}}))
caught(lambda: api.load("none.yaml"))
caught(lambda: api.find("none"))
caught(lambda: api.Run("none").status())
caught(lambda: api.up(api.make_spec({"hosts": [local], "sync": "none"})))
there = api.make_spec({"name": "far", "hosts": "nowhere.invalid", "sync": "none", "job": {"command": "true"}})
caught(lambda: api.up(there))
secret = {"hosts": [local], "sync": "none", "name": "kept", "secrets": {"KEY": {"env": "FIRST_KEY"}}}
run = api.up(api.make_spec({**secret, "job": {"command": 'echo "${#KEY}"'}}), health=False)
status = run.wait(60)
print([said, [line.text for line in run.logs()], status.exit_code, str(run.directory)].__repr__())
"""


@pytest.mark.timeout(240)
def test_errors_are_typed_and_secrets_reach_the_ranks_of_a_process_with_threads(head: LocalHead) -> None:
    done = run_program(head, ERRORS)
    assert done.returncode == 0, done.stderr
    said, lines, code, directory = eval(done.stdout)

    assert [(name, number) for name, number, _ in said] == [
        ("ConfigError", 3), ("ConfigError", 3), ("NotFoundError", 102), ("NotFoundError", 102), ("RefusedError", 6),
        ("RunFailed", 4),
    ]  # fmt: skip
    assert (lines, code) == (["6"], 0)
    assert not any(b"s3same" in path.read_bytes() for path in Path(directory).rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def told(make_head: MakeHead) -> LocalHead:
    """A head on which a rank fails."""
    head = make_head()
    head.write_local(
        {"command": 'echo "rank $RANK"; [ "$RANK" = 0 ] || { echo "RuntimeError: boom" >&2; exit 3; }'}, (2,)
    )
    return head


@pytest.mark.timeout(240)
def test_what_the_skill_types_gives_what_it_says(told: LocalHead) -> None:
    fast = ("--set", "sync=none", "--no-health")
    assert told.run(*typed("clusterctl config -q cluster.yaml")).returncode == 0
    assert json.loads(told.run(*typed("clusterctl up --dry-run --json")).stdout)["nodes"][0]["workers"]
    assert json.loads(told.run(*typed("clusterctl health --json"), "--only", "host.disk").stdout)["verdict"]
    run = json.loads(told.run(*typed("clusterctl up -d --json"), *fast).stdout or "{}").get("run") or told.newest()
    waited = told.run(*typed("clusterctl wait RUN --timeout 10m --json", RUN=run))
    assert (waited.returncode, json.loads(waited.stdout)) == (100, {"run": run, "state": "failed", "exit_code": 100})
    status = json.loads(told.run(*typed("clusterctl status RUN --json", RUN=run)).stdout)
    assert {"state", "cause", "workers", "stall", "health", "goodput"} <= status.keys()
    logs = told.run(*typed("clusterctl logs RUN --rank 1 -n 50 --format json", RUN=run)).stdout.splitlines()
    assert {"time", "node", "rank", "attempt", "text"} <= json.loads(logs[0]).keys()
    why = told.run(*typed("clusterctl why RUN --json", RUN=run))
    assert (why.returncode, json.loads(why.stdout)["culprits"][0]["rank"]) == (0, 1)
    assert told.run(*typed("clusterctl down RUN --json", RUN=run)).returncode == 0
    assert run in {entry["run"] for entry in json.loads(told.run(*typed("clusterctl ps -a --json")).stdout)}


def test_the_skill_names_exit_codes_that_there_are() -> None:
    section = SKILL.split("## Exit codes\n\n")[1].split("\n\n")[0]
    named = {int(code) for code in re.findall(r"(?:^|· )(\d+) ", section, re.MULTILINE)}
    assert named == {int(code) for code in ExitCode} - {ExitCode.BUG, ExitCode.INTERRUPTED}


def test_the_index_for_programs_leads_to_pages() -> None:
    links = re.findall(r"\]\((.*?)\)", (DOCS / "llms.txt").read_text())
    assert [link for link in links if not (DOCS / link).is_file()] == []
    assert len(links) > 10
