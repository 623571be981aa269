"""Nodes behind a child process: `/bin/sh` on this machine, or a command of the user that ends in a shell on a host.

The child has a session of its own and one socket as its standard streams, as under sshd.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import subprocess
import tempfile
import termios
import threading
from collections.abc import Sequence
from typing import IO

from clusterctl import rlimits
from clusterctl.config import value_parsers
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ConnectError
from clusterctl.transport.interfaces import EXEC_COMMAND, STDERR_TAIL_BYTES, Progress, ignore_progress

_EXIT_TIMEOUT_S = 2.0
_MAX_TIMEOUT_S = 1e6


class LocalChannel:
    """The stream to a child process. The agent ends with the stream; a child that does not end is killed.

    Args:
        relays: Whether the child only forwards: data that it has not read when the stream is closed is lost.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, stderr: IO[bytes], *, relays: bool = False
    ) -> None:
        self._relays = relays
        self.login_note: str | None = None
        self.warnings: tuple[str, ...] = ()
        self._process = process
        self._sock = sock
        # A sender has a time limit of its own. Both objects stay non-blocking, because they are one open file.
        self._sender = sock.dup()
        self._stderr = stderr
        self._tail = ""
        self._reading = threading.Lock()
        # A closed descriptor number may belong to another file by the time a thread starts to wait for it.
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closing = threading.Lock()

    @property
    def acknowledged_bytes(self) -> int:
        """Always 0: unknown for a pipe. Little data waits here, so heartbeats suffice."""
        return 0

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        """Send all of `data` (see `Channel.send`)."""
        with self._sending:
            self._sender.settimeout(_MAX_TIMEOUT_S if timeout is None else timeout)
            self._sender.sendall(data)

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        """Return received data (see `Channel.recv`)."""
        with self._receiving:
            try:
                self._sock.settimeout(_MAX_TIMEOUT_S if timeout is None else timeout)
                return self._sock.recv(limit)
            except TimeoutError:
                raise
            except OSError:
                return b""

    def close(self) -> None:
        """Close the stream; reap the child in the background."""
        if not self._closing.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            if self._relays and self._process.poll() is None and count_unsent_bytes(self._sock):
                # A command may outlive its stream for a moment and forward waiting data, but a fence counts from the
                # last data that the node received.
                os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._end, name="clusterctl-local-end", daemon=True).start()

    def _end(self) -> None:
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._receiving:
            self._sock.close()
        with self._sending:
            self._sender.close()
        with self._reading:
            self._tail = self._read_tail()
            self._stderr.close()

    def stderr_tail(self) -> str:
        """Return the end of the child's standard error."""
        with self._reading:
            return self._tail if self._stderr.closed else self._read_tail()

    def _read_tail(self) -> str:
        descriptor = self._stderr.fileno()
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, STDERR_TAIL_BYTES, max(0, size - STDERR_TAIL_BYTES))
        return tail.decode("utf-8", "replace")


def count_unsent_bytes(sock: socket.socket) -> int:
    """Return how many sent bytes the peer (of a local socket: its process) has not received.

    Raises:
        OSError: The socket is broken.
    """
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


class LocalTransport:
    """Reaches nodes by a child process: `/bin/sh` on this machine, or the command of the host in the cluster file.

    Args:
        env: The environment of a local agent; `None` for that of this process.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._env = env

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> LocalChannel:
        """Start `/bin/sh` or the command of `host` (see `Transport.open`)."""
        progress("starting")
        if isinstance(host.transport, tuple):
            # The command must work from any folder, and for a controller that outlives the folder.
            return LocalChannel(*start_child_process(host.name, build_command_argv(host), folder="/"), relays=True)
        return LocalChannel(*start_child_process(host.name, [EXEC_COMMAND], env=self._env))

    def close(self) -> None:
        """Channels share nothing."""


def start_child_process(
    node: str, argv: Sequence[str], *, env: dict[str, str] | None = None, folder: str | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """Start a program in its own session; return the process, our end of its standard streams, and its standard error.

    Raises:
        ConnectError: The program cannot be started.
    """
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the channel
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            argv,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=stderr,
            start_new_session=True,
            env=env,
            cwd=folder,
        )
    except OSError as error:
        ours.close()
        stderr.close()
        text = f"`{argv[0]}` cannot be started: {error.strerror}"
        raise ConnectError(node, text, hint=rlimits.hint_for_too_many_open_files(error)) from error
    finally:
        theirs.close()
    # The child waits for our input and has started nothing yet.
    rlimits.restore_rlimits(process.pid)
    return process, ours, stderr


def build_command_argv(host: HostSpec) -> list[str]:
    """Return the command of a host with its placeholders filled in.

    Raises:
        ConnectError: A placeholder has no value for this host.
    """
    assert isinstance(host.transport, tuple), host.transport
    known = {"host": host.address or host.host, "user": host.user, "port": host.port}
    values = {name: str(value) for name, value in known.items() if value is not None}
    missing = [n for word in host.transport for n in value_parsers.find_placeholders(word) if n not in values]
    if missing:
        text = f"its command names `{{{missing[0]}}}`, and the file does not say it"
        raise ConnectError(host.name, text, hint=f"add `{missing[0]}:` to the host")
    # The cluster file was checked when it was read. Check again, because the result is executed.
    if not value_parsers.is_host_name(values["host"]) or not value_parsers.is_user_name(values.get("user", "x")):
        raise ConnectError(host.name, "its name, address or user cannot be put into a command")
    return [value_parsers.fill_placeholders(word, values) for word in host.transport]


def build_terminal_argv(host: HostSpec, script: str) -> list[str]:
    """Return the command of a host that runs a script on a terminal; the shell at its end gets the script.

    `srun` needs `--pty`; `docker`, `podman` and `kubectl` need `-t` with `-i`. Other commands pass our terminal on.
    """
    program, *words = build_command_argv(host)
    name = os.path.basename(program)
    if name == "srun":
        words = ["--pty", *words]
    elif name in ("docker", "podman", "kubectl"):
        words = ["-it" if word == "-i" else word for word in words]
    return [program, *words, script]
