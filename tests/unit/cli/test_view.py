"""What `up` and `attach` show, watched from outside: a process that reads a run directory and is sent signals."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from clusterctl.agent.protocol import output_file
from clusterctl.run import events, store

VIEW = """
import sys
from pathlib import Path
from clusterctl.cli.view import RunScreen, ViewOptions
from clusterctl.render.console import Console
from clusterctl.run.store import RunDir
screen = RunScreen(RunDir(Path(sys.argv[1])), Console.standard(), ViewOptions(owns=True))
print("left:", screen.follow().value, file=sys.stderr)
"""
LINES = 200_000


def ended_run(root: Path, output: bytes) -> store.RunDir:
    run = store.create("demo", root)
    writer = store.Writer(run)
    nodes = [{"node": "gpu01", "node_rank": 0, "address": None, "ranks": [0]}]
    writer.append(events.Created(run=run.run, name="demo", path=""), 1.0)
    writer.append(events.Attempt(attempt=0, world_size=1, master_addr=None, master_port=None, nodes=nodes), 2.0)
    writer.append(events.Ended(state="succeeded", exit_code=0), 3.0)
    writer.close()
    log = run.node("gpu01") / output_file(0, 0)
    log.parent.mkdir(parents=True)
    log.write_bytes(output)
    return run


def test_a_signal_cuts_short_what_is_still_to_be_shown_of_a_run_that_has_ended(tmp_path: Path) -> None:
    run = ended_run(tmp_path, (b"x" + b"." * 60 + b"\n") * LINES)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", VIEW, run.path], stdout=pipe, stderr=pipe, text=True) as view:
        assert view.stdout is not None
        shown = view.stdout.readline().count("x")
        view.send_signal(signal.SIGTERM)
        out, err = view.communicate(timeout=60)
    assert shown + out.count("x") < LINES / 2
    assert f"the rest of the output: `clusterctl logs {run.run}`" in err
    assert "left: ended" in err
    assert view.returncode == 0
