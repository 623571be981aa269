"""`python -m tests.soak.head RUN`: a controller in a process of its own, which writes down what its connections take.

Nodes are this machine; agents are started as for any local node, with the environment of this process.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.config.spec import load_spec
from clusterctl.run.controller.loop import Controller
from clusterctl.run.record.rundir import RunDir
from clusterctl.session.connect import open_session
from clusterctl.transport.local import LocalTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.spec import HostSpec
    from clusterctl.session.controller_inbox import InboxItemQueue
    from clusterctl.session.node_session import Session
    from clusterctl.transport.local import LocalChannel

CONNECTIONS = "connections"
_FOLLOW = re.compile(rb'\{[^{}]*"cmd":"follow"')


class _Channel:
    """A channel that counts.

    Args:
        inner: The stream.
        told: Called with the bytes of what asks a node to tell, once a session.
        took: Called with how many bytes came.
    """

    def __init__(self, inner: LocalChannel, told: Callable[[int], None], took: Callable[[int], None]) -> None:
        self._inner, self._told, self._took = inner, told, took
        self.login_note, self.host_key, self.warnings = inner.login_note, inner.host_key, inner.warnings

    @property
    def acknowledged_bytes(self) -> int:
        return self._inner.acknowledged_bytes

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        if _FOLLOW.search(data):
            self._told(len(data))
        self._inner.send(data, timeout=timeout)

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        data = self._inner.recv(limit, timeout=timeout)
        self._took(len(data))
        return data

    def close(self) -> None:
        self._inner.close()

    def stderr_tail(self) -> str:
        return self._inner.stderr_tail()


class _Way:
    """The way to nodes that are this machine; of each session that follows it writes a line into a file.

    The line holds the bytes that it asked in, and those that have come from all nodes till then.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._came = file, 0
        self._transport = LocalTransport()

    def open(self, host: HostSpec, *, progress: Callable[[str], None]) -> _Channel:
        return _Channel(self._transport.open(host, progress=progress), self._told, self._took)

    def close(self) -> None:
        pass

    def _told(self, size: int) -> None:
        with self._file.open("a") as file:
            file.write(f"{size} {self._came}\n")

    def _took(self, size: int) -> None:
        self._came += size

    def dial(self, host: HostSpec, inbox: InboxItemQueue, progress: Callable[[str], None]) -> Session:
        return open_session(self, host, inbox, progress=progress)


def main(path: str) -> int:
    """Start a run, and see it to its end."""
    run = RunDir(Path(path))
    way = _Way(run.path.with_name(f"{run.run}.{CONNECTIONS}"))
    return Controller(run, load_spec(run.spec.read_text()), way.dial).start()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
