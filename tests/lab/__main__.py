"""`python -m tests.lab [N]`: a lab for a person, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path

from tests.lab.head import BRIDGE, NETWORK
from tests.lab.lab import REPOSITORY, Lab
from tests.lab.spec import SHARED, NodeSpec

TRAIN = """\
import os, time

for step in range(60):
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {os.uname().nodename}: step {step}")
    time.sleep(1)
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description="Start lab nodes and wait for Ctrl-C.")
    parser.add_argument("nodes", type=int, nargs="?", default=4, help="how many nodes (default 4)")
    parser.add_argument("--shell", default="/bin/bash", help="login shell on the nodes")
    parser.add_argument("--noisy", action="store_true", help="start files on the nodes print")
    options = parser.parse_args()
    reason = Lab.unavailable()
    if reason:
        _say(f"error: {reason}")
        return 1
    # A plain `kill` of this process tears down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Lab() as lab:
            lab.add([NodeSpec(shell=options.shell, noisy=options.noisy)] * options.nodes)
            _introduce(lab)
            signal.pause()
    except KeyboardInterrupt:
        _say("the lab is gone")
    return 0


def _introduce(lab: Lab) -> None:
    job = lab.root / "job"
    job.mkdir()
    (job / "train.py").write_text(TRAIN)
    (job / "cluster.yaml").write_text(
        lab.cluster_yaml().replace(": 0\n", ": {workers: 2, gpus: 0}\n").replace("hosts:", "name: lab\nhosts:")
    )
    enter = _write_enter(lab, job)
    _say(f"{len(lab.nodes)} nodes on {BRIDGE}, {NETWORK}.0/24, which only the lab's own head can reach")
    for node in lab.nodes:
        _say(f"  {node.name}  {node.address}  {node.interface}  login shell {node.spec.shell}, pid {node.init_pid}")
    _say(f"a shell on the head:       {enter}")
    _say(f"one command on the head:   {enter} ssh {lab.nodes[0].name}")
    _say(f"a run over all nodes:      {enter} clusterctl up")
    _say(f"ssh_config:                {lab.ssh_config}")
    _say(f"cluster file:              {job / 'cluster.yaml'}")
    _say(f"the nodes' {SHARED}:    {lab.shared}")
    _say("Ctrl-C ends the lab")


def _write_enter(lab: Lab, job: Path) -> Path:
    """A program that runs a command, or a shell, on the head of this lab."""
    enter = lab.root / "enter"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    settings = {
        "HOME": str(lab.head_home),
        "XDG_STATE_HOME": str(lab.head_home / ".local/state"),
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
    }
    env = shlex.join(["env", *(f"{name}={value}" for name, value in settings.items())])
    inside = f"nsenter -t {os.getpid()} -n -m -W {shlex.quote(str(job))}"
    enter.write_text(f'#!/bin/sh\n[ $# -gt 0 ] || set -- "${{SHELL:-/bin/sh}}"\nexec {inside} {env} "$@"\n')
    enter.chmod(0o755)
    return enter


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
