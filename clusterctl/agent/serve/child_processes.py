"""Work for a controller that takes time: each piece in a process of its own, so that the session answers meanwhile.

Programs are what a user asked to run (`Running`); tasks are functions of ours, done `aside`.
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
"""After the end of a program, how long something that it left behind may still write into our answer."""
_KILL_DELAY_S = 2.0


class RunningProgram:
    """A program and the pipes that we read from it.

    Attributes:
        pid: Leader of its POSIX session and group.
        tag: Value of the surviving mark on everything that it starts.
        status: How it ended, `None` while it runs.
        open: Our ends of its pipes, by their number (1: output, 2: errors).
    """

    def __init__(self, pid: int, tag: int, on_data: OnData, on_end: Callable[[int], None]) -> None:
        self.pid, self.tag = pid, tag
        self.on_data, self.on_end = on_data, on_end
        self.status: int | None = None
        self.pipes: dict[int, int] = {}
        self.ended = False

    def signal(self, number: int) -> None:
        """Send a signal to it and to everything that came of it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
        for pid in list(proc.list_pids()):
            if proc.has_limit(pid, self.tag):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)


class ChildProcesses:
    """All processes that work for one controller."""

    def __init__(self, loop: EventLoop, channel: FrameChannel) -> None:
        self._loop, self._channel = loop, channel
        self._programs: dict[int, RunningProgram] = {}
        self._tasks: dict[int, Callable[[], None]] = {}
        self._paused: list[Callable[[], None]] = []
        loop.before_waiting(self._resume)

    # --- flow

    def _pause_if_slow(self, resume: Callable[[], None]) -> bool:
        """Whether the connection has enough to do; `resume` is then called later."""
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
            program: What to run.
            stdin: What it reads.
            on_data: Called with 1 or 2 (output or errors) and bytes, as they come.
            on_end: Called once with the wait status, after the last data.
            prepare: Called in the new process; the program that it returns is run.
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

    def start_on_terminal(
        self,
        terminal: int,
        program: spawn.Program,
        on_end: Callable[[int], None],
        prepare: PrepareProgram | None = None,
    ) -> RunningProgram:
        """Start a program at a terminal, which becomes its controlling one.

        Args:
            terminal: Descriptor of the end that programs have.
            program: What to run.
            on_end: Called once with the wait status.
            prepare: As for `run`.
        """
        pid = os.fork()
        if pid == 0:
            _exec_program(program, terminal, terminal, terminal, prepare, controlled=True)
        running = RunningProgram(pid, program.tag or 0, lambda _number, _data: None, on_end)
        self._programs[pid] = running
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
        self._close(running, number)
        self._finish_if_ended(running)

    def _close(self, running: RunningProgram, number: int) -> None:
        fd = running.pipes.pop(number)
        self._loop.forget(fd)
        os.close(fd)

    def _finish_if_ended(self, running: RunningProgram) -> None:
        if running.status is not None and not running.pipes and not running.ended:
            running.ended = True
            self._programs.pop(running.pid, None)
            running.on_end(running.status)

    def _close_pipes(self, running: RunningProgram) -> None:
        for number in list(running.pipes):
            self._close(running, number)
        self._finish_if_ended(running)

    def terminate(self, running: RunningProgram) -> None:
        """End a program and everything that came of it: SIGTERM, then SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            running.signal(number)
        self._loop.after(_KILL_DELAY_S, lambda: running.signal(signal.SIGKILL) if not running.ended else None)

    # --- tasks

    def run_task(self, task: Task, on_result: OnResult, keep: Iterable[int] = (), seconds: float | None = None) -> int:
        """Call a function in a fork; `on_result` gets its result, or what went wrong. Its data goes to the controller.

        Returns a number by which `end` ends it early.

        Args:
            task: What to do.
            on_result: Called once.
            keep: Descriptors that the task needs.
            seconds: After so long it is ended, and left behind where it hangs.
        """
        pid, read = helper_process.start_helper(task, keep)
        os.set_blocking(read, False)
        decoder = frames.FrameDecoder()
        answer: list[Message] = []

        def end() -> None:
            self._loop.forget(read)
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

        self._tasks[pid] = end
        if seconds is not None:
            self._loop.after(seconds, lambda: self._expire_task(pid, end))
        listen()
        return pid

    def _expire_task(self, pid: int, end: Callable[[], None]) -> None:
        if self._tasks.get(pid) is end:
            helper_process.kill_helper(pid)
            end()

    def _forward_frames(self, read: int, decoder: frames.FrameDecoder, answer: list[Message]) -> bool:
        """Send on the data that a fork gives, and keep its messages; return whether more may come."""
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
        """Kill a task that is still at work; its `on_result` is called as for any that was killed."""
        if task in self._tasks:
            helper_process.kill_helper(task)

    # --- ends

    def reap(self) -> None:
        """Take in the ends of all children."""
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
                        self._loop.after(_OUTPUT_GRACE_S, functools.partial(self._close_pipes, running))

    def kill_all(self) -> None:
        """Kill every program and task."""
        for running in self._programs.values():
            running.signal(signal.SIGKILL)
        for pid in self._tasks:
            helper_process.kill_helper(pid)


def _make_memory_file(data: bytes) -> int:
    """Return a descriptor from which exactly `data` can be read; nobody has to write while it is read."""
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
    program: spawn.Program,
    stdin: int,
    stdout: int,
    stderr: int,
    prepare: PrepareProgram | None,
    *,
    controlled: bool = False,
) -> NoReturn:
    try:
        os.setsid()
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if controlled:
            import fcntl
            import termios

            fcntl.ioctl(stdin, termios.TIOCSCTTY, 0)
        for stdin_fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(stdin_fd, target)
        spawn.close_descriptors(())
        spawn.exec_program(program if prepare is None else prepare(program))
    finally:
        os._exit(spawn.EXIT_NOT_EXECUTABLE)


def generate_tag() -> int:
    """Return a value for the surviving mark that nothing else carries."""
    return int.from_bytes(os.urandom(7), "big") | 1 << 61
