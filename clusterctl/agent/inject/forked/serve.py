"""The zygote's own work: import what is asked for, say so, and fork a rank at each request until the supervisor ends.

A request is one byte with descriptors: `f` asks for a fork (see `forks`), and `?` whether it can still
serve, as a process of the run that is described.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time

from . import cannot, forks, image, late, marks, state
from .beginning import Beginning
from .cannot import CannotForkError

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MOST_DESCRIPTORS = 250


def main(control: int) -> Callable[[], None]:
    """Be the zygote until the supervisor ends; return only in a rank, what is left to do there."""
    state.control = control
    sock = socket.socket(fileno=control)
    try:
        return _serve(sock)
    except BaseException as error:
        _say(sock, {"cannot": forks.reason(error)})
        os._exit(0 if isinstance(error, CannotForkError) else 1)


def _serve(sock: socket.socket) -> Callable[[], None]:
    (asked,) = _receive(sock)[1]
    spec = forks.content(asked)
    os.close(asked)
    image.name(b"clusterctl-zygote"[:15])
    beginning, missed, told = _import(spec)
    _say(sock, told)
    beginning.remember(missed)
    while True:
        word, descriptors = _receive(sock)
        if not word:
            os._exit(0)
        if word == b"?":
            marks.put_on(forks.content(descriptors[0]))
            _say(sock, {"changed": beginning.changed()})
        elif forks.fork(descriptors):
            sock.detach()
            return forks.become(descriptors)
        for fd in descriptors:
            os.close(fd)


def _receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    word, descriptors, flags, _ = socket.recv_fds(sock, 1, _MOST_DESCRIPTORS)
    if flags & socket.MSG_CTRUNC:
        raise CannotForkError("no descriptor is to be had for what a rank needs")
    return word, descriptors


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode())


def _import(spec: dict[str, Any]) -> tuple[Beginning, set[str], dict[str, Any]]:
    began = time.monotonic()
    cannot.check_python()
    beginning = Beginning(spec)
    # Tried now: a kernel that does not allow it is no surprise to a rank then.
    image.show(marks.title(spec["title"]), dict(os.environb))
    before = dict(os.environb)
    watched = late.watch([*spec["late"], *spec["changes"]])
    wanted = beginning.look()
    words = late.watch_arguments()
    missed = beginning.bring()
    arguments = late.end_arguments(words)
    read = late.end(watched, spec["changes"])
    state.changes = late.set_since(before)
    cannot.check(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.stdout.flush()
    sys.stderr.flush()
    modules = sorted({name.partition(".")[0] for name, _ in wanted})
    told = {"modules": modules, "seconds": time.monotonic() - began, "kilobytes": _memory()}
    told |= {"read": read, "arguments": arguments}
    return beginning, missed, told


def _memory() -> int:
    """Return the memory that a rank shares with us, in KiB."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("RssAnon:"):
                return int(line.split()[1])
    return 0
