"""Child processes of a session: each long piece of work runs in its own process, so the session can answer meanwhile.

A program is what a user asked to run (`RunningProgram`). A task is a function of the agent, run in a helper process.
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
"""Seconds for which processes that a program left behind may still write into its output after it ended."""
_KILL_DELAY_S = 2.0


class RunningProgram:
    """A program and the pipes that carry its output.

    Attributes:
        pid: The leader of its POSIX session and process group.
        tag: The limit value that marks every process that the program starts.
        status: The wait status, or `None` while the program runs.
        pipes: Our ends of its pipes, by stream number (1: output, 2: errors).
    """

    def __init__(self, pid: int, tag: int, on_data: OnData, on_end: Callable[[int], None]) -> None:
        self.pid, self.tag = pid, tag
        self.on_data, self.on_end = on_data, on_end
        self.status: int | None = None
        self.pipes: dict[int, int] = {}
        self.ended = False

    def signal(self, number: int) -> None:
        """Send a signal to the program and to all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in list(proc.list_pids()):
            if proc.has_resource_limit(pid, self.tag):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


class ChildProcesses:
    """The programs and tasks that run for one controller."""

    def __init__(self, loop: EventLoop, channel: FrameChannel) -> None:
        self._loop, self._channel = loop, channel
        self._programs: dict[int, RunningProgram] = {}
        self._tasks: dict[int, Callable[[], None]] = {}
        self._paused: list[Callable[[], None]] = []
        loop.call_before_each_wait(self._resume)

    # --- flow

    def _pause_if_slow(self, resume: Callable[[], None]) -> bool:
        """Return whether too many bytes wait for the connection; if so, call `resume` once they are sent."""
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
        """Start a program in a POSIX session of its own.

        Args:
            program: The program to run.
            stdin: The bytes that it reads on standard input.
            on_data: Called for each piece of output, with 1 (output) or 2 (errors) and the bytes.
            on_end: Called once with the wait status, after the last piece of output.
            prepare: Called in the new process; it returns the program that is executed.
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
        """Close pipes, by default all, and finish the program if it has ended."""
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
        """End a program and all processes that it started: SIGTERM first, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            running.signal(number)
        self._loop.call_later(_KILL_DELAY_S, lambda: running.signal(signal.SIGKILL) if not running.ended else None)

    # --- tasks

    def run_task(self, task: Task, on_result: OnResult, keep: Iterable[int] = (), seconds: float | None = None) -> int:
        """Call a function in a fork; `on_result` gets its result or its error. Its data frames go to the controller.

        Args:
            task: The function to call.
            on_result: Called once.
            keep: Descriptors that stay open in the fork.
            seconds: After this time the fork is killed. If it hangs in the kernel, it is left behind.

        Returns:
            A number that `kill_task` takes.
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
        """Send the data frames of a fork on and collect its messages; return whether more may come."""
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
        """Kill a task that still runs. Its `on_result` is called with an error."""
        if task in self._tasks:
            helper_process.kill_helper(task)

    # --- ends

    def reap(self) -> None:
        """Collect the exit status of every child that has ended."""
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
            running.signal(signal.SIGKILL)
        for pid in self._tasks:
            helper_process.kill_helper(pid)


def _make_memory_file(data: bytes) -> int:
    """Return a descriptor from which exactly `data` can be read, without anybody who writes meanwhile."""
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
