"""Helper processes: forks of the agent that each run one function that may hang.

Helper processes read users' files, the memory of other processes, and busy disks. A process that accesses a hung mount
sleeps in the kernel, and no signal can end it. The agent abandons such a helper, which ends when the mount answers or
is removed.
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
"""Seconds to wait for the exit of a finished helper, and of a killed helper. Then the agent abandons the helper."""


class HelperOutput:
    """The pipe from a task to the process that started it.

    Before an access that may hang, a task sends `{"at": path}`. If the access hangs, the error names this path.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream, and block while the connection is slow."""
        syscalls.write_all(self.descriptor, frames.encode_data(stream, offset, payload))

    def send_message(self, value: Mapping[str, object]) -> None:
        """Send a message."""
        syscalls.write_all(self.descriptor, frames.encode_message(value))


def start_helper(task: Task, keep: Iterable[int] = ()) -> tuple[int, int]:
    """Call a function in a fork, which is killed if this process ends. The calling process must have one thread.

    When this function returns, the fork has its own POSIX session and has closed the inherited descriptors. A sweep
    therefore does not mistake the fork for a process of a run.

    Args:
        task: The function.
        keep: Descriptors that stay open in the fork.

    Returns:
        The pid of the fork, and a descriptor of its frames: the messages of the task, then the result.

    Raises:
        OSError: The machine has no free process or descriptor.
    """
    pid, read, write, wait_end, release_end = syscalls.fork_with_pipes(2)
    if pid == 0:
        _run_task(task, write, keep)
    os.close(write)
    os.close(release_end)
    # Wait until the fork has closed its inherited descriptors, or has ended.
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
    """Return the result of a task from its messages, or its error."""
    last = messages[-1] if messages else {}
    if "error" in last:
        error = last["error"]
        return command_messages.RequestError(command_messages.ErrorKind(error["kind"]), error["message"], error["hint"])
    if "at" in last:
        return command_messages.make_failed_error(
            f"{last['at']} does not answer", "a filesystem may hang: `clusterctl health` checks each mount"
        )
    result: Message | None = last.get("result")
    return command_messages.make_failed_error("the helper process was killed") if result is None else result


def run_in_helper(task: Task, seconds: float, keep: Iterable[int] = ()) -> list[Message]:
    """Call a function in a fork and wait for its end; return its messages, of which the last is the result.

    If the fork sends no message for `seconds`, kill the fork; the messages then contain no result.

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
    """Kill a helper process and all processes that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


_PYTHON_FLAGS = ["-I", "-S", "-X", "utf8"]
"""With these flags, Python ignores the user's settings and site packages, and uses UTF-8 in every locale."""

START_SCRIPT = (
    "import sys; place = sys.argv.pop(1); sys.path[: sys.path[:1] == ['']] = [place]; "
    "from clusterctl.agent.__main__ import main; sys.exit(main())"
)
"""The script removes the working directory from `sys.path`, because modules there may hide modules of clusterctl."""


def find_import_root() -> str:
    """Return the entry of `sys.path` from which the agent is imported: an archive or a folder."""
    place = clusterctl.agent.__path__[0]
    return os.path.dirname(os.path.dirname(os.path.abspath(place)))


def build_agent_command(name: str, *arguments: str, python: str = sys.executable, isolated: bool = True) -> list[str]:
    """Return the argv that runs a command of the agent.

    Args:
        name: A command of `clusterctl/agent/__main__.py`.
        arguments: Arguments of the command.
        python: The interpreter.
        isolated: Whether Python ignores the user's settings and site packages. The Python of a worker uses both.
    """
    flags = _PYTHON_FLAGS if isolated else []
    return [python, *flags, "-c", START_SCRIPT, find_import_root(), name, *arguments]


def start_agent_command(name: str, *arguments: str) -> tuple[int, int]:
    """Start a command of the agent that ends with this process; return its pid and a descriptor of its stdout.

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
