"""Where a zygote that is kept is asked for: STATE_ROOT/warm/NODE/RUN, a socket by the name of the run that left it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.supervisor.forking import standing

if TYPE_CHECKING:
    from clusterctl.agent.linux.proc import Identity
    from clusterctl.agent.record.rundir import RunDir

CLAIM = b"c"


@dataclass(frozen=True)
class Asked:
    """A keeper that was asked to become a supervisor.

    Attributes:
        answer: A descriptor: what a supervisor says at its start can be read there, or nothing.
        who: The keeper, as far as it is known.
    """

    answer: int
    who: Identity | None

    def end(self) -> None:
        """End a keeper that does not answer."""
        if self.who is not None and proc.alive(self.who):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.who.pid, signal.SIGKILL)


class Place:
    """The keeper's side.

    Attributes:
        listener: Where runs ask.
    """

    def __init__(self, run: RunDir) -> None:
        """Be where the next run of this node looks; whoever was there ends.

        Raises:
            OSError: There is no place for it.
        """
        for other in _others(run):
            _ask(run, other, b"")
        folder, name = run.warm
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._path = os.path.join(folder, name)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            with syscalls.short_path(folder, name) as short:
                self.listener.bind(short)
            self.listener.listen(1)
            self._mark = self._now()
        except OSError:
            self.listener.close()
            raise

    def there(self) -> bool:
        """Whether who looks still finds it."""
        return self._now() == self._mark

    def leave(self) -> None:
        """Take the name away, and let nobody in any more."""
        with contextlib.suppress(OSError):
            if self.there():
                os.unlink(self._path)
        self.listener.close()

    def _now(self) -> tuple[int, int] | None:
        try:
            status = os.lstat(self._path)
        except OSError:
            return None
        return status.st_dev, status.st_ino


# --- who asks


def ask(run: RunDir) -> Asked | None:
    """Ask whoever keeps a zygote for this node to become the supervisor of a run; `None` where nobody does."""
    for other in _others(run):
        env = {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}
        request = {"run": run.run, "node": run.node, "standing": standing.of_self(), "env": env}
        try:
            asked = _ask(run, other, CLAIM, json.dumps(request).encode())
        except OSError:
            # There is no descriptor to ask with. To start anew takes some, too, and says so.
            return None
        if asked is not None:
            return asked
    return None


def end(run: RunDir) -> None:
    """End whoever keeps what a run has left; none of the node is kept any more where it was of that run."""
    _, name = run.warm
    if name in _others(run):
        _ask(run, name, b"")


def _others(run: RunDir) -> list[str]:
    try:
        return os.listdir(run.warm[0])
    except OSError:
        return []


def _ask(run: RunDir, name: str, word: bytes, value: bytes = b"") -> Asked | None:
    """Connect to a keeper and say something; one that hears nothing ends."""
    kind = socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
    with socket.socket(socket.AF_UNIX, kind) as sock, open(syscalls.memory_file("claim"), "wb", buffering=0) as file:
        try:
            with syscalls.short_path(run.warm[0], name) as short:
                sock.connect(short)
            pid, uid = syscalls.peer(sock)
            if uid != os.getuid() or not word:
                return None
            who = proc.identify(pid)
            syscalls.write_all(file.fileno(), value)
            socket.send_fds(sock, [word], [file.fileno()])
            return Asked(sock.detach(), who)
        except ConnectionRefusedError:
            # Left by one that was killed.
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(run.warm[0], name))
        except OSError:
            # It is asked by others, or has just left; or we have no descriptor.
            pass
    return None
