"""A Slurm over the nodes of a lab: slurmctld on the head, a slurmd on each node, and a job that holds each node.

What a node is to Slurm lies in `/srv/shared/slurm`, which the head and all nodes see. `ways.STEP` leads to a shell in a
step of the node's job, by the very `srun` that the product makes.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.config.sections import hostfiles_and_slurm as product
from tests.lab.head import ADDRESS, NETWORK
from tests.lab.inside import PATH
from tests.lab.slurm import CGROUP, Slurm, conf
from tests.lab.spec import SHARED
from tests.lab.waiting import wait_for
from tests.lab.ways import STEP

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.lab.lab import Lab
    from tests.lab.node import Node

ROOT: Final = f"{SHARED}/slurm"
MOST: Final = 12
CPUS: Final = 4
FREEZER: Final = Path("/sys/fs/cgroup/freezer")
HOLD: Final = "slurmd-hold"
"""What a job runs to hold its node; the name makes it one of Slurm's own for who looks for what was left."""
_INSIDE: Final = (
    "mount -t tmpfs none /sys/fs/cgroup && mkdir /sys/fs/cgroup/freezer && "
    "mount -t cgroup -o freezer none /sys/fs/cgroup/freezer && mkdir -p /run/slurm && exec slurmd -D -N $(hostname)"
)


class SlurmNodes:
    """The daemons. They outlive tests; those of a node end with it."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._ends = ExitStack()
        self._groups: list[Path] = []
        self.argv = product.build_srun_command(CPUS)
        self.env = {"PATH": PATH, "HOME": "/root", "SLURM_CONF": f"{ROOT}/slurm.conf"}

    def start(self) -> None:
        """Start what is on the head."""
        root = Path(ROOT)
        # What the daemons of an earlier one wrote while they ended is nothing to go on from.
        shutil.rmtree(root, ignore_errors=True)
        (root / "state").mkdir(parents=True)
        nodes = (
            f"NodeName=n[1-{MOST}] NodeHostname=n[1-{MOST}] NodeAddr={NETWORK}.[1-{MOST}] CPUs={CPUS} RealMemory=1000\n"
        )
        text = conf(root=ROOT, head=ADDRESS, port=6817, spool="/run/slurm", nodes=nodes, names=f"n[1-{MOST}]")
        (root / "slurm.conf").write_text(text)
        (root / "cgroup.conf").write_text(CGROUP)
        shutil.copy("/bin/sleep", root / HOLD)
        self._write_step(Path(STEP))
        Slurm.start_munged(root / "munge", self._daemon)
        self._daemon("slurmctld", "-D")
        wait_for(lambda: "UP" in self.ask("scontrol", "ping"), what="slurmctld")

    def add(self, nodes: Sequence[Node], *, hold: bool = True) -> None:
        """Start slurmd on nodes, and hold each by a job of its own, unless told otherwise."""
        for node in nodes:
            group = FREEZER / f"{self._lab.root.name}-{node.link}"
            group.mkdir()
            self._groups.append(group)
            join = f'echo 0 >{group}/cgroup.procs && exec "$@"'
            inside = ["unshare", "--cgroup", "--mount", "sh", "-c", _INSIDE]
            self._daemon("sh", "-c", join, "sh", *node.inside(inside))
        for node in nodes:
            wait_for(lambda node=node: "idle" in self._state(node), what=f"{node.name} to be idle")  # type: ignore[misc]
        if hold:
            self._hold(nodes)

    def _hold(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            script = f"#!/bin/sh\nexec {ROOT}/{HOLD} infinity\n"
            Path(ROOT, "hold.sh").write_text(script)
            options = ["--parsable", "--no-requeue", "-N1", f"-c{CPUS}", "-w", node.name, "-D", "/", "-o", "/dev/null"]
            Path(ROOT, f"job.{node.name}").write_text(self.ask("sbatch", *options, f"{ROOT}/hold.sh"))
        for node in nodes:
            wait_for(lambda node=node: node.pids_of(HOLD), what=f"the job of {node.name}")  # type: ignore[misc]

    def remove(self, nodes: Sequence[Node]) -> None:
        """Forget nodes that are gone."""
        for node in nodes:
            # Slurm would wait for the node, which is not going to say that its jobs are over.
            self.ask("scontrol", "update", f"NodeName={node.name}", "State=DOWN", "Reason=gone")
            self.ask("scancel", "-f", "-w", node.name)
            self.ask("scontrol", "update", f"NodeName={node.name}", "State=RESUME")
            Path(ROOT, f"job.{node.name}").unlink(missing_ok=True)
        for group in self._groups:
            wait_for(lambda group=group: _removed(group), what=f"{group} to be empty")  # type: ignore[misc]
        self._groups.clear()

    def end(self) -> None:
        """End what is on the head; no node may be left."""
        self._ends.close()
        shutil.rmtree(ROOT, ignore_errors=True)

    def ask(self, *argv: str) -> str:
        """Return what one of Slurm's programs says."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout.strip()

    def _state(self, node: Node) -> str:
        return self.ask("sinfo", "-h", "-n", node.name, "-o", "%t")

    def _daemon(self, *argv: str) -> None:
        with Path(ROOT, "daemons.log").open("ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            daemon = subprocess.Popen(argv, env=self.env, **streams)  # type: ignore[call-overload]
        self._ends.callback(daemon.wait, 30)
        self._ends.callback(daemon.terminate)

    def _write_step(self, path: Path) -> None:
        """Lead to a shell on a node, from the environment that a batch script has there."""
        step = " ".join(shlex.quote(word).replace("{host}", "'\"$1\"'") for word in self.argv)
        set_up = " ".join(shlex.quote(f"{name}={value}") for name, value in self.env.items())
        path.write_text(
            f'#!/bin/sh\njob=$(cat {ROOT}/job."$1") || exit 1\n'
            f'exec env -i {set_up} SLURM_JOB_ID="$job" SLURM_JOB_NODELIST="$1" {step}\n'
        )
        path.chmod(0o755)


def _removed(group: Path) -> bool:
    for place, _, _ in os.walk(group, topdown=False):
        with suppress(OSError):
            os.rmdir(place)
    return not group.exists()


@contextmanager
def slurm_of(lab: Lab) -> Iterator[SlurmNodes]:
    """Have a Slurm on the head until the end of the block."""
    started = SlurmNodes(lab)
    try:
        started.start()
        yield started
    finally:
        started.end()
