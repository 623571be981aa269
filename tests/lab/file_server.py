"""A network file system in one process: the client that one machine has mounted, and what its server would answer.

Run as `python -m tests.lab.file_server`, with one JSON line on stdin (`Options`). Its files are a folder that other
such processes may serve to other machines; the kernel's file handles, caches and permissions are real, and what the
server's machine would refuse, this process is refused. Not played: supplementary groups, extended attributes, holes
(as in NFS before 4.2), and locks that outlive the machine that held them.

What it does wrong on purpose is a JSON file (`Faults`), read again before each request when it has changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.lab.exports import Export
from tests.lab.fuse import SILENT, UNAWAITED, Connection, Ended, Op, Request
from tests.lab.handles import Failure

_LOOK_AGAIN: Final = 0.02
"""Seconds until a lock that was not to be had, or the end of a fault, is looked for again."""


@dataclass(frozen=True)
class Options:
    """What stays as it is while the file system is mounted.

    Attributes:
        descriptor: /dev/fuse.
        folder: What the server has.
        faults: File that tells what goes wrong.
        owner: Process to end with.
        cache_s, locks, root_squash: As `places.Network` has them.
    """

    descriptor: int
    folder: str
    faults: str
    owner: int
    cache_s: float
    locks: str
    root_squash: bool


@dataclass(frozen=True)
class Faults:
    """What goes wrong now.

    Attributes:
        hang: `wait`: requests are left where they are, and who asks can be killed. `hold`: they are taken and not
            answered, and nobody who asks can be killed.
        until: When that ends, by the monotonic clock; None: never.
        handles: Which time it is that the server has forgotten all files it had told of, so that they are stale.
        errors: What is refused, with which errno: `{"WRITE": "EDQUOT"}`.
        delay_s: Seconds before each answer.
    """

    hang: str | None = None
    until: float | None = None
    handles: int = 0
    errors: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


class Server:
    """Reads requests and answers them, one after the other."""

    def __init__(self, options: Options) -> None:
        self._connection = Connection(options.descriptor)
        self._export = Export(self._connection, options.folder, options.cache_s, options.locks, options.root_squash)
        self._file = Path(options.faults)
        self._version: tuple[int, int] | None = None
        self._faults = Faults()
        self._held: list[Request] = []
        self._blocked: list[Request] = []
        self._owner = os.pidfd_open(options.owner)

    def serve(self) -> None:
        """Answer until nothing is mounted or the owner has ended."""
        poll = select.poll()
        poll.register(self._owner, select.POLLIN)
        while not self._connection.mounted():
            if poll.poll(2):
                return
        poll.register(self._connection.descriptor, select.POLLIN)
        while True:
            waiting = self._hangs() or self._held or self._blocked
            ready = dict(poll.poll(_LOOK_AGAIN * 1000 if waiting else None))
            if self._owner in ready or ready.get(self._connection.descriptor, 0) & select.POLLERR:
                return
            self._turn(asked=self._connection.descriptor in ready)

    def _turn(self, *, asked: bool) -> None:
        self._look()
        if self._hangs():
            self._hang(asked=asked)
            return
        held, self._held = self._held, []
        blocked, self._blocked = self._blocked, []
        for request in (*held, *blocked):
            self._serve(request)
        if asked and (request_now := self._connection.read()):
            self._serve(request_now)

    def _look(self) -> None:
        info = self._file.stat()
        if self._version != (info.st_ino, info.st_mtime_ns):
            self._version = (info.st_ino, info.st_mtime_ns)
            self._faults = Faults(**json.loads(self._file.read_text()))
            self._export.handles.count = self._faults.handles

    def _hangs(self) -> bool:
        until = self._faults.until
        return self._faults.hang is not None and (until is None or time.monotonic() < until)

    def _hang(self, *, asked: bool) -> None:
        if not asked:
            return
        # Who waits for a request that is read cannot be killed any more: only then it is so that somebody has asked.
        if self._faults.hang != "hold":
            self._file.with_suffix(".asked").touch()
            time.sleep(_LOOK_AGAIN)
        elif held := self._connection.read():
            if held.op == Op.INIT:
                # Of the mount itself: without an answer nobody could ask anything.
                self._serve(held)
                return
            self._held.append(held)
            if held.op not in UNAWAITED:
                self._file.with_suffix(".asked").touch()

    def _serve(self, request: Request) -> None:
        if request.op == Op.INTERRUPT:
            self._interrupt(request.fields("Q")[0])
            return
        time.sleep(self._faults.delay_s)
        try:
            refused = self._faults.errors.get(request.name)
            answer = self._export.answer(request) if refused is None else Failure.named(refused)
        except Failure as failure:
            answer = failure
        if answer is None:
            self._blocked.append(request)
        elif isinstance(answer, Failure):
            self._connection.answer(request.unique, error=answer.number)
        elif request.op not in SILENT and request.op != Op.INIT:
            self._connection.answer(request.unique, answer)

    def _interrupt(self, unique: int) -> None:
        for request in [r for r in self._blocked if r.unique == unique]:
            self._blocked.remove(request)
            self._connection.answer(unique, error=Failure.named("EINTR").number)


def main() -> None:
    options = Options(**json.loads(sys.stdin.readline()))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    os.umask(0)
    os.setgroups([])
    with contextlib.suppress(Ended):
        Server(options).serve()


if __name__ == "__main__":
    main()
