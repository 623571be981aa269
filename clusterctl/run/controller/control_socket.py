"""The socket of the controller, on which commands of the same user send requests and wait for changes of the run.

Both sides send one JSON object per line. After `watch`, a connection gets an empty line after one or several changes.
The address is an abstract unix address: it leaves no file, and the path of the run directory may have any length. The
address is random, so that no other process can listen on it first. Both sides check the uid of the peer.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from clusterctl.agent.linux import syscalls
from clusterctl.errors import ClusterctlError
from clusterctl.run.record.rundir import RunDir

_LINE_LIMIT = 16 * 1024 * 1024
_ACCEPT_AGAIN = 0.1


class NoControllerError(ClusterctlError):
    """This machine has no controller of the run: the run is over or unattended, or controlled from another machine."""


class SilentControllerError(NoControllerError):
    """The controller does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """A request of a command to the controller; any thread may call `reply`, once."""

    command: str
    arguments: dict[str, Any]
    reply: Callable[[dict[str, Any]], None]


class ControlServer:
    """Accepts requests for the controller from processes of the same user.

    Thread: any; a lock guards the watchers.

    Args:
        address: The abstract unix address on which to listen.
        deliver: The function to call with each request, in a thread of the server.
    """

    def __init__(self, address: str, deliver: Callable[[ControlRequest], None]) -> None:
        self._deliver = deliver
        self._watchers: set[socket.socket] = set()
        self._guard = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def notify_watchers(self) -> None:
        """Send an empty line to every watcher that has read its last line."""
        with self._guard:
            for watcher in list(self._watchers):
                try:
                    watcher.send(b"\n", socket.MSG_DONTWAIT)
                except BlockingIOError:
                    continue
                except OSError:
                    self._forget(watcher)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._guard:
            for watcher in list(self._watchers):
                self._forget(watcher)

    def _forget(self, watcher: socket.socket) -> None:
        self._watchers.discard(watcher)
        with contextlib.suppress(OSError):
            watcher.shutdown(socket.SHUT_RDWR)
        watcher.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # The error is temporary: the peer closed the connection, or there is no free descriptor.
                self._closed.wait(_ACCEPT_AGAIN)
                continue
            if syscalls.read_peer_credentials(connection)[1] != os.getuid():
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="control-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        lock = threading.Lock()

        def reply(answer: dict[str, Any]) -> None:
            with lock, contextlib.suppress(OSError):
                connection.sendall(json.dumps(answer).encode() + b"\n")

        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in iter(lambda: lines.readline(_LINE_LIMIT), b""):
                message = json.loads(line)
                if message["command"] == "watch":
                    self._watch(connection)
                    continue
                self._deliver(
                    ControlRequest(command=message["command"], arguments=message.get("arguments", {}), reply=reply)
                )
        with self._guard:
            self._forget(connection)

    def _watch(self, connection: socket.socket) -> None:
        # Use the smallest possible send buffer, so that few unread lines accumulate.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        with self._guard:
            self._watchers.add(connection)
        with contextlib.suppress(OSError):
            connection.send(b"\n", socket.MSG_DONTWAIT)


def connect_to_controller(run: RunDir, timeout: float = 5.0) -> socket.socket:
    """Return a connection to the controller of a run.

    Raises:
        NoControllerError: No controller listens, or a process of another user listens.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    try:
        connection.connect(run.control_address())
    except OSError as error:
        connection.close()
        raise NoControllerError(f"{run.run} has no controller") from error
    if syscalls.read_peer_credentials(connection)[1] != os.getuid():
        connection.close()
        raise NoControllerError(f"{run.run} has no controller")
    return connection


def send_request(
    run: RunDir, command: str, arguments: dict[str, Any] | None = None, *, timeout: float = 30.0
) -> dict[str, Any]:
    """Return the controller's answer to one request.

    Raises:
        NoControllerError: There is no controller, or the controller ended before it answered.
    """
    question = json.dumps({"command": command, "arguments": arguments or {}}).encode() + b"\n"
    with connect_to_controller(run, timeout) as connection:
        try:
            connection.sendall(question)
            with connection.makefile("rb") as lines:
                line = lines.readline(_LINE_LIMIT)
        except TimeoutError as error:
            raise SilentControllerError(f"the controller of {run.run} does not answer") from error
        except OSError as error:
            raise NoControllerError(f"the controller of {run.run} went away") from error
    # An answer without a line end is incomplete.
    if not line.endswith(b"\n"):
        raise NoControllerError(f"the controller of {run.run} went away")
    answer: dict[str, Any] = json.loads(line)
    return answer


class ChangeSubscription:
    """A subscription to notifications of the controller about changes of the run."""

    def __init__(self, run: RunDir) -> None:
        self._connection: socket.socket | None = None
        try:
            self._connection = connect_to_controller(run)
            self._connection.sendall(b'{"command": "watch"}\n')
            self._connection.setblocking(False)
        except (NoControllerError, OSError):
            self.close()

    def fileno(self) -> int | None:
        """Return the descriptor that becomes readable after a change; `None` without a controller."""
        return None if self._connection is None else self._connection.fileno()

    def read_notifications(self) -> bool:
        """Read all notifications; return whether the controller is still connected."""
        if self._connection is None:
            return False
        try:
            while data := self._connection.recv(4096):
                if len(data) < 4096:
                    return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        self.close()
        return False

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
