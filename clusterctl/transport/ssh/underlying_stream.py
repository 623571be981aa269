"""The byte stream below SSH: a TCP socket, or the standard streams of a proxy command. Every wait has a time limit."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from clusterctl import rlimits
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ConnectError, NodeError
from clusterctl.transport.local import count_unsent_bytes, start_child_process
from clusterctl.transport.ssh.ssh_options import (
    CONFIG_VARIABLE,
    Destination,
    SshOptions,
    get_destination,
    resolve_options,
)

_READ_BYTES = 256 << 10
_TICK_SECONDS = 1.0
_USER_TIMEOUT_MS = 20_000
_MIN_ATTEMPT_S = 2.0
_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}


class BufferedStream:
    """The byte stream that paramiko uses.

    The stream reads large pieces, because paramiko asks for a few bytes at a time. An idle connection wakes up
    once a second; paramiko's own stream would wake up ten times a second.
    """

    def __init__(self, stream: Any, ended: Callable[[], None] | None = None) -> None:
        self._stream = stream
        self._ended = ended
        self._buffer = b""
        self._position = 0
        self._closed = False  # paramiko reads this attribute when the process ends.
        stream.settimeout(_TICK_SECONDS)

    def recv(self, limit: int) -> bytes:
        """Return up to `limit` bytes; `b""` at the end."""
        if self._position >= len(self._buffer):
            self._buffer = self._stream.recv(_READ_BYTES)
            self._position = 0
        part = self._buffer[self._position : self._position + limit]
        self._position += len(part)
        return part

    def send(self, data: bytes) -> int:
        """Send a part of `data`; return the number of sent bytes."""
        return int(self._stream.send(data))

    def settimeout(self, _seconds: float) -> None:
        """Ignore the timeout of paramiko."""

    def close(self) -> None:
        """Close the stream and wake its waiting threads."""
        self._closed = True
        # A closed stream has no descriptor, so the calls below raise ValueError.
        with contextlib.suppress(OSError, EOFError, AttributeError, ValueError):
            # Discard unsent data: a peer that received it long after the close would treat it as a heartbeat.
            if count_unsent_bytes(self._stream):
                self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError, EOFError):
            self._stream.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError, EOFError):
            self._stream.close()
        ended, self._ended = self._ended, None
        if ended:
            ended()


class Watchdog:
    """A context manager that closes a stream at a deadline of the monotonic clock, which ends all waits on it."""

    def __init__(self, wire: BufferedStream, deadline: float) -> None:
        self.expired = False
        self._wire = wire
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._expire)
        self._timer.daemon = True

    def __enter__(self) -> Watchdog:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _expire(self) -> None:
        self.expired = True
        self._wire.close()


def open_stream(node: str, options: SshOptions, deadline: float) -> BufferedStream:
    """Return a stream to the SSH port in `options`: through the proxy command, or directly.

    Raises:
        ConnectError: No connection was possible before `deadline`.
    """
    if options.proxy_command:
        return _open_proxy_command(node, options.proxy_command)
    return BufferedStream(_connect(node, options, deadline))


def _connect(node: str, options: SshOptions, deadline: float) -> socket.socket:
    addresses = _resolve_addresses(node, options, deadline)
    for index, (family, address) in enumerate(addresses):
        left = deadline - time.monotonic()
        is_last = index == len(addresses) - 1
        try:
            timeout = left if is_last else min(left, max(_MIN_ATTEMPT_S, left / 2))
            return _open(node, family, address, timeout, options.bind_address)
        except OSError as error:
            if is_last:
                raise make_connect_error(node, error, options.port) from error
        except ConnectError:
            if is_last:
                raise
    raise AssertionError("no addresses")


def _open(node: str, family: int, address: Any, timeout: float, bind: str | None) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if bind is not None:
            try:
                sock.bind(socket.getaddrinfo(bind, 0, family, socket.SOCK_STREAM)[0][4])
            except OSError as error:
                text = f"`BindAddress {bind}` is no address of this machine that can connect to the node"
                raise ConnectError(node, text, hint="correct it in ssh_config") from error
        sock.settimeout(max(0.001, timeout))
        sock.connect(address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _USER_TIMEOUT_MS)
    except BaseException:
        sock.close()
        raise
    return sock


def _resolve_addresses(node: str, options: SshOptions, deadline: float) -> list[tuple[int, Any]]:
    look_up = functools.partial(
        socket.getaddrinfo, options.hostname, options.port, _FAMILIES[options.address_family], socket.SOCK_STREAM
    )
    with contextlib.suppress(OSError, UnicodeError):
        return [(family, address) for family, _, _, _, address in look_up(flags=socket.AI_NUMERICHOST)]
    # The resolver has no timeout, so it runs on a thread. If the thread hangs, it is abandoned.
    answers: queue.SimpleQueue[list[Any] | OSError] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(look_up())
        except (OSError, UnicodeError) as error:
            answers.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, name="clusterctl-resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=max(0.001, deadline - time.monotonic()))
    except queue.Empty as error:
        raise ConnectError(node, "the name server did not resolve its host name in time") from error
    if isinstance(answer, OSError) and options.address_family != "any":
        hint = f"see `AddressFamily {options.address_family}` in ssh_config"
        raise ConnectError(node, "no address of this family, or host name cannot be resolved", hint=hint) from answer
    if isinstance(answer, OSError):
        hint = "check the spelling, or set `address:` in the cluster file or `HostName` in ~/.ssh/config"
        raise ConnectError(node, "host name cannot be resolved", hint=hint) from answer
    return [(family, address) for family, _, _, _, address in answer]


def make_connect_error(node: str, error: OSError, port: int) -> ConnectError:
    """Return the error for a failed TCP connection, with the remedy."""
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return ConnectError(node, f"no answer on port {port}", hint="is the machine up, or does a firewall block SSH?")
    if isinstance(error, ConnectionRefusedError):
        hint = "does sshd run there? if it uses another port, set `port:`"
        return ConnectError(node, f"connection refused on port {port}", hint=hint)
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        hint = "is the machine up, and is this machine on its network? a `proxy_jump:` may be needed"
        return ConnectError(node, "no route to host", hint=hint)
    return ConnectError(
        node, f"cannot connect: {error.strerror or error}", hint=rlimits.hint_for_too_many_open_files(error)
    )


def _open_proxy_command(node: str, command: str) -> BufferedStream:
    """Run a proxy command in `/bin/sh`, with one socket for its standard streams."""
    process, ours, stderr = start_child_process(node, ["/bin/sh", "-c", f"exec {command}"])
    stderr.close()

    def end() -> None:
        process.terminate()
        threading.Thread(target=process.wait, name="clusterctl-proxy-end", daemon=True).start()

    return BufferedStream(ours, end)


class PreDialer:
    """Resolves hosts and opens TCP connections to their SSH port in advance, while paramiko is being imported.

    The import takes tenths of a second; meanwhile the machines start the sshd process for the connection. Each result,
    also an error, is used only once, so that no result is outdated.

    Args:
        config_file: Path of a file that replaces the user's ssh_config; `None` for `CLUSTERCTL_SSH_CONFIG`, if set.
    """

    def __init__(self, config_file: str | None = None) -> None:
        self.config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
        self._lock = threading.Lock()
        self._options: dict[tuple[str, Destination], SshOptions | NodeError] = {}
        self._wires: dict[tuple[str, SshOptions], BufferedStream | NodeError] = {}
        self._closed = False

    def prefetch(self, host: HostSpec, timeout: float) -> None:
        """Resolve `host`, and connect to it if it needs no jump host and no proxy command.

        Errors are stored, and raised when the result is used.

        Args:
            host: The host.
            timeout: Time limit of the connection in seconds.
        """
        deadline = time.monotonic() + timeout
        destination = get_destination(host)
        try:
            options = resolve_options(host.name, destination, config_file=self.config_file)
        except NodeError as error:
            self._options[host.name, destination] = error
            return
        self._options[host.name, destination] = options
        if options.proxy_jump or options.proxy_command:
            return
        found: BufferedStream | NodeError
        try:
            found = open_stream(host.name, options, deadline)
        except NodeError as error:
            found = error
        with self._lock:
            if not self._closed:
                self._wires[host.name, options] = found
                return
        if isinstance(found, BufferedStream):
            found.close()

    def resolve_options(self, node: str, destination: Destination) -> SshOptions:
        """Return the ssh_config of `destination`.

        Raises:
            ConnectError: ssh_config is invalid, or the name of the host is not allowed.
        """
        options = self._options.pop((node, destination), None)
        if isinstance(options, NodeError):
            raise options
        return options or resolve_options(node, destination, config_file=self.config_file)

    def list_user_known_hosts(self, node: str, destination: Destination) -> tuple[str, ...]:
        """Return the known-hosts files that ssh_config names for a host, without the settings of the cluster file.

        Raises:
            ConnectError: ssh_config is invalid.
        """
        alone = Destination(host=destination.host)
        return resolve_options(node, alone, config_file=self.config_file).user_known_hosts

    def open_predialed_stream(self, node: str, options: SshOptions, deadline: float) -> BufferedStream:
        """Return a stream to the SSH port in `options` (see `open_stream`)."""
        with self._lock:
            held = self._wires.pop((node, options), None)
        if isinstance(held, NodeError):
            raise held
        return held or open_stream(node, options, deadline)

    def close(self) -> None:
        """Close unused connections."""
        with self._lock:
            self._closed = True
            left = list(self._wires.values())
            self._wires.clear()
        for stream in left:
            if isinstance(stream, BufferedStream):
                stream.close()
