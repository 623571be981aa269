"""Who stands guard over a run on this node: its supervisor and its waiters. They are never ended with it."""

from __future__ import annotations

import contextlib
import glob
import os
import socket
import struct
from typing import TYPE_CHECKING

from clusterctl.agent import proc, system, waiter
from clusterctl.agent.proc import Identity

if TYPE_CHECKING:
    from clusterctl.agent.rundir import RunDir


def connect(run: RunDir) -> socket.socket | None:
    """Return a connection to the supervisor of a run, or `None` where there is none.

    Raises:
        BlockingIOError: It is there, but has not taken in those who came before.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.connect(run.socket)
    except OSError as error:
        sock.close()
        if isinstance(error, BlockingIOError):
            raise
        return None
    return sock


def peer(sock: socket.socket) -> tuple[int, int]:
    """Return pid (as it is called here) and uid of the process at the other end of a unix socket."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def supervisor(run: RunDir) -> Identity | None:
    """Return the supervisor of a run, or `None` where there is none."""
    try:
        sock = connect(run)
    except BlockingIOError:
        return _holder(run)
    if sock is None:
        return None
    with sock:
        pid, uid = peer(sock)
    return proc.identify(pid) if uid == os.getuid() else None


def _holder(run: RunDir) -> Identity | None:
    """Return who holds the socket of a run, found by the socket's number among the open files of our processes."""
    name = run.socket.replace("\0", "@")
    lines = (line.split() for line in system.read_bytes("/proc/net/unix", 64 << 20).decode().splitlines())
    sockets = {f"socket:[{fields[6]}]" for fields in lines if fields[7:] == [name]}
    holders = (pid for pid in proc.pids() if proc.owner(pid) == os.getuid() and sockets & proc.open_files(pid))
    found = (proc.identify(pid) for pid in holders)
    return min((who for who in found if who is not None), key=lambda who: who.start_time, default=None)


def of_run(run: RunDir) -> set[Identity]:
    """Return the supervisor and every waiter of a run, of all attempts."""
    found = set()
    for path in glob.glob(os.path.join(glob.escape(run.path), "attempt-*", "rank-*.spawn")):
        said = waiter.read_spawn(path)
        if said is not None:
            with contextlib.suppress(KeyError):
                found.add(Identity(said["waiter_pid"], said["waiter_start_time"]))
    who = supervisor(run)
    return found if who is None else found | {who}
