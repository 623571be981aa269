"""A run of many attempts: what its controller asks of a node does not become more with each."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterctl.config.spec import RestartSpec
from tests.agent.controlling import run_on

ATTEMPTS = 4
AGAIN = f"""
import os, sys, time
folder, attempt = sys.argv[1], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
if attempt < {ATTEMPTS - 1}:
    sys.exit(3 + attempt)
while not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.05)
"""


def test_a_node_is_asked_to_tell_of_its_run_once_a_session_and_of_whole_attempts_once(tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    restart = RestartSpec(max_restarts=ATTEMPTS, backoff=0.0)
    with run_on(tmp_path, f"{sys.executable} {script} {tmp_path}", ("a",), restart=restart) as run:
        run.start()
        output = run.dir.node("a") / f"attempt-{ATTEMPTS - 1}/rank-0.log"
        run.reaches(lambda _: output.exists() and output.stat().st_size, 60)
        assert run.nodes.asked("a")["prepare"] == ATTEMPTS
        assert run.nodes.asked("a")["follow"] == 1
        (tmp_path / "go").touch()
        assert run.ended() == 0
    for attempt in range(ATTEMPTS):
        said = (run.dir.node("a") / f"attempt-{attempt}/rank-0.log").read_text()
        assert said == f"attempt {attempt}\n"
