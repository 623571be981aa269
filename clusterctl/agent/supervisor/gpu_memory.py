"""Waiting for the memory of an attempt's GPUs, in a child that may hang: a sick driver must not hold the attempt."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import helper_process, proc

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, Timer

SECONDS = 10.0
"""How long memory may take to come free."""
_FIRST_SECONDS = 6.0
"""How long the driver may take to answer at all; the sampler has kept it open, so nothing has to be woken up."""
_SLACK = 5.0
_GIB = 1024**3

Tell = Callable[[str, "int | None"], None]


class Drain:
    """One wait. Calls `tell` with a message and a GPU for each that is not free, then `done`, once and in time."""

    def __init__(self, loop: EventLoop, gpus: list[int], run: str, tell: Tell, done: Callable[[], None]) -> None:
        self._loop, self._tell, self._done = loop, tell, done
        self._said = b""
        try:
            self._pid, self._fd = helper_process.start_agent_command(
                "gpu-memory-wait", ",".join(map(str, gpus)), str(SECONDS), run
            )
        except OSError as error:
            tell(f"nobody knows whether GPU memory is free: {error.strerror}", None)
            done()
            return
        self._timer: Timer = loop.after(_FIRST_SECONDS, self._late)
        loop.on_readable(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        self._timer.cancel()
        self._said += data
        if data:
            self._timer = self._loop.after(SECONDS + _SLACK, self._late)
        else:
            self._end(_messages(self._said))

    def _late(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._end([("the GPU driver does not answer: nobody knows whether GPU memory is free", None)])

    def _end(self, messages: list[tuple[str, int | None]]) -> None:
        self._loop.forget(self._fd)
        os.close(self._fd)
        for message, gpu in messages:
            self._tell(message, gpu)
        self._done()


def _messages(said: bytes) -> list[tuple[str, int | None]]:
    try:
        answer = json.loads(said.splitlines()[-1])
    except (ValueError, IndexError):
        return [("the look at GPU memory died: nobody knows whether it is free", None)]
    if answer["status"] == "error":
        return [(f"nobody knows whether GPU memory is free: {answer['reason']}", None)]
    return [(_message(gpu), int(gpu["gpu"])) for gpu in answer["gpus"]]


def _message(gpu: dict[str, Any]) -> str:
    sizes = f"{gpu['used'] / _GIB:.1f} of {gpu['total'] / _GIB:.0f} GiB still in use"
    if not gpu["procs"]:
        return f"{sizes}, by no process that the driver names"
    return f"{sizes}, held by {', '.join(map(_holder, gpu['procs'][:4]))}"


def _holder(process: dict[str, Any]) -> str:
    if not process["visible"]:
        return f"pid {process['pid']}, which cannot be seen from here (a container, or another user's)"
    run = f", run {process['run']}" if process["run"] else ""
    return f"pid {process['pid']} ({process['comm']}, {proc.find_user_name(process['user'])}{run})"
