"""Commands that open terminals and TCP connections on this machine; their bytes go both ways through the controller."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import pwd
import socket
import struct
import termios
from typing import TYPE_CHECKING

from clusterctl.agent import inject
from clusterctl.agent.linux import addresses, proc, spawn
from clusterctl.agent.protocol.commands import WINDOW_BYTES, Command, ErrorKind
from clusterctl.agent.protocol.frames import CHUNK_BYTES, FrameError
from clusterctl.agent.protocol.request_errors import RequestError
from clusterctl.agent.serve import child_processes
from clusterctl.agent.serve.node_commands import build_program, make_python_setup, resolve_folder

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.frames import StreamData
    from clusterctl.agent.serve.session import Handler, Session


class DuplexStream:
    """A terminal or connection whose bytes go both ways. Each side holds at most one window of the other's bytes.

    Args:
        number: The number of the stream.
        fd: The descriptor; `close` closes it.
        on_input_end: Called after the last byte from the controller was written.
        on_change: Called when one direction has ended: `done` or `is_finished` may be true then.

    Attributes:
        done: The last byte of the descriptor was sent to the controller.
    """

    def __init__(
        self,
        loop: EventLoop,
        channel: FrameChannel,
        number: int,
        fd: int,
        on_input_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self._loop, self._channel, self._number, self._fd = loop, channel, number, fd
        self._on_input_end, self._on_change = on_input_end, on_change
        self._offset, self._window = 0, WINDOW_BYTES
        self._waiting, self._unacknowledged = bytearray(), 0
        self._input_ended = self._broken = self.done = False
        os.set_blocking(fd, False)
        loop.on_readable(fd, self._read)

    @property
    def is_window_full(self) -> bool:
        """Whether the controller accepts no more bytes for now."""
        return self._window <= 0

    @property
    def is_finished(self) -> bool:
        """Whether both directions have ended."""
        return self.done and (self._broken or (self._input_ended and not self._waiting))

    # --- to the controller

    def _read(self) -> None:
        if self._window <= 0:
            self._loop.on_readable(self._fd, None)
            return
        try:
            data = os.read(self._fd, min(CHUNK_BYTES, self._window))
        except BlockingIOError:
            return
        except OSError:
            data = b""  # A terminal that no process has open any more returns EIO.
        self._channel.send_data(self._number, self._offset, data)
        self._offset += len(data)
        self._window -= len(data)
        if not data:
            self.done = True
            self._loop.on_readable(self._fd, None)
            self._on_change()

    def add_window(self, count: int) -> None:
        """Allow `count` more bytes to the controller."""
        self._window += count
        if self._window > 0 and not self.done and self._fd >= 0:
            self._loop.on_readable(self._fd, self._read)

    # --- from the controller

    def receive(self, data: StreamData) -> None:
        """Write bytes to the descriptor; an empty frame is the end of the input.

        Raises:
            FrameError: The controller has sent more than the window allows.
        """
        if self._fd < 0 or self._input_ended:
            return
        if not data.payload:
            self._input_ended = True
        self._waiting += data.payload
        if len(self._waiting) > WINDOW_BYTES:
            raise FrameError(f"stream {self._number}: more than was taken")
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting and not self._broken:
                count = os.write(self._fd, self._waiting[:CHUNK_BYTES])
                del self._waiting[:count]
                self._unacknowledged += count
        except BlockingIOError:
            pass
        except OSError:
            # No process reads any more. Discard what still arrives, so that the controller does not wait.
            self._broken = True
        if self._broken:
            self._unacknowledged += len(self._waiting)
            self._waiting.clear()
        if self._unacknowledged and (not self._waiting or self._unacknowledged >= WINDOW_BYTES // 8):
            self._channel.send({"push": "taken", "stream": self._number, "bytes": self._unacknowledged})
            self._unacknowledged = 0
        self._loop.on_writable(self._fd, self._write if self._waiting else None)
        if self._input_ended and not self._waiting:
            self._on_input_end()
            self._on_change()

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1


_OUTPUT_GRACE_S = 0.5
"""Seconds for which processes that a program left behind may still write to its terminal after it ended."""
_CONNECT_TIMEOUT_S = 10.0
_RUN_VARIABLES = (b"CLUSTERCTL_NODE", b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE", b"PYTHONPATH")
"""Variables that mark a process as one of a run. A program beside a rank must not carry them."""


def make_stream_handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of the stream commands."""
    streams = _StreamCommands(session)
    session.add_end_action(streams.close)
    return {
        Command.TERMINAL: streams.terminal,
        Command.RESIZE: streams.resize,
        Command.TUNNEL: streams.tunnel,
        Command.TAKEN: streams.add_window,
    }


class _StreamCommands:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[int, DuplexStream] = {}
        self._terminals: dict[int, int] = {}

    # --- terminals

    def terminal(self, request_id: int, arguments: command_types.TerminalArguments, _epoch: int | None) -> None:
        """Run a program on a terminal; answer with its exit status after its last byte."""
        beside = arguments.get("beside")
        program = (
            self._build_program_beside(beside, arguments)
            if beside
            else build_program(arguments, _terminal_argv(arguments), resolve_folder(arguments.get("cwd")))
        )
        program.env[b"TERM"] = spawn.encode_peer_text(str(arguments["term"]))
        number = int(arguments["stream"])
        controller_fd, program_fd = os.openpty()
        ended: list[int] = []
        try:
            _set_terminal_size(controller_fd, arguments)
            prepare = None if beside else make_python_setup(arguments)
            prepare = prepare if arguments.get("argv") else _make_login_shell_setup(prepare)
            self._session.children.start_on_terminal(
                program_fd, program, lambda status: self._handle_program_end(number, ended, status, answer), prepare
            )
        except BaseException:
            os.close(controller_fd)
            raise
        finally:
            os.close(program_fd)
        answer = functools.partial(self._answer_when_finished, request_id, number, ended)
        self._terminals[number] = controller_fd
        self._open_stream(number, controller_fd, on_input_end=lambda: None, on_change=answer)

    def _handle_program_end(self, number: int, ended: list[int], status: int, answer: Callable[[], None]) -> None:
        ended.append(status)
        answer()
        self._session.loop.after(_OUTPUT_GRACE_S, lambda: self._stop_waiting(number, answer))

    def _stop_waiting(self, number: int, answer: Callable[[], None]) -> None:
        """Stop waiting for processes that keep the terminal open after its program, unless the controller is slow."""
        stream = self._open.get(number)
        if stream is None:
            return
        if stream.is_window_full:
            self._session.loop.after(_OUTPUT_GRACE_S, lambda: self._stop_waiting(number, answer))
            return
        stream.done = True
        answer()

    def _answer_when_finished(self, request_id: int, number: int, ended: list[int]) -> None:
        stream = self._open.get(number)
        if stream is None or not stream.done or not ended:
            return
        self._close_stream(number)
        killed = os.WIFSIGNALED(ended[0])
        code = None if killed else os.WEXITSTATUS(ended[0])
        self._session.answer(request_id, {"exit_code": code, "signal": os.WTERMSIG(ended[0]) if killed else None})

    def _build_program_beside(
        self, rank_arguments: command_types.RankArguments, arguments: command_types.TerminalArguments
    ) -> spawn.Program:
        """Return a program with the folder and the environment of a rank, without the marks of the run."""
        run, rank = self._session.find_run(rank_arguments), int(rank_arguments["rank"])
        started = self._session.journal_states.of(run).started.get(rank)
        process = None if started is None else proc.read_identity(started.pid)
        if started is None or process is None or process.start_time != started.start_time:
            raise RequestError(ErrorKind.NOT_FOUND, f"rank {rank} of run {run.run} is not running here")
        environment = proc.read_environment(process.pid)
        env = {name: value for name, value in environment.items() if name not in _RUN_VARIABLES}
        python_path = [entry for entry in environment.get(b"PYTHONPATH", b"").split(b":") if not inject.is_ours(entry)]
        if any(python_path):
            env[b"PYTHONPATH"] = b":".join(python_path)
        try:
            cwd = os.readlink(f"/proc/{process.pid}/cwd")
        except OSError as error:
            raise RequestError(
                ErrorKind.REFUSED, f"the folder of rank {rank} cannot be read: {error.strerror}"
            ) from error
        argv = [spawn.encode_peer_text(word) for word in _terminal_argv(arguments)]
        return spawn.Program(argv=argv, env=env, cwd=os.fsencode(cwd), tag=child_processes.generate_tag())

    def resize(self, _identity: int, arguments: command_types.ResizeArguments, _epoch: int | None) -> None:
        """Change the size of a terminal; the kernel sends SIGWINCH to its program."""
        controller_fd = self._terminals.get(int(arguments["stream"]))
        if controller_fd is not None:
            with contextlib.suppress(OSError):
                _set_terminal_size(controller_fd, arguments)

    # --- connections

    def tunnel(self, request_id: int, arguments: command_types.TunnelArguments, _epoch: int | None) -> None:
        """Connect to a port; answer once the connection stands or fails.

        Raises:
            RequestError: The host is not an address.
        """
        host, port, number = str(arguments["host"]), int(arguments["port"]), int(arguments["stream"])
        if not addresses.is_ip_address(host):
            raise RequestError(ErrorKind.BAD_REQUEST, f"`{host}` is not an IP address")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop, fd = self._session.loop, connection.fileno()

        def refuse(error: int) -> None:
            connection.close()
            why = f"nothing answers at {host}:{port}: {os.strerror(error)}"
            self._session.answer_error(request_id, RequestError(ErrorKind.REFUSED, why))

        def finish_connecting(error: int) -> None:
            timer.cancel()
            loop.forget(fd)
            if error:
                refuse(error)
                return
            self._session.answer(request_id, {})
            connection.detach()
            self._open_stream(
                number,
                fd,
                on_input_end=lambda: _shut_down_writing(fd),
                on_change=lambda: self._close_if_finished(number),
            )

        timer = loop.after(_CONNECT_TIMEOUT_S, lambda: finish_connecting(errno.ETIMEDOUT))
        error = connection.connect_ex((host, port))
        if error not in (0, errno.EINPROGRESS):
            finish_connecting(error)
            return
        loop.on_writable(fd, lambda: finish_connecting(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))

    def _close_if_finished(self, number: int) -> None:
        stream = self._open.get(number)
        if stream is not None and stream.is_finished:
            self._close_stream(number)

    # --- both

    def _open_stream(
        self, number: int, fd: int, *, on_input_end: Callable[[], None], on_change: Callable[[], None]
    ) -> None:
        stream = DuplexStream(self._session.loop, self._session.channel, number, fd, on_input_end, on_change)
        self._open[number] = stream
        self._session.data_handlers[number] = stream.receive

    def _close_stream(self, number: int) -> None:
        self._terminals.pop(number, None)
        self._session.data_handlers.pop(number, None)
        self._open.pop(number).close()

    def add_window(self, _identity: int, arguments: command_types.TakenArguments, _epoch: int | None) -> None:
        """Allow a stream to send more bytes."""
        stream = self._open.get(int(arguments["stream"]))
        if stream is not None:
            stream.add_window(int(arguments["bytes"]))

    def close(self) -> None:
        """Close all streams; programs on their terminals get SIGHUP."""
        for number in list(self._open):
            self._close_stream(number)


def _terminal_argv(arguments: command_types.TerminalArguments) -> list[str]:
    return [str(word) for word in arguments.get("argv") or ["/bin/sh"]]


def _make_login_shell_setup(prepare: child_processes.PrepareProgram | None) -> child_processes.PrepareProgram:
    """Return a function that makes a program the user's login shell; it may wait for a directory service."""

    def prepare_login_shell(program: spawn.Program) -> spawn.Program:
        program = program if prepare is None else prepare(program)
        with contextlib.suppress(KeyError):
            program.argv[:] = [spawn.encode_peer_text(pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh")]
        return program

    return prepare_login_shell


def _set_terminal_size(fd: int, arguments: command_types.TerminalArguments | command_types.ResizeArguments) -> None:
    size = struct.pack("HHHH", int(arguments["rows"]) & 0xFFFF, int(arguments["columns"]) & 0xFFFF, 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def _shut_down_writing(fd: int) -> None:
    connection = socket.socket(fileno=fd)
    try:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    finally:
        connection.detach()
