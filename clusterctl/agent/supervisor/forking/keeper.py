"""Keeping a zygote for the next run of the same job: its supervisor has ended a run, and waits to be that of another.

A supervisor is what the waiters of ranks need for a parent, and executes nothing, so it can be made another run's.
While it waits it is nobody's. It ends when its time is over, when memory gets short, and by hand, with its zygote.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import cgroup, proc, spawn, syscalls
from clusterctl.agent.linux.loop import Loop
from clusterctl.agent.record import authority
from clusterctl.agent.record.rundir import RunDir
from clusterctl.agent.supervisor.forking import kept
from clusterctl.agent.supervisor.forking.zygote import Stage

if TYPE_CHECKING:
    from clusterctl.agent.supervisor.forking.zygote import Zygote

_LOOK_SECONDS = 5.0
_ASKED_SECONDS = 1.0
"""How long whoever has come may take to say what for."""
_SPARE_PART, _SPARE_TIMES = 10, 2
"""What has to be free: a tenth of the memory, and twice what the zygote has."""


@dataclass(frozen=True)
class Claim:
    """The run whose supervisor a keeper becomes, and where to say that it has."""

    run: RunDir
    report: int


@dataclass(frozen=True)
class Kept:
    """What a run leaves for the next one. Who asks while its supervisor still ends is answered by the keeper."""

    zygote: Zygote
    place: kept.Place


def leave(run: RunDir, zygote: Zygote) -> Kept | None:
    """Return what is kept of a run from now on; `None` where there is no place for it, or it is over by now."""
    if zygote.stage is not Stage.READY:
        return None
    try:
        return Kept(zygote, kept.Place(run))
    except OSError:
        zygote.close("")
        return None


def keep(run: RunDir, left: Kept, standing: dict[str, Any]) -> Claim | None:
    """Keep it until a run asks for it; `None` where none has."""
    if left.zygote.stage is not Stage.READY:
        # Somebody has killed it since, or wanted it ended.
        left.place.leave()
        return None
    loop = Loop()
    _let_go(left, loop)
    return _Keeper(run, left, loop, standing).wait()


def enough(total: int, available: int, size: int) -> bool:
    """Whether a machine can spare the memory of a zygote; all in bytes."""
    return available >= max(total // _SPARE_PART, _SPARE_TIMES * size)


def _let_go(left: Kept, loop: Loop) -> None:
    """Hold nothing of the run that has ended."""
    spawn.normal_signals()
    left.zygote.move(loop, loop.stop)
    # What closes its descriptor when it goes does so now, not when another one has that number.
    gc.collect()
    # Children too: what still wrote for the run ends by itself, and nobody here would take it in.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGCHLD):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 2)
    spawn.close_all({*left.zygote.descriptors, left.place.listener.fileno(), loop.descriptor})
    syscalls.set_name("clusterctl-keep")
    syscalls.set_title("clusterctl-agent keep")


class _Keeper:
    def __init__(self, run: RunDir, left: Kept, loop: Loop, standing: dict[str, Any]) -> None:
        self._run, self._loop, self._standing = run, loop, standing
        self._zygote, self._place = left.zygote, left.place
        self._claim: Claim | None = None
        self._until = authority.clock() + left.zygote.asked.keep_warm

    def wait(self) -> Claim | None:
        """Wait for a run, or the end."""
        self._loop.on_readable(self._place.listener.fileno(), self._come)
        self._look()
        self._loop.run()
        self._place.leave()
        return self._claim

    def _look(self) -> None:
        left = self._until - authority.clock()
        if left <= 0 or not self._place.there() or not self._spared():
            self._loop.stop()
        else:
            self._loop.after(min(left, _LOOK_SECONDS), self._look)

    def _spared(self) -> bool:
        sizes = proc.meminfo()
        ours = cgroup.memory() or (sizes["MemTotal"], sizes["MemAvailable"])
        total, available = min(ours[0], sizes["MemTotal"]), min(ours[1], sizes["MemAvailable"])
        return enough(total, available, int(self._zygote.worth["bytes"]))

    # --- whoever comes

    def _come(self) -> None:
        try:
            sock, _ = self._place.listener.accept()
        except OSError:
            return
        if syscalls.peer(sock)[1] != os.getuid():
            sock.close()
            return
        # One of two that come at once gets an answer. The other one finds nobody.
        self._loop.forget(self._place.listener.fileno())
        self._place.leave()
        self._loop.on_readable(sock.fileno(), lambda: self._hear(sock))
        self._loop.after(_ASKED_SECONDS, self._loop.stop)

    def _hear(self, sock: socket.socket) -> None:
        self._loop.forget(sock.fileno())
        self._loop.stop()
        word, files, _, _ = socket.recv_fds(sock, 1, 1)
        if word != kept.CLAIM or not files or self._zygote.stage is not Stage.READY:
            return
        asked = json.loads(os.pread(files[0], os.fstat(files[0]).st_size, 0))
        os.close(files[0])
        if asked["standing"] != self._standing:
            return
        # What ranks have in their environment is what the login has that starts them.
        os.environb.clear()
        os.environb.update({os.fsencode(name): os.fsencode(value) for name, value in asked["env"].items()})
        self._claim = Claim(RunDir(self._run.root, asked["run"], asked["node"]), sock.detach())
