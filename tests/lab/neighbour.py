"""A hostile neighbour: another user of a node, who does what Linux lets any user do."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Final

from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.lab.node import Node

UID: Final = 1502
BEGIN: Final = """\
import fcntl, glob, hashlib, json, os, re, resource, select, signal, socket, struct, sys, time
VICTIM = int(sys.argv[1])

def processes(words):
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            pid = int(path.split("/")[2])
            if os.stat(path).st_uid == VICTIM and words in open(path).read().replace("\\0", " "):
                yield pid
        except OSError:
            pass

def held_ports():
    for port in range(32768, 60999):
        for reused in (0, 1):
            with socket.socket() as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reused)
                try:
                    one.bind(("", port))
                except OSError:
                    continue
            if reused:
                yield port
            break

def stay():
    print("done", flush=True)
    signal.pause()

"""
"""What every script of the neighbour begins with; `stay` is its last word where it goes on, and `print("done")` else."""


class Neighbour:
    """The user on one node, and what he has left there.

    Args:
        node: Where he has an account.
        uid: His.

    Attributes:
        pid: The process that his last script stayed as, as the node numbers it; 0 where none did.
    """

    def __init__(self, node: Node, uid: int = UID) -> None:
        self.node, self.uid, self.pid = node, uid, 0
        self._processes: list[subprocess.Popen[str]] = []

    def do(self, script: str) -> None:
        """Run a script of his, if any, and return once it has said `done`.

        Raises:
            RuntimeError: It failed.
        """
        if not script:
            return
        before = self.pids()
        account = ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]
        argv = self.node.inside([*account, "python3", "-c", BEGIN + script, str(self.node.spec.uid)])
        env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/"}
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        self._processes.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "done\n":
            process.kill()
            raise RuntimeError(process.communicate()[1])
        self.pid = min(self.pids() - before, default=0)

    def did(self, trace: str = "") -> bool:
        """Whether nothing of his has ended otherwise than he meant, and the file is there that he leaves by then."""
        return all(process.poll() in (None, 0) for process in self._processes) and self.node.path(trace or "/").exists()

    def pids(self) -> set[int]:
        """Return his processes, as the node numbers them."""
        return {process.pid for process in self.node.processes() if process.uid == self.uid and process.state != "Z"}

    def leave(self) -> None:
        """End what he runs and remove what he made."""
        for pid in self.pids():
            self.node.signal(pid, 9)
        for process in self._processes:
            process.kill()
            process.communicate()
        self._processes.clear()
        wait_for(lambda: not self.pids(), what="the neighbour to be gone")
        self.node.run(["find", "/tmp", "/var/tmp", "/dev/shm", "-mindepth", "1", "-uid", str(self.uid), "-delete"])
