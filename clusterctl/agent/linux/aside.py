"""What may hang or fail is done aside, in a fork: a user's files, the memory of other processes, a disk that is busy.

A fork that touches a hung mount sleeps in the kernel where no signal reaches it. It is then left behind, and ends when
the mount answers or is taken away.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import commands, frames, request_errors

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Callable, NoReturn, Union

    from clusterctl.agent.protocol.frames import Message

    Task = Callable[["Out"], Mapping[str, object]]
    Outcome = Union[Message, Exception]

_END_SECONDS, _KILLED_SECONDS = 2.0, 0.1
"""How long a fork that is through may take to go, and one that was killed, before it is left behind."""


class Out:
    """Where a task sends data of a stream, and messages before its answer.

    A message `{"at": place}` before something that may hang names the place, should no answer come.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes; waits where the connection is slow."""
        syscalls.write_all(self.descriptor, frames.encode_data(stream, offset, payload))

    def message(self, value: Mapping[str, object]) -> None:
        """Send a message."""
        syscalls.write_all(self.descriptor, frames.encode_message(value))


def fork(task: Task, keep: Iterable[int] = ()) -> tuple[int, int]:
    """Call a function in a fork that ends with this process; to be called in a process with one thread.

    When this returns, the fork has a POSIX session of its own and holds none of our descriptors: whoever looks for
    processes of a run from now on does not take it for one.

    Args:
        task: What to do.
        keep: Descriptors that the task needs.

    Returns:
        Its pid, and a descriptor from which its frames can be read: what the task sends, then its answer.

    Raises:
        OSError: No process or no descriptor is to be had.
    """
    pid, read, write, free, held = syscalls.fork_with_pipes(2)
    if pid == 0:
        _do(task, write, keep)
    os.close(write)
    os.close(held)
    # The other end of this pipe goes with everything else that the fork lets go of, or with the fork.
    os.read(free, 1)
    os.close(free)
    return pid, read


def _do(task: Task, write: int, keep: Iterable[int]) -> NoReturn:
    try:
        os.setsid()
        syscalls.die_with_parent(signal.SIGKILL)
        spawn.normal_signals()
        spawn.close_all({write, *keep})
        out = Out(write)
        try:
            out.message({"result": task(out)})
        except Exception as error:
            out.message({"error": request_errors.convert_to_request_error(error).answer(0)["error"]})
    finally:
        os._exit(0)


def outcome(messages: list[Message]) -> Outcome:
    """Return what a task answered, or what went wrong with it."""
    last = messages[-1] if messages else {}
    if "error" in last:
        error = last["error"]
        return request_errors.RequestError(commands.ErrorKind(error["kind"]), error["message"], error["hint"])
    if "at" in last:
        return request_errors.make_failed_error(
            f"{last['at']} does not answer", "a file system may hang: `health` looks at each mount"
        )
    result: Message | None = last.get("result")
    return request_errors.make_failed_error("the process that did it was killed") if result is None else result


def ask(task: Task, seconds: float, keep: Iterable[int] = ()) -> list[Message]:
    """Call a function in a fork and wait for it; return its messages, the answer last.

    One that is silent for `seconds` is killed; what it has sent until then is returned, without an answer.

    Raises:
        OSError: No process or no descriptor is to be had.
    """
    pid, fd = fork(task, keep)
    messages: list[Message] = []
    over = False
    decoder, poll = frames.FrameDecoder(), select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while not over and poll.poll(seconds * 1000):
            data = os.read(fd, 1 << 16)
            over = not data
            messages += [frame for frame in decoder.feed(data) if isinstance(frame, dict)]
    finally:
        os.close(fd)
        kill(pid)
        _reap(pid, _END_SECONDS if over else _KILLED_SECONDS)
    return messages


def kill(pid: int) -> None:
    """Kill a fork and everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _reap(pid: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
            syscalls.pause(0.002)
