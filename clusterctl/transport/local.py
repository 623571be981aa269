"""The transport by a child process: `/bin/sh` on this machine, or the user's command that runs a shell on a host.

As under sshd, the child has its own POSIX session, and one socket for its standard streams.
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
    """The byte stream to a child process. The agent ends with the stream. `close` kills a child that does not end.

    Args:
        process: The child process.
        sock: Our end of the child's standard input and output.
        stderr: The file with the child's standard error.
        relays: The child only forwards data to a node. `close` kills such a child if it has unread data.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], sock: socket.socket, stderr: IO[bytes], *, relays: bool = False
    ) -> None:
        self._relays = relays
        self.login_note: str | None = None
        self.host_key: str | None = None
        self.warnings: tuple[str, ...] = ()
        self._process = process
        self._sock = sock
        # Senders need a socket object of their own, because a socket object has only one timeout.
        self._sender = sock.dup()
        self._stderr = stderr
        self._tail = ""
        self._reading = threading.Lock()
        # With these locks, a socket is closed only after all waits on it. Otherwise a waiting thread might use a closed
        # descriptor that now belongs to a new file.
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closing = threading.Lock()

    @property
    def acknowledged_bytes(self) -> int:
        """Always 0, because a socket to a child process does not show what the node has read."""
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
        """Close the stream. A thread waits for the end of the child."""
        if not self._closing.acquire(blocking=False):
            return
        with contextlib.suppress(OSError):
            if self._relays and self._process.poll() is None and count_unsent_bytes(self._sock):
                # The fence of the node counts from the last received data. A command that still forwards unread data
                # after the close would delay the fence.
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
    """Return how many sent bytes the peer has not received yet; for a local socket, how many it has not read yet.

    Raises:
        OSError: The socket is broken.
    """
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0])


class LocalTransport:
    """Connects by a child process: `/bin/sh` on this machine, or the `transport` command of the host.

    Args:
        env: The environment of an agent on this machine; `None` for the environment of this process.
    """

    def __init__(self, env: dict[str, str] | None = None) -> None:
        self._env = env

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> LocalChannel:
        """Start `/bin/sh` or the command of `host` (see `Transport.open`)."""
        progress("starting")
        if isinstance(host.transport, tuple):
            # Start the command in `/`: the present folder may not exist any more when a controller reconnects.
            return LocalChannel(*start_child_process(host.name, build_command_argv(host), folder="/"), relays=True)
        return LocalChannel(*start_child_process(host.name, [EXEC_COMMAND], env=self._env))

    def close(self) -> None:
        """Do nothing, because channels share nothing."""


def start_child_process(
    node: str, argv: Sequence[str], *, env: dict[str, str] | None = None, folder: str | None = None
) -> tuple[subprocess.Popen[bytes], socket.socket, IO[bytes]]:
    """Start a program in a new POSIX session.

    Returns:
        The process, our end of its standard input and output, and the file with its standard error.

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
    # The child still waits for input and has started no other process.
    rlimits.restore_rlimits(process.pid)
    return process, ours, stderr


def build_command_argv(host: HostSpec) -> list[str]:
    """Return the `transport` command of a host with values for its placeholders.

    Raises:
        ConnectError: A placeholder has no value for this host.
    """
    assert isinstance(host.transport, tuple), host.transport
    known = {"host": host.address or host.host, "user": host.user, "port": host.port}
    values = {name: str(value) for name, value in known.items() if value is not None}
    missing = [n for word in host.transport for n in value_parsers.find_placeholders(word) if n not in values]
    if missing:
        text = f"its `transport` command contains `{{{missing[0]}}}`, but the cluster file does not set it"
        raise ConnectError(host.name, text, hint=f"add `{missing[0]}:` to the host")
    # These values were checked with the cluster file, and are checked again, because the command is executed.
    if not value_parsers.is_host_name(values["host"]) or not value_parsers.is_user_name(values.get("user", "x")):
        raise ConnectError(host.name, "its name, address or user contains characters that are not allowed in a command")
    return [value_parsers.fill_placeholders(word, values) for word in host.transport]


def build_terminal_argv(host: HostSpec, script: str) -> list[str]:
    """Return the `transport` command of a host, with a script as its last argument, for use on a terminal.

    `srun` needs `--pty` for a terminal; `docker`, `podman` and `kubectl` need `-t` with `-i`.
    """
    program, *words = build_command_argv(host)
    name = os.path.basename(program)
    if name == "srun":
        words = ["--pty", *words]
    elif name in ("docker", "podman", "kubectl"):
        words = ["-it" if word == "-i" else word for word in words]
    return [program, *words, script]
