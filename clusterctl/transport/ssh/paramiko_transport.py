"""The built-in SSH client, based on paramiko. It translates paramiko's exceptions into errors of nodes.

Each wait ends at the time limit of the connection: then a watchdog closes the socket.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import cast

import paramiko

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import AuthError, ConnectError, HostKeyError, NodeError
from clusterctl.transport.interfaces import (
    EXEC_COMMAND,
    SEND_DEADLINE_FACTOR,
    STDERR_TAIL_BYTES,
    Progress,
    ignore_progress,
)
from clusterctl.transport.ssh.host_keys import HostKeyChecker, PresentedKey, UntrustedKeyError
from clusterctl.transport.ssh.known_hosts import HostKey
from clusterctl.transport.ssh.login import LoginKeys, log_in
from clusterctl.transport.ssh.login_errors import NoCommonAlgorithmError
from clusterctl.transport.ssh.ssh_options import (
    Destination,
    SshOptions,
    filter_algorithms,
    get_destination,
    split_last_jump_host,
)
from clusterctl.transport.ssh.underlying_stream import BufferedStream, PreDialer, Watchdog

_OFFERED = {
    # GCM is first: it encrypts and authenticates in one pass, at half the cost of a cipher with a digest.
    "Ciphers": ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr", "aes192-ctr"),
    "MACs": ("hmac-sha2-256-etm@openssh.com", "hmac-sha2-256", "hmac-sha2-512-etm@openssh.com", "hmac-sha2-512"),
    "KexAlgorithms": (
        *("mlkem768x25519-sha256", "curve25519-sha256@libssh.org"),
        *("ecdh-sha2-nistp256", "ecdh-sha2-nistp384", "ecdh-sha2-nistp521"),
        *("diffie-hellman-group16-sha512", "diffie-hellman-group-exchange-sha256", "diffie-hellman-group14-sha256"),
    ),
    "HostKeyAlgorithms": (
        *("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
        *("rsa-sha2-512", "rsa-sha2-256"),
    ),
}
_WINDOW = 8 << 20
_PACKET = 32 << 10
_TICK_SECONDS = 1.0
_ATTEMPTS = 5
_BACKOFF_SECONDS = 0.25
_FORBIDDEN = 1

logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").setLevel(logging.CRITICAL + 1)


class _DroppedError(Exception):
    """The server closed the connection before the encryption began, as a busy server does.

    Another attempt may succeed.
    """


@dataclass
class _Link:
    """An encrypted connection. Channels can be opened on it after the login."""

    transport: paramiko.Transport
    wire: BufferedStream
    environment: tuple[tuple[str, str], ...] = ()
    login_note: str | None = None
    warnings: list[str] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        return self.transport.is_active()

    def close(self) -> None:
        self.wire.close()


class JumpConnections:
    """Connections to jump hosts, shared by all nodes behind them. The first caller connects; later callers wait.

    The number of concurrent connections is not limited, because under a limit dead machines would delay other machines.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[str, Future[_Link]] = {}
        self._closed = False

    def get(self, name: str, connect: Callable[[], _Link], deadline: float) -> _Link:
        """Return the open connection to a jump host; open it if necessary.

        Args:
            name: The chain of jump hosts, as text.
            connect: Opens the connection. All waiting callers get the exception of `connect`, and the next caller tries
                again.
            deadline: Time limit on the monotonic clock.

        Raises:
            TimeoutError: The attempt of another caller did not end before `deadline`.
        """
        with self._lock:
            if self._closed:
                raise ConnectionError("closed")
            future = self._found.get(name)
            mine = future is None or (future.done() and not _live_connection(future))
            if mine:
                future = self._found[name] = Future()
        assert future is not None
        if mine:
            try:
                future.set_result(connect())
            except BaseException as error:
                future.set_exception(error)
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except FutureTimeoutError as error:
            raise TimeoutError from error

    def close(self) -> None:
        """Close all connections and refuse new ones."""
        with self._lock:
            self._closed = True
            hops = list(self._found.values())
        for future in hops:
            if future.done() and _live_connection(future):
                future.result().close()


def _live_connection(future: Future[_Link]) -> bool:
    return future.exception() is None and future.result().alive


class SshChannel:
    """The stream to `/bin/sh` on a node, over its own SSH connection."""

    def __init__(self, link: _Link, channel: paramiko.Channel) -> None:
        self.login_note = link.login_note
        self.host_key: str | None = _shown_key(link).fingerprint
        self.warnings = tuple(link.warnings)
        self._link = link
        self._channel = channel
        self._stderr: deque[bytes] = deque(maxlen=64)
        self._sent = 0
        channel.settimeout(_TICK_SECONDS)

    @property
    def acknowledged_bytes(self) -> int:
        """Sent bytes plus bytes that the peer's window still allows: the sum grows when the peer reads data."""
        return self._sent + self._channel.out_window_size

    def send(self, data: bytes, *, timeout: float | None = None) -> None:
        """Send all of `data` (see `Channel.send`)."""
        began = time.monotonic()
        deadline = math.inf if timeout is None else began + timeout
        position = 0
        while position < len(data):
            try:
                sent = self._channel.send(data[position : position + _PACKET])
            except TimeoutError:
                if time.monotonic() >= deadline:
                    raise
                continue
            except (paramiko.SSHException, EOFError) as error:
                raise ConnectionError(f"connection lost: {error}") from error
            if sent == 0:
                raise ConnectionError("connection lost")
            position += sent
            # Counting after sending makes the number too low for a moment, never too high.
            self._sent += sent
            if timeout is not None:
                # Each accepted byte extends the time limit, up to a maximum.
                deadline = min(time.monotonic() + timeout, began + SEND_DEADLINE_FACTOR * timeout)
                if time.monotonic() >= began + SEND_DEADLINE_FACTOR * timeout:
                    raise TimeoutError(f"the peer did not read all data within {SEND_DEADLINE_FACTOR * timeout:g}s")

    def recv(self, limit: int, *, timeout: float | None = None) -> bytes:
        """Return received data (see `Channel.recv`)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._drain_stderr()
            try:
                return self._channel.recv(limit)
            except TimeoutError:
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def close(self) -> None:
        """Close the connection, which also ends paramiko's thread."""
        self._link.close()

    def stderr_tail(self) -> str:
        """Return the end of standard error."""
        self._drain_stderr()
        return b"".join(self._stderr)[-STDERR_TAIL_BYTES:].decode("utf-8", "replace")

    def _drain_stderr(self) -> None:
        # Unread data of standard error uses up the window, which would finally block standard output.
        while self._channel.recv_stderr_ready():
            self._stderr.append(self._channel.recv_stderr(_PACKET)[-STDERR_TAIL_BYTES:])


class SshTransport:
    """Connects to nodes by SSH, and follows the user's ssh_config like `ssh`.

    Args:
        spec: The `ssh` section of the cluster file: time limit, policy and known-hosts files.
        config_file: Path of a file that replaces the user's ssh_config; `None` for `CLUSTERCTL_SSH_CONFIG`, if set.
        predialer: Holds connections that were opened in advance.
    """

    def __init__(self, spec: SshSpec, *, config_file: str | None = None, predialer: PreDialer | None = None) -> None:
        self._spec = spec
        self._predialer = predialer or PreDialer(config_file)
        self._host_keys = HostKeyChecker(spec, self._predialer.list_user_known_hosts)
        self._jumps = JumpConnections()
        self._keys = LoginKeys()

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> SshChannel:
        """Connect, log in and run `/bin/sh` on `host` (see `Transport.open`)."""
        progress("connecting")
        deadline = time.monotonic() + self._spec.connect_timeout
        link = self._connect(host.name, get_destination(host), deadline, progress=progress)
        with Watchdog(link.wire, deadline) as watchdog:
            try:
                channel = link.transport.open_session(_WINDOW, _PACKET, timeout=self._spec.connect_timeout)
                for name, value in link.environment:
                    channel.set_environment_variable(os.fsencode(name), os.fsencode(value))
                channel.exec_command(EXEC_COMMAND)
            except (paramiko.SSHException, EOFError, OSError) as error:
                link.close()
                raise _shell_error(host.name, error, expired=watchdog.expired) from error
        return SshChannel(link, channel)

    def fetch_host_key(self, host: HostSpec) -> PresentedKey:
        """Return the host key that `host` presents, without a login on this host.

        Raises:
            NodeError: The connection failed, or a jump host is not trusted.
        """
        deadline = time.monotonic() + self._spec.connect_timeout
        destination = get_destination(host)
        options = self._predialer.resolve_options(host.name, destination)
        link = self._secure_with_retries(host.name, options, deadline, ())
        key = _shown_key(link)
        link.close()
        return self._host_keys.inspect(host.name, destination, options, key)

    def close(self) -> None:
        """Close the connections to jump hosts."""
        self._predialer.close()
        self._jumps.close()

    def _connect(
        self,
        node: str,
        destination: Destination,
        deadline: float,
        *,
        path: tuple[str, ...] = (),
        progress: Progress = ignore_progress,
    ) -> _Link:
        """Open an encrypted connection and log in.

        `path` contains the chains of jump hosts that wait for this connection.
        """
        options = self._predialer.resolve_options(node, destination)
        link = self._secure_with_retries(node, options, deadline, path)
        try:
            warning = self._host_keys.check(node, destination, options, _shown_key(link))
            progress("logging in")
            with Watchdog(link.wire, deadline) as watchdog:
                link.login_note = log_in(node, link.transport, options, self._keys, watchdog)
        except BaseException:
            link.close()
            raise
        if warning:
            link.warnings.append(warning)
        return link

    def _secure_with_retries(self, node: str, options: SshOptions, deadline: float, path: tuple[str, ...]) -> _Link:
        """Open an encrypted connection. Try again if the server is too busy (MaxStartups, PerSourcePenalties)."""
        for attempt in range(_ATTEMPTS):
            try:
                return self._secure(node, options, deadline, path)
            except _DroppedError as error:
                pause = _BACKOFF_SECONDS * 2**attempt * random.uniform(0.75, 1.25)
                if attempt == _ATTEMPTS - 1 or time.monotonic() + pause >= deadline:
                    hint = "too many connections at once (MaxStartups), or sshd refuses this machine for a while; wait"
                    raise ConnectError(node, "sshd closes the connection at once", hint=hint) from error
                time.sleep(pause)
        raise AssertionError("unreachable")

    def _secure(self, node: str, options: SshOptions, deadline: float, path: tuple[str, ...]) -> _Link:
        chosen = {option: filter_algorithms(node, options, option, offered) for option, offered in _OFFERED.items()}
        chosen["HostKeyAlgorithms"] = self._host_keys.order_algorithms(options, chosen["HostKeyAlgorithms"])
        wire = self._wire(node, options, deadline, path)
        with Watchdog(wire, deadline) as watchdog:
            try:
                transport = paramiko.Transport(cast("str", wire), _WINDOW, _PACKET)
                limit = self._spec.connect_timeout
                transport.banner_timeout = transport.auth_timeout = transport.handshake_timeout = limit
                security = transport.get_security_options()
                security.ciphers, security.digests = chosen["Ciphers"], chosen["MACs"]
                security.kex, security.key_types = chosen["KexAlgorithms"], chosen["HostKeyAlgorithms"]
                secured = threading.Event()
                transport.start_client(event=secured)
                secured.wait()
                if not transport.is_active():
                    raise transport.get_exception() or EOFError()
            except (paramiko.SSHException, EOFError, OSError) as error:
                wire.close()
                if watchdog.expired:
                    hint = "sshd accepts connections but does not answer; is the machine overloaded?"
                    raise ConnectError(node, "connected, but no answer from sshd", hint=hint) from error
                raise _handshake_error(node, error) from error
        return _Link(transport, wire, options.environment)

    def _wire(self, node: str, options: SshOptions, deadline: float, path: tuple[str, ...]) -> BufferedStream:
        if not options.proxy_jump:
            return self._predialer.open_predialed_stream(node, options, deadline)
        name, hop = split_last_jump_host(node, options, path)
        last, inner = options.proxy_jump[-1], (*path, name)
        try:
            link = self._jumps.get(name, lambda: self._connect(last, hop, deadline, path=inner), deadline)
        except NodeError as error:
            raise _of_jump(node, last, error) from error
        except OSError as error:
            raise ConnectError(node, f"jump host `{last}`: not connected in time") from error
        return _through(node, link, last, options, deadline)


def _through(node: str, link: _Link, hop: str, options: SshOptions, deadline: float) -> BufferedStream:
    left = max(0.1, deadline - time.monotonic())
    target = (options.hostname, options.port)
    try:
        channel = link.transport.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=left)
    except paramiko.ChannelException as error:
        raise _jump_error(node, hop, error) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise ConnectError(node, f"jump host `{hop}`: no answer from the node behind it") from error
    return BufferedStream(channel)


def _shown_key(link: _Link) -> HostKey:
    key = link.transport.get_remote_server_key()
    return HostKey(key.get_name(), key.asbytes())


# --- Exceptions of paramiko


def _handshake_error(node: str, error: Exception) -> NodeError | _DroppedError:
    text = str(error)
    if isinstance(error, paramiko.ssh_exception.IncompatiblePeer):
        if "host key" in text:
            hint = "it may be too old (SHA-1 RSA only): update it, or add a key there with `ssh-keygen -A`"
            return HostKeyError(node, "sshd offers no host key of a type that is still accepted", hint=hint)
        hint = "its sshd is too old, or restricted to algorithms that are not supported"
        return NoCommonAlgorithmError(node, f"no common SSH algorithm: {text}", hint=hint)
    if isinstance(error, EOFError | OSError) or "protocol banner" in text:
        return _DroppedError(text)
    if "protocol version" in text or "Invalid SSH banner" in text:
        return ConnectError(node, "the program at this port is not sshd", hint="check `port:`")
    return ConnectError(node, f"the connection cannot be encrypted: {text}")


def _shell_error(node: str, error: Exception, *, expired: bool) -> ConnectError:
    if expired:
        return ConnectError(node, "logged in, but no shell started in time", hint="is the home folder reachable?")
    if isinstance(error, paramiko.ChannelException):
        hint = "sshd allows no session here (MaxSessions 0, or the account may only forward)"
        return ConnectError(node, "logged in, but sshd opens no session", hint=hint)
    return ConnectError(node, "logged in, but the connection was closed", hint="see sshd's log on the machine")


def _of_jump(node: str, hop: str, error: NodeError) -> NodeError:
    """Return an error of a jump host as an error of the node behind it."""
    text = f"jump host `{hop}`: {error}"
    if isinstance(error, UntrustedKeyError):
        return error
    kind = next((kind for kind in (AuthError, HostKeyError) if isinstance(error, kind)), ConnectError)
    return kind(node, text, hint=error.hint)


def _jump_error(node: str, hop: str, error: paramiko.ChannelException) -> ConnectError:
    if error.code == _FORBIDDEN:
        hint = "set `AllowTcpForwarding yes` in its sshd_config"
        return ConnectError(node, f"jump host `{hop}` does not allow forwarding", hint=hint)
    hint = "is the machine up, and can the jump host reach it?"
    return ConnectError(node, f"jump host `{hop}` cannot connect to the node: {error.text.lower()}", hint=hint)
