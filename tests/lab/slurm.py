"""A Slurm of two nodes on this machine: munged, slurmctld and two slurmd on ports of their own."""

from __future__ import annotations

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
    from collections.abc import Sequence

NEEDED: Final = ("munged", "slurmctld", "slurmd", "sbatch", "setpriv")
NODES: Final = ("s1", "s2")

_CONF: Final = """\
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/ctld.pid
SlurmdPidFile={root}/%n.pid
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
NodeName=s1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=1000
NodeName=s2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=1000
PartitionName=all Nodes=s[1-2] Default=YES MaxTime=60 State=UP
"""
_CGROUP: Final = (
    "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\nConstrainCores=no\n"
    "ConstrainRAMSpace=no\n"
)


class Slurm:
    """The daemons, and what is asked of them."""

    def __init__(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.root.chmod(0o755)
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "XDG_", "SSH_"))}
        self.env |= {"SLURM_CONF": f"{self.root}/slurm.conf", "XDG_STATE_HOME": f"{self.root}/runs"}
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}:/usr/sbin"
        self._daemons: list[subprocess.Popen[bytes]] = []

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
        """Start the daemons; return when both nodes are idle."""
        for name in ("state", "spool-s1", "spool-s2", "munge"):
            (self.root / name).mkdir()
        (self.root / "slurm.conf").write_text(_CONF.format(root=self.root, ports=_ports(3)))
        (self.root / "cgroup.conf").write_text(_CGROUP)
        munge = self.root / "munge"
        (munge / "key").write_bytes(os.urandom(1024))
        (munge / "key").chmod(0o400)
        for path in (munge, munge / "key"):
            shutil.chown(path, "munge", "munge")
        self._daemon(
            *("setpriv", "--reuid", "munge", "--regid", "munge", "--clear-groups", "munged", "--foreground"),
            *(f"--{name}={munge}/{name}" for name in ("socket", "pid-file", "log-file", "seed-file")),
            f"--key-file={munge}/key",
        )
        wait_for((munge / "socket").exists, what="munged")
        self._daemon("slurmctld", "-D")
        for name in NODES:
            self._daemon("slurmd", "-D", "-N", name)
        wait_for(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle", what="two idle nodes")

    def _daemon(self, *argv: str) -> None:
        with (self.root / "daemons.log").open("ab") as log:
            streams = {"stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
            self._daemons.append(subprocess.Popen(argv, env=self.env, **streams))  # type: ignore[call-overload]

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
        found = []
        for entry in Path("/proc").iterdir():
            try:
                mine = f"SLURM_CONF={self.root}".encode() in (entry / "environ").read_bytes()
                if entry.name.isdigit() and mine and (entry / "comm").read_text().strip() in words:
                    found.append(int(entry.name))
            except OSError:
                continue
        return sorted(found)

    def end(self) -> None:
        """End all jobs and the daemons."""
        self.ask("scancel", "--user=root")
        wait_for(lambda: not self.ask("squeue", "-h"), 60.0, what="the queue to be empty")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(30)
        shutil.rmtree(self.root)


def _ports(count: int) -> Sequence[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    numbers = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return numbers
