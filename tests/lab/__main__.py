"""`python -m tests.lab [N]`: a lab for a person, until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab.head import BRIDGE, NETWORK
from tests.lab.lab import REPOSITORY, Lab
from tests.lab.spec import SHARED, NodeSpec
from tests.lab.world import Scene, World, alike
from tests.lab.worlds import WORLDS

if TYPE_CHECKING:
    from collections.abc import Mapping

_WORLDS = "nodes of a world of tests/lab/worlds.py: " + ", ".join(f"`{world.name}`" for world in WORLDS)

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
    parser.add_argument("--world", choices=[world.name for world in WORLDS], metavar="NAME", help=_WORLDS)
    options = parser.parse_args()
    reason = Lab.unavailable()
    if reason:
        _say(f"error: {reason}")
        return 1
    # A plain `kill` of this process tears down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        spec = NodeSpec(shell=options.shell, noisy=options.noisy)
        worlds = {world.name: world for world in WORLDS}
        world = worlds.get(options.world, World(name="lab", sentence="as asked for", make=alike(spec)))
        with Lab() as lab, world.on(lab, options.nodes) as scene:
            _introduce(lab, scene)
            signal.pause()
    except KeyboardInterrupt:
        _say("the lab is gone")
    return 0


def _introduce(lab: Lab, scene: Scene) -> None:
    job = lab.root / "job"
    job.mkdir()
    (job / "train.py").write_text(TRAIN)
    (job / "cluster.yaml").write_text(
        lab.cluster_yaml(scene.nodes)
        .replace(": 0\n", ": {workers: 2, gpus: 0}\n")
        .replace("hosts:", "name: lab\nhosts:")
    )
    enter = _write_enter(lab, job, scene.env)
    _say(f"{len(lab.nodes)} nodes on {BRIDGE}, {NETWORK}.0/24, which only the lab's own head can reach")
    for node in lab.nodes:
        _say(f"  {node.name}  {node.address}  {node.interface}  login shell {node.spec.shell}, pid {node.init_pid}")
    _say(f"a shell on the head:       {enter}")
    _say(f"one command on the head:   {enter} ssh {scene.nodes[0].name}")
    _say(f"a run over all nodes:      {enter} clusterctl up")
    _say(f"ssh_config:                {lab.ssh_config}")
    _say(f"cluster file:              {job / 'cluster.yaml'}")
    _say(f"the nodes' {SHARED}:    {lab.shared}")
    _say("Ctrl-C ends the lab")


def _write_enter(lab: Lab, job: Path, more: Mapping[str, str]) -> Path:
    """A program that runs a command, or a shell, on the head of this lab."""
    enter = lab.root / "enter"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    settings = {
        "HOME": str(lab.head_home),
        "XDG_STATE_HOME": str(lab.head_home / ".local/state"),
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY),
        **more,
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
