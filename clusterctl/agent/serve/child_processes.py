"""Child processes of a session. Long work runs in a child process, so that the session can answer other requests.

A child process is a program that the user runs (`RunningProgram`), or a task. A task is a function of the agent that
runs in a helper process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal

from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.protocol import frames

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Callable, NoReturn

    from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel
    from clusterctl.agent.linux.helper_process import Task, TaskResult
    from clusterctl.agent.protocol.frames import Message

    OnResult = Callable[[TaskResult], None]
    OnData = Callable[[int, bytes], None]
    PrepareProgram = Callable[[spawn.Program], spawn.Program]

_MAX_QUEUED_BYTES = 256 * 1024
_OUTPUT_GRACE_S = 0.5
"""After a program ends, the session reads the output for this many more seconds, because children may still write."""
_KILL_DELAY_S = 2.0


class RunningProgram:
    """A running program and the pipes of its output.

    Attributes:
        pid: Pid of the program, which leads its own POSIX session and process group.
        tag: Value of a resource limit that marks all processes that the program starts.
        status: The wait status, or `None` while the program runs.
        pipes: Read ends of the program's output pipes, by stream number (1: stdout, 2: stderr).
        ended: Whether the program has ended and all its output was read.
    """

    def __init__(self, pid: int, tag: int, on_data: OnData, on_end: Callable[[int], None]) -> None:
        self.pid, self.tag = pid, tag
        self.on_data, self.on_end = on_data, on_end
        self.status: int | None = None
        self.pipes: dict[int, int] = {}
        self.ended = False

    def send_signal(self, number: int) -> None:
        """Send a signal to the program and to all processes that it has started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in list(proc.list_pids()):
            if proc.has_resource_limit(pid, self.tag):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


class ChildProcesses:
    """The programs and tasks of one session."""

    def __init__(self, loop: EventLoop, channel: FrameChannel) -> None:
        self._loop, self._channel = loop, channel
        self._programs: dict[int, RunningProgram] = {}
        self._tasks: dict[int, Callable[[], None]] = {}
        self._paused: list[Callable[[], None]] = []
        loop.call_before_each_wait(self._resume)

    # --- flow

    def _pause_if_slow(self, resume: Callable[[], None]) -> bool:
        """Return whether the connection has too many unsent bytes; if so, call `resume` once they are sent."""
        if self._channel.queued_bytes <= _MAX_QUEUED_BYTES:
            return False
        self._paused.append(resume)
        return True

    def _resume(self) -> None:
        if self._paused and self._channel.queued_bytes <= _MAX_QUEUED_BYTES // 2:
            paused, self._paused = self._paused, []
            for resume in paused:
                resume()

    # --- programs

    def start_program(
        self,
        program: spawn.Program,
        stdin: bytes,
        on_data: OnData,
        on_end: Callable[[int], None],
        prepare: PrepareProgram | None = None,
    ) -> RunningProgram:
        """Start a program in its own POSIX session.

        Args:
            program: The program to run.
            stdin: The standard input of the program.
            on_data: Called for each piece of output, with 1 (stdout) or 2 (stderr) and the bytes.
            on_end: Called once with the wait status, after the last piece of output.
            prepare: Called in the new process with the program; returns the program to execute.
        """
        stdin_fd = _make_memory_file(stdin)
        try:
            pid, output, output_end, errors, errors_end = syscalls.fork_with_pipes(2)
            if pid == 0:
                _exec_program(program, stdin_fd, output_end, errors_end, prepare)
        finally:
            os.close(stdin_fd)
        running = RunningProgram(pid, program.tag or 0, on_data, on_end)
        self._programs[pid] = running
        for number, read, write in ((1, output, output_end), (2, errors, errors_end)):
            os.close(write)
            os.set_blocking(read, False)
            running.pipes[number] = read
            self._listen(running, number)
        return running

    def _listen(self, running: RunningProgram, number: int) -> None:
        fd = running.pipes.get(number)
        if fd is not None:
            self._loop.on_readable(fd, lambda: self._read(running, number))

    def _read(self, running: RunningProgram, number: int) -> None:
        fd = running.pipes[number]
        if self._pause_if_slow(lambda: self._listen(running, number)):
            self._loop.on_readable(fd, None)
            return
        try:
            data = os.read(fd, frames.CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            running.on_data(number, data)
            return
        self._close(running, [number])

    def _close(self, running: RunningProgram, numbers: Iterable[int] | None = None) -> None:
        """Close pipes of a program, by default all, and call `on_end` if the program has ended."""
        for number in list(running.pipes) if numbers is None else numbers:
            fd = running.pipes.pop(number)
            self._loop.remove_descriptor(fd)
            os.close(fd)
        self._finish_if_ended(running)

    def _finish_if_ended(self, running: RunningProgram) -> None:
        if running.status is not None and not running.pipes and not running.ended:
            running.ended = True
            self._programs.pop(running.pid, None)
            running.on_end(running.status)

    def terminate(self, running: RunningProgram) -> None:
        """End a program that still runs, and all processes that it has started: SIGTERM, and SIGKILL after 2 s."""
        if running.ended:
            return
        for number in (signal.SIGTERM, signal.SIGCONT):
            running.send_signal(number)
        self._loop.call_later(_KILL_DELAY_S, lambda: running.send_signal(signal.SIGKILL) if not running.ended else None)

    # --- tasks

    def run_task(self, task: Task, on_result: OnResult, keep: Iterable[int] = (), seconds: float | None = None) -> int:
        """Call a function in a helper process. The session forwards the function's data to the controller.

        Args:
            task: The function.
            on_result: Called once with the result or the error of the function.
            keep: Descriptors that stay open in the helper process.
            seconds: Timeout in seconds, after which the session kills the helper without waiting for its end.

        Returns:
            The number of the task, for `kill_task`.
        """
        pid, read = helper_process.start_helper(task, keep)
        os.set_blocking(read, False)
        decoder = frames.FrameDecoder()
        answer: list[Message] = []

        def end() -> None:
            self._loop.remove_descriptor(read)
            os.close(read)
            self._tasks.pop(pid, None)
            on_result(helper_process.parse_result(answer))

        def listen() -> None:
            if self._tasks.get(pid) is end:
                self._loop.on_readable(read, readable)

        def readable() -> None:
            if self._pause_if_slow(listen):
                self._loop.on_readable(read, None)
            elif not self._forward_frames(read, decoder, answer):
                end()

        def expire() -> None:
            if self._tasks.get(pid) is end:
                helper_process.kill_helper(pid)
                end()

        self._tasks[pid] = end
        if seconds is not None:
            self._loop.call_later(seconds, expire)
        listen()
        return pid

    def _forward_frames(self, read: int, decoder: frames.FrameDecoder, answer: list[Message]) -> bool:
        """Read frames of a task: forward data frames, append messages to `answer`; return false at the end."""
        try:
            data = os.read(read, 1 << 18)
        except BlockingIOError:
            return True
        for frame in decoder.feed(data):
            if isinstance(frame, frames.StreamData):
                self._channel.send_data(frame.stream, frame.offset, frame.payload)
            else:
                answer.append(frame)
        return bool(data)

    def kill_task(self, task: int) -> None:
        """Kill a task if it still runs; its `on_result` then gets an error."""
        if task in self._tasks:
            helper_process.kill_helper(task)

    # --- ends

    def reap(self) -> None:
        """Reap all children that have ended."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                running = self._programs.get(pid)
                if running is not None:
                    running.status = status
                    self._finish_if_ended(running)
                    if not running.ended:
                        self._loop.call_later(_OUTPUT_GRACE_S, functools.partial(self._close, running))

    def kill_all(self) -> None:
        """Kill all programs and tasks."""
        for running in self._programs.values():
            running.send_signal(signal.SIGKILL)
        for pid in self._tasks:
            helper_process.kill_helper(pid)


def _make_memory_file(data: bytes) -> int:
    """Return a descriptor of a file in memory with this content."""
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = syscalls.create_memory_file("stdin")
    try:
        syscalls.write_all(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
    except OSError:
        os.close(fd)
        raise
    return fd


def _exec_program(
    program: spawn.Program, stdin: int, stdout: int, stderr: int, prepare: PrepareProgram | None
) -> NoReturn:
    try:
        os.setsid()
        syscalls.set_parent_death_signal(signal.SIGKILL)
        spawn.redirect_stdio(stdin, stdout, stderr)
        spawn.close_descriptors(())
        spawn.exec_program(program if prepare is None else prepare(program))
    finally:
        os._exit(spawn.EXIT_NOT_EXECUTABLE)
