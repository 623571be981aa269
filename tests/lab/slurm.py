"""A Slurm of four nodes on this machine: munged, slurmctld and four slurmd on ports of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NEEDED: Final = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES: Final = ("s1", "s2", "s3", "s4")
FREEZER: Final = Path("/sys/fs/cgroup/freezer")

_CONF: Final = """\
ClusterName=lab
SlurmctldHost=localhost({head})
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={spool}
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={spool}/pid
SlurmctldLogFile={root}/ctld.log
SlurmdLogFile={root}/%n.log
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=20
{nodes}PartitionName=all Nodes={names} Default=YES MaxTime=60 State=UP
"""
CGROUP: Final = (
    "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainCores=no\n"
    "ConstrainRAMSpace=no\n"
)


def conf(*, root: str, head: str, port: int, spool: str, nodes: str, names: str) -> str:
    """Return a slurm.conf.

    Args:
        root: Folder of all files but the spool.
        head: Address of slurmctld.
        port: Its port.
        spool: Folder of a slurmd; `%n` is the name of its node.
        nodes: The lines of the nodes.
        names: Their names.
    """
    return _CONF.format(root=root, head=head, port=port, spool=spool, nodes=nodes, names=names)


class Slurm:
    """The daemons, and what is asked of them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "XDG_", "SSH_"))}
        self.env |= {"SLURM_CONF": f"{self.root}/slurm.conf", "XDG_STATE_HOME": f"{self.root}/runs"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}:/usr/sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._slurmd: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def unavailable() -> str | None:
        """Why no Slurm can run here, or None."""
        missing = [name for name in NEEDED if not shutil.which(name) and not os.path.exists(f"/usr/sbin/{name}")]
        if missing:
            return f"there is no {', '.join(missing)} here (packages slurm-wlm and munge)"
        if os.geteuid() != 0 or not os.access("/sys/fs/cgroup/freezer/cgroup.procs", os.W_OK):
            return "Slurm's daemons need root and the freezer of cgroups, version 1"
        return None

    def start(self) -> None:
        """Start the daemons; return when all nodes are idle."""
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.root / name).mkdir()
        port, *ports = _ports(1 + len(NODES))
        nodes = "".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={own} CPUs=4 RealMemory=1000\n"
            for name, own in zip(NODES, ports, strict=True)
        )
        text = conf(
            root=str(self.root), head="127.0.0.1", port=port, spool=f"{self.root}/spool-%n", nodes=nodes,
            names=",".join(NODES),
        )  # fmt: skip
        (self.root / "slurm.conf").write_text(text)
        (self.root / "cgroup.conf").write_text(CGROUP)
        self.start_munged(self.root / "munge", self._daemon)
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self.start_slurmd(name)
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == f"{len(NODES)} idle", what="idle nodes")

    def start_slurmd(self, name: str) -> None:
        """Start the daemon of a node."""
        self._slurmd[name] = self._daemon("slurmd", "-D", "-N", name)

    def kill_slurmd(self, name: str) -> None:
        """SIGKILL the daemon of a node; steps and their processes stay."""
        self._slurmd[name].kill()
        self._slurmd[name].wait()

    @staticmethod
    def start_munged(folder: Path, start: Callable[..., object]) -> None:
        """Start munged with a key of its own; return when it takes questions."""
        folder.mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        for path in (folder, folder / "key"):
            shutil.chown(path, "munge", "munge")
        start(
            *("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--foreground", "--force"),
            *(f"--{name}={folder}/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")),
            f"--key-file={folder}/key",
        )
        wait_for((folder / "socket").exists, what="munged")

    def _daemon(self, *argv: str) -> subprocess.Popen[bytes]:
        with (self.root / "daemons.log").open("ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self._daemons.append(subprocess.Popen(argv, env=self.env, **streams))  # type: ignore[call-overload]
        return self._daemons[-1]

    def ask(self, *argv: str) -> str:
        """Return what one of Slurm's programs says."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout.strip()

    def submit(self, script: str, *options: str) -> str:
        """Hand in a batch script, whose `clusterctl` is the one that is tested; return the job's id."""
        path = self.root / "job.sh"
        path.write_text(script if script.startswith("#!") else f"#!/bin/bash\ncd {self.root}\n{script}\n")
        return self.ask("sbatch", "--parsable", f"--output={self.root}/job-%j.out", *options, str(path))

    def output(self, job: str) -> str:
        """What the job has said so far."""
        path = self.root / f"job-{job}.out"
        return path.read_text() if path.exists() else ""

    def wait(self, job: str) -> tuple[str, str]:
        """Wait for the end of a job; return its state and what it said."""

        def ended() -> str | None:
            shown = dict(word.partition("=")[::2] for word in self.ask("scontrol", "show", "job", "-o", job).split())
            state = shown.get("JobState", "")
            return state if state not in ("", "PENDING", "RUNNING", "SIGNALING", "COMPLETING") else None

        state = wait_for(ended, 90.0, what=f"job {job} to end: {self.output(job)}")
        return state, self.output(job)

    def processes(self, *words: str) -> list[int]:
        """Pids of the programs of that name whose environment is of this Slurm."""
        return sorted(pid for pid, comm in self._mine() if comm in words)

    def _mine(self) -> Iterator[tuple[int, str]]:
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"SLURM_CONF={self.root}".encode() in (entry / "environ").read_bytes():
                    yield int(entry.name), (entry / "comm").read_text().strip()

    def left(self) -> list[str]:
        """What jobs and steps there are, what is in their cgroups, and what else has our environment."""
        queue = [*self.ask("squeue", "-h").splitlines(), *self.ask("squeue", "-h", "-s").splitlines()]
        groups = [
            pid for name in NODES for file in FREEZER.glob(f"slurm_{name}/**/cgroup.procs") for pid in _pids(file)
        ]
        mine = [pid for pid, comm in self._mine() if not comm.startswith(("slurm", "munged"))]
        return [*queue, *(f"process {pid}" for pid in {*groups, *mine})]

    def end(self) -> None:
        """End all jobs and the daemons."""
        self.ask("scancel", "--user=root")
        wait_for(lambda: not self.ask("squeue", "-h"), 60.0, what="the queue to be empty")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)
        shutil.rmtree(self.root)


def _pids(file: Path) -> list[int]:
    try:
        return [int(word) for word in file.read_text().split()]
    except OSError:
        return []


def _ports(count: int) -> Sequence[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return numbers
