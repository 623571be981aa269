"""Helper processes: forks that run one function which may hang or fail, and other processes of the agent itself.

Users' files, the memory of other processes and busy disks are read in such a fork. A fork that touches a hung mount
sleeps in the kernel, where no signal reaches it. It is then left behind, and ends when the mount answers or goes away.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

import clusterctl.agent
from clusterctl.agent.linux import spawn, syscalls
from clusterctl.agent.protocol import command_messages, frames

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Callable, NoReturn, Union

    from clusterctl.agent.protocol.frames import Message

if TYPE_CHECKING:
    Task = Callable[["HelperOutput"], Mapping[str, object]]
    TaskResult = Union[Message, Exception]

_EXIT_TIMEOUT_S, _KILL_TIMEOUT_S = 2.0, 0.1
"""Seconds for a finished fork, and for a killed one, to exit before it is left behind."""


class HelperOutput:
    """The pipe of a task to the process that started it.

    Before a task touches what may hang, it sends `{"at": place}`. If no answer comes, the error names that place.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream; blocks while the connection is slow."""
        syscalls.write_all(self.descriptor, frames.encode_data(stream, offset, payload))

    def send_message(self, value: Mapping[str, object]) -> None:
        """Send a message."""
        syscalls.write_all(self.descriptor, frames.encode_message(value))


def start_helper(task: Task, keep: Iterable[int] = ()) -> tuple[int, int]:
    """Call a function in a fork that ends with this process. The calling process must have one thread.

    When this returns, the fork has its own POSIX session and holds none of our descriptors, so a search for processes
    of a run does not take it for one.

    Args:
        task: The function.
        keep: Descriptors that stay open in the fork.

    Returns:
        The pid, and a descriptor with the frames of the task: what it sends, then its result.

    Raises:
        OSError: The machine has no free process or descriptor.
    """
    pid, read, write, wait_end, release_end = syscalls.fork_with_pipes(2)
    if pid == 0:
        _run_task(task, write, keep)
    os.close(write)
    os.close(release_end)
    # The fork closes the other end of this pipe together with all other descriptors, or when it ends.
    os.read(wait_end, 1)
    os.close(wait_end)
    return pid, read


def _run_task(task: Task, write: int, keep: Iterable[int]) -> NoReturn:
    try:
        os.setsid()
        syscalls.set_parent_death_signal(signal.SIGKILL)
        spawn.reset_signals()
        spawn.close_descriptors({write, *keep})
        out = HelperOutput(write)
        try:
            out.send_message({"result": task(out)})
        except Exception as error:
            out.send_message({"error": command_messages.convert_to_request_error(error).make_answer(0)["error"]})
    finally:
        os._exit(0)


def parse_result(messages: list[Message]) -> TaskResult:
    """Return the result of a task, or its error."""
    last = messages[-1] if messages else {}
    if "error" in last:
        error = last["error"]
        return command_messages.RequestError(command_messages.ErrorKind(error["kind"]), error["message"], error["hint"])
    if "at" in last:
        return command_messages.make_failed_error(
            f"{last['at']} does not answer", "a file system may hang: `clusterctl health` checks each mount"
        )
    result: Message | None = last.get("result")
    return command_messages.make_failed_error("the helper process was killed") if result is None else result


def run_in_helper(task: Task, seconds: float, keep: Iterable[int] = ()) -> list[Message]:
    """Call a function in a fork and wait for it; return its messages, the result last.

    If the fork sends nothing for `seconds`, it is killed and the messages end without a result.

    Raises:
        OSError: The machine has no free process or descriptor.
    """
    pid, fd = start_helper(task, keep)
    messages: list[Message] = []
    is_finished = False
    decoder, poll = frames.FrameDecoder(), select.poll()
    poll.register(fd, select.POLLIN)
    try:
        while not is_finished and poll.poll(seconds * 1000):
            data = os.read(fd, 1 << 16)
            is_finished = not data
            messages += [frame for frame in decoder.feed(data) if isinstance(frame, dict)]
    finally:
        os.close(fd)
        kill_helper(pid)
        with contextlib.suppress(ChildProcessError):
            syscalls.wait_for_exit(pid, _EXIT_TIMEOUT_S if is_finished else _KILL_TIMEOUT_S)
    return messages


def kill_helper(pid: int) -> None:
    """Kill a fork and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


_PYTHON_FLAGS = ["-I", "-S", "-X", "utf8"]
"""Ignore the user's Python settings and site packages, and use UTF-8 in every locale."""

START_SCRIPT = (
    "import sys; place = sys.argv.pop(1); sys.path[: sys.path[:1] == ['']] = [place]; "
    "from clusterctl.agent.__main__ import main; sys.exit(main())"
)
"""Replaces the working directory, which `-c` may put first on `sys.path`: its modules are not ours."""


def find_import_root() -> str:
    """Return the entry of `sys.path` from which the agent is imported: an archive or a folder."""
    place = clusterctl.agent.__path__[0]
    return os.path.dirname(os.path.dirname(os.path.abspath(place)))


def build_agent_command(name: str, *arguments: str, python: str = sys.executable, isolated: bool = True) -> list[str]:
    """Return the argv that runs a command of the agent.

    Args:
        name: A command of `clusterctl/agent/__main__.py`.
        arguments: Its arguments.
        python: The interpreter.
        isolated: False if the command must see the environment of a worker.
    """
    flags = _PYTHON_FLAGS if isolated else []
    return [python, *flags, "-c", START_SCRIPT, find_import_root(), name, *arguments]


def start_agent_command(name: str, *arguments: str) -> tuple[int, int]:
    """Start a command of the agent that ends with this process; return its pid and a descriptor with its output.

    Raises:
        OSError: The machine has no free process or descriptor.
    """
    argv = build_agent_command(name, *arguments)

    def become(out: HelperOutput) -> NoReturn:
        spawn.redirect_stdio(stdout=out.descriptor)
        os.execv(argv[0], argv)

    pid, read = start_helper(become)
    os.set_blocking(read, False)
    return pid, read
