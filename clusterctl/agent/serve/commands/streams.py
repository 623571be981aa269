"""Terminals and connections on this machine, whose bytes go both ways through a controller."""

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
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.protocol.request_errors import RequestError
from clusterctl.agent.serve import jobs
from clusterctl.agent.serve.commands.node import folder_of, in_job, program_of
from clusterctl.agent.serve.duplex import Duplex

if TYPE_CHECKING:
    from typing import Callable

    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.serve.session import Handler, Session

_LAST_BYTES_SECONDS = 0.5
"""After the end of a program, how long something that it left behind may still write at its terminal."""
_CONNECT_SECONDS = 10.0
_NOT_INHERITED = (b"CLUSTERCTL_NODE", b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE", b"PYTHONPATH")
"""What makes a process one of a run: whoever looks on beside a rank must not be counted, nor ended, as one."""


def handlers(session: Session) -> dict[Command, Handler]:
    """Return the handlers of these commands."""
    streams = _Streams(session)
    session.at_end(streams.close)
    return {
        Command.TERMINAL: streams.terminal,
        Command.RESIZE: streams.resize,
        Command.TUNNEL: streams.tunnel,
        Command.TAKEN: streams.taken,
    }


class _Streams:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: dict[int, Duplex] = {}
        self._terminals: dict[int, int] = {}

    # --- terminals

    def terminal(self, identity: int, asked: command_types.TerminalArguments, _epoch: int | None) -> None:
        """Run a program at a terminal; answer how it ended, after its last byte."""
        beside = asked.get("beside")
        program = (
            self._beside(beside, asked) if beside else program_of(asked, _argv(asked), folder_of(asked.get("cwd")))
        )
        program.env[b"TERM"] = spawn.encode(str(asked["term"]))
        number = int(asked["stream"])
        ours, theirs = os.openpty()
        ended: list[int] = []
        try:
            _set_size(ours, asked)
            settle = None if beside else in_job(asked)
            settle = settle if asked.get("argv") else _with_login_shell(settle)
            self._session.jobs.run_at(
                theirs, program, lambda status: self._ended(number, ended, status, answer), settle
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        answer = functools.partial(self._answer, identity, number, ended)
        self._terminals[number] = ours
        self._begin(number, ours, shut=lambda: None, changed=answer)

    def _ended(self, number: int, ended: list[int], status: int, answer: Callable[[], None]) -> None:
        ended.append(status)
        answer()
        self._session.loop.after(_LAST_BYTES_SECONDS, lambda: self._give_up(number, answer))

    def _give_up(self, number: int, answer: Callable[[], None]) -> None:
        """Wait no longer for something that was left behind with the terminal open; but for the controller we do."""
        stream = self._open.get(number)
        if stream is None:
            return
        if stream.held_back:
            self._session.loop.after(_LAST_BYTES_SECONDS, lambda: self._give_up(number, answer))
            return
        stream.done = True
        answer()

    def _answer(self, identity: int, number: int, ended: list[int]) -> None:
        stream = self._open.get(number)
        if stream is None or not stream.done or not ended:
            return
        self._end(number)
        killed = os.WIFSIGNALED(ended[0])
        code = None if killed else os.WEXITSTATUS(ended[0])
        self._session.answer(identity, {"exit_code": code, "signal": os.WTERMSIG(ended[0]) if killed else None})

    def _beside(self, of: command_types.RankArguments, asked: command_types.TerminalArguments) -> spawn.Program:
        """Return a program that finds what a rank found: its folder and its environment."""
        run, rank = self._session.known_run(of), int(of["rank"])
        started = self._session.states.of(run).started.get(rank)
        who = None if started is None else proc.identify(started.pid)
        if started is None or who is None or who.start_time != started.start_time:
            raise RequestError(ErrorKind.NOT_FOUND, f"rank {rank} of run {run.run} is not running here")
        environment = proc.environ(who.pid)
        env = {name: value for name, value in environment.items() if name not in _NOT_INHERITED}
        others = [entry for entry in environment.get(b"PYTHONPATH", b"").split(b":") if not inject.is_ours(entry)]
        if any(others):
            env[b"PYTHONPATH"] = b":".join(others)
        try:
            cwd = os.readlink(f"/proc/{who.pid}/cwd")
        except OSError as error:
            raise RequestError(ErrorKind.REFUSED, f"rank {rank} cannot be looked into: {error.strerror}") from error
        argv = [spawn.encode(word) for word in _argv(asked)]
        return spawn.Program(argv=argv, env=env, cwd=os.fsencode(cwd), tag=jobs.fresh_tag())

    def resize(self, _identity: int, asked: command_types.ResizeArguments, _epoch: int | None) -> None:
        """Let a terminal have another size; its program hears SIGWINCH from the kernel."""
        ours = self._terminals.get(int(asked["stream"]))
        if ours is not None:
            with contextlib.suppress(OSError):
                _set_size(ours, asked)

    # --- connections

    def tunnel(self, identity: int, asked: command_types.TunnelArguments, _epoch: int | None) -> None:
        """Connect to a port; answer once that is done.

        Raises:
            RequestError: The host is no address.
        """
        host, port, number = str(asked["host"]), int(asked["port"]), int(asked["stream"])
        if not addresses.is_literal(host):
            raise RequestError(ErrorKind.BAD_REQUEST, f"`{host}` is no address")
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop, fd = self._session.loop, connection.fileno()

        def refuse(error: int) -> None:
            connection.close()
            why = f"nothing answers at {host}:{port}: {os.strerror(error)}"
            self._session.answer_error(identity, RequestError(ErrorKind.REFUSED, why))

        def decided(error: int) -> None:
            timer.cancel()
            loop.forget(fd)
            if error:
                refuse(error)
                return
            self._session.answer(identity, {})
            connection.detach()
            self._begin(number, fd, shut=lambda: _shut(fd), changed=lambda: self._end_if_over(number))

        timer = loop.after(_CONNECT_SECONDS, lambda: decided(errno.ETIMEDOUT))
        first = connection.connect_ex((host, port))
        if first not in (0, errno.EINPROGRESS):
            decided(first)
            return
        loop.on_writable(fd, lambda: decided(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)))

    def _end_if_over(self, number: int) -> None:
        stream = self._open.get(number)
        if stream is not None and stream.over:
            self._end(number)

    # --- both

    def _begin(self, number: int, fd: int, *, shut: Callable[[], None], changed: Callable[[], None]) -> None:
        stream = Duplex(self._session.loop, self._session.channel, number, fd, shut, changed)
        self._open[number] = stream
        self._session.data_handlers[number] = stream.take

    def _end(self, number: int) -> None:
        self._terminals.pop(number, None)
        self._session.data_handlers.pop(number, None)
        self._open.pop(number).close()

    def taken(self, _identity: int, asked: command_types.TakenArguments, _epoch: int | None) -> None:
        """Let a stream go on."""
        stream = self._open.get(int(asked["stream"]))
        if stream is not None:
            stream.taken(int(asked["bytes"]))

    def close(self) -> None:
        """End all of them; who has such a terminal hears SIGHUP."""
        for number in list(self._open):
            self._end(number)


def _argv(asked: command_types.TerminalArguments) -> list[str]:
    return [str(word) for word in asked.get("argv") or ["/bin/sh"]]


def _with_login_shell(settle: jobs.Settle | None) -> jobs.Settle:
    """Return what lets a program be the login shell of this user; a directory server that is asked may not answer."""

    def settled(program: spawn.Program) -> spawn.Program:
        program = program if settle is None else settle(program)
        with contextlib.suppress(KeyError):
            program.argv[:] = [spawn.encode(pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh")]
        return program

    return settled


def _set_size(fd: int, asked: command_types.TerminalArguments | command_types.ResizeArguments) -> None:
    size = struct.pack("HHHH", int(asked["rows"]) & 0xFFFF, int(asked["columns"]) & 0xFFFF, 0, 0)
    fcntl.ioctl(fd, termios.TIOCSWINSZ, size)


def _shut(fd: int) -> None:
    connection = socket.socket(fileno=fd)
    try:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
    finally:
        connection.detach()
