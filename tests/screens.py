"""Captures of the screens that people see most: `python -m tests.screens docs/screens` (`make screens`).

Each command is typed into a terminal of tmux, and what stands on it is kept as text: of runs that are really made on this
machine, and for `*-200` of runs of 200 nodes with 8 ranks each as `tests.big_run` makes them.

    python -m tests.screens FOLDER --columns 60 --plain       # narrow, in ASCII, without colour
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.big_run import End, made

JOB = """\
import os, sys, time
import clusterctl

rank = int(os.environ["RANK"])
for step in range(40):
    clusterctl.progress(step=step)
    print(f"step {step} loss {4 / (1 + step / 9):.4f}", flush=True)
    time.sleep(0.1)
    if "--boom" in sys.argv and rank == 2 and step == 20:
        raise ValueError("batch 20 has no rows")
"""
CLUSTER = """\
version: 1
hosts:
  localhost.[0-1]: {workers: 2, transport: local}
job: {script: train.py, grace: 2s}
"""
SCREENS = {
    "front": "clusterctl",
    "dry-run": "clusterctl up --dry-run",
    "health": "clusterctl health --skip 'run.*,host.load,host.kernel_log'",
    "up": "clusterctl up",
    "crash": "clusterctl up -- --boom",
    "ps": "clusterctl ps -a",
    "status": "clusterctl status",
    "why": "clusterctl why",
    "diff": "clusterctl diff $(clusterctl ps -aq | head -2)",
    "status-200": "clusterctl status stalled",
    "why-200": "clusterctl why stalled",
    "top-200": "clusterctl top running",
}
"""Name of the capture to what is typed, in this order; those with `-200` are typed on another head."""
DONE = "screen-is-whole"
DEADLINE = 90.0


def capture(typed: str, folder: Path, env: dict[str, str], columns: int) -> str:
    """Return what stands on a terminal once a command has ended, or after a while of one that does not end."""
    # A server of its own for each: one that was ended may take a moment to go.
    server = ["tmux", "-L", f"clusterctl-screens-{os.getpid()}-{time.monotonic_ns()}", "-f", "/dev/null"]
    marker = folder / DONE
    marker.unlink(missing_ok=True)
    shell = f"{typed}; touch {shlex.quote(str(marker))}; sleep 600"
    size = ["-x", str(columns), "-y", "44"]
    subprocess.run([*server, "new-session", "-d", *size, shell], cwd=folder, env=env, check=True)
    try:
        stays = " top " in typed
        limit = time.monotonic() + (8.0 if stays else DEADLINE)
        while not marker.exists() and time.monotonic() < limit:
            time.sleep(0.2)
        pane = subprocess.run([*server, "capture-pane", "-p", "-S", "-200"], env=env, capture_output=True, check=True)
    finally:
        subprocess.run([*server, "kill-server"], env=env, check=False)
    return "".join(f"{line.rstrip()}\n" for line in pane.stdout.decode().rstrip("\n").split("\n"))


def main() -> None:
    """Make the captures."""
    parser = argparse.ArgumentParser(prog="python -m tests.screens", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--columns", type=int, default=100)
    parser.add_argument("--plain", action="store_true", help="a terminal without colours that knows ASCII alone")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="screens-") as temporary, contextlib.ExitStack() as stack:
        work, big = Path(temporary) / "demo", Path(temporary) / "big"
        work.mkdir()
        (work / "train.py").write_text(JOB)
        (work / "cluster.yaml").write_text(CLUSTER)
        for end in End:
            stack.enter_context(made(big, end, name=end.value))
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SHELL": "/bin/sh"}
        env |= {"LC_ALL": "C", "NO_COLOR": "1"} if asked.plain else {"LC_ALL": "C.UTF-8"}
        for name, typed in SCREENS.items():
            state = big if name.endswith("-200") else Path(temporary) / "state"
            shown = capture(typed, work, {**env, "XDG_STATE_HOME": str(state)}, asked.columns)
            (asked.folder / f"{name}.txt").write_text(
                f"$ {typed}\n{shown.replace(temporary, '/home/me').replace(sys.prefix, '/home/me/venv')}"
            )
            print(name, flush=True)


if __name__ == "__main__":
    main()
