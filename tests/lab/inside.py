"""What is seen of a lab node from outside, and programs that are run in it without ssh."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tests.lab.machine import LOG
from tests.lab.waiting import DEADLINE, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.lab.spec import NodeSpec

T = TypeVar("T")

MACHINERY: Final = ("sshd", "slurmd", "slurmstepd")
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the node numbers it; `state` is the letter of /proc/PID/stat, `argv` empty for a zombie."""

    pid: int
    ppid: int
    uid: int
    state: str
    comm: str
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(self.argv) or f"[{self.comm}]"


class Inside:
    """A node as its files and processes; `Node` is all of it.

    Attributes:
        name: Its host name, and its name in ssh_config.
        spec: What was asked for.
        init_pid: Pid of its PID 1 as this machine numbers it.
        cgroups: Folders of its cgroups as this machine sees them, with `NodeSpec.cgroup`.
    """

    def __init__(self, spec: NodeSpec, name: str) -> None:
        self.spec = spec
        self.name = name
        self.init_pid = 0
        self.cgroups: list[str] = []

    # --- seen from outside -------------------------------------------------------------------------------------

    def path(self, path: str | Path) -> Path:
        """A path of the node (absolute, or below its home) as one that this process can open.

        Absolute symbolic links on the way are followed on the head, not on the node.
        """
        return Path(f"/proc/{self.init_pid}/root{os.path.join(self.spec.home, path)}")

    def processes(self) -> list[Process]:
        """Every process of the node but its PID 1, by pid; none if the node is dead."""
        try:
            pids = sorted(int(name) for name in os.listdir(self.path("/proc")) if name.isdigit())
        except OSError:
            return []
        found = (self._process(pid) for pid in pids if pid != 1)
        return [process for process in found if process is not None]

    def leftovers(self) -> list[Process]:
        """The processes that are neither PID 1 nor sshd's nor Slurm's: on a clean node there are none (a zombie is gone)."""
        return [p for p in self.processes() if not p.comm.startswith(MACHINERY) and p.state != "Z"]

    def _process(self, pid: int) -> Process | None:
        try:
            folder = self.path(f"/proc/{pid}")
            before, _, after = (folder / "stat").read_text(errors="replace").rpartition(")")
            argv = (folder / "cmdline").read_bytes().decode(errors="surrogateescape").rstrip("\0").split("\0")
            uid = folder.stat().st_uid
        except OSError:
            return None
        state, ppid = after.split()[:2]
        comm = before.partition("(")[2]
        return Process(pid, int(ppid), uid, state, comm, tuple(argv) if argv != [""] else ())

    def environ(self, pid: int) -> dict[str, str]:
        """The environment a process was started with; empty if it is gone."""
        try:
            raw = self.path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
        except OSError:
            return {}
        return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)

    def pids_of(self, pattern: str) -> list[int]:
        """Pids of the living processes whose command line (joined by blanks) matches, oldest first."""
        return [p.pid for p in self.processes() if p.state != "Z" and re.search(pattern, p.command)]

    def mark(self, run: str) -> str:
        """What the command lines of a run's supervisor and waiters have instead of its name, which is not for all."""
        return hashlib.sha256(f"{self.spec.uid}\0{run}\0{self.name}".encode()).hexdigest()[:6]

    def pid_of(self, pattern: str) -> int | None:
        """The first of `pids_of`, or None."""
        return next(iter(self.pids_of(pattern)), None)

    def wait_for(self, predicate: Callable[[], T | None], deadline: float = DEADLINE, what: str = "") -> T:
        """`waiting.wait_for`, with the node's name in the failure."""
        return wait_for(predicate, deadline, f"{what or predicate!r} on {self.name}")

    def sshd_log(self) -> str:
        """What sshd wrote (LogLevel VERBOSE)."""
        return self.path(LOG).read_text(errors="replace")

    # --- programs in the node ----------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        input: str | None = None,  # noqa: A002 (the name that subprocess.run has)
        env: Mapping[str, str] | None = None,
        check: bool = False,
        timeout: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside the node, without ssh; works while the link is cut and sshd is dead.

        Args:
            argv: Looked up on the node's PATH.
            user: `root`, or the account of the node's spec.
            input: Text for its standard input, else /dev/null.
            env: Added to a login's plain environment.
            check: Raise on a status other than 0.
            timeout: Seconds until it is killed.
        """
        stdin = subprocess.DEVNULL if input is None else None
        return subprocess.run(
            self.inside(argv, user), env=self._environment(env), text=True, capture_output=True,
            check=check, timeout=timeout, **({"input": input} if input is not None else {"stdin": stdin}),
        )  # fmt: skip

    def start(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program inside the node and leave it running (a decoy, for one); its streams are /dev/null.

        The object stands for the program: to wait for it and to end it; its pid in the node is another one.
        """
        null = subprocess.DEVNULL
        inside = self.inside(argv, user)
        return subprocess.Popen(inside, env=self._environment(env), stdin=null, stdout=null, stderr=null)

    def inside(self, argv: Sequence[str], user: str = "root") -> list[str]:
        """The program that runs another one inside the node."""
        account = [] if user == "root" else ["-S", str(self.spec.uid), "-G", str(self.spec.uid)]
        home = self.spec.home if user == self.spec.user else "/"
        kinds = ["-m", "-u", "-i", "-n", "-p", "-T", "-C"]
        return [*self._join(), "nsenter", "-t", str(self.init_pid), *kinds, "-W", home, *account, *argv]

    def _join(self) -> list[str]:
        """Let a program be one of the node's for its cgroups, too."""
        join = " && ".join(f"echo $$ > {folder}/cgroup.procs" for folder in self.cgroups)
        return ["sh", "-c", f'{join} && exec "$@"', "sh"] if join else []

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        mine = {"PATH": PATH, "HOME": self.spec.home, "USER": self.spec.user, "LANG": "C.UTF-8"}
        return mine | dict(env or {})

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process by its pid in the node; no error if it is gone."""
        self.run(["/bin/kill", f"-{int(number)}", str(pid)])
