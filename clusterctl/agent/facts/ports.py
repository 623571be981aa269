"""Ports: whether one is free here, and whether a peer reaches it. A nonce proves that it is ours who answers."""

from __future__ import annotations

import errno
import socket
import struct
import time

from clusterctl.agent.facts import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BACKLOG = 128


def collect(wanted: list[int], root: str = "/") -> dict[str, Any]:
    """Return the group `ports`: each port is bound for a moment on all addresses."""
    return {"ports": [_free(int(port), root) for port in wanted]}


def _free(port: int, root: str) -> dict[str, Any]:
    entry: dict[str, Any] = {"port": port, "free": True, "error": None, "owner": None}
    try:
        _bind(port).close()
    except OSError as error:
        entry.update(free=False, error=error.strerror, owner=_owner(root, port))
    return entry


def _bind(port: int, *, reuse: bool = False) -> socket.socket:
    """Bind on every address, IPv6 too where the kernel has it.

    Without `reuse` a port that a supervisor merely holds is refused, as it would be to the run.
    """
    try:
        return _bound(socket.AF_INET6, "::", port, reuse)
    except OSError as error:
        if error.errno not in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
            raise
    return _bound(socket.AF_INET, "", port, reuse)


def _bound(family: int, address: str, port: int, reuse: bool) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock


def listen(port: int, nonce: str, seconds: float) -> dict[str, Any]:
    """Listen on `port` (0: any) for `seconds`; answer every line that is the nonce with the nonce.

    For callers that need the port before the time is up there is `Listener`.

    Returns:
        {"port", "served": how many peers asked rightly, "error"}.
    """
    try:
        listener = Listener(port, nonce)
    except OSError as error:
        return {"port": port, "served": 0, "error": error.strerror}
    return {"port": listener.port, "served": listener.serve(seconds), "error": None}


class Listener:
    """A port that is held and answers; closing it frees the port.

    Attributes:
        port: The one in use, also where any was asked for.
    """

    def __init__(self, port: int, nonce: str) -> None:
        self._nonce = nonce.encode()
        self._sock = _bind(port)
        try:
            self._sock.listen(BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self.port: int = self._sock.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """The listening socket, for a fork that serves while this process goes on."""
        return self._sock.fileno()

    def serve(self, seconds: float) -> int:
        """Answer until `seconds` are over or the socket is closed; return how many asked with the right nonce."""
        until, served = time.monotonic() + seconds, 0
        try:
            while (left := until - time.monotonic()) > 0:
                self._sock.settimeout(left)
                try:
                    peer = self._sock.accept()[0]
                except OSError:
                    break
                served += self._answer(peer, min(1.0, left))
        finally:
            self.close()
        return served

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()

    def _answer(self, peer: socket.socket, timeout: float) -> bool:
        with peer:
            # The peer closes first and we close hard: a port left in TIME_WAIT could not be bound by the run.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.settimeout(timeout)
            try:
                right = _line(peer) == self._nonce
                if right:
                    peer.sendall(self._nonce + b"\n")
                    peer.recv(1)
            except OSError:
                return False
        return right


def connect(address: str, port: int, nonce: str, timeout: float) -> dict[str, Any]:
    """Connect to a peer's listener and exchange the nonce.

    Returns:
        {"ok", "ms", "error": None | "refused" | "timeout" | "unreachable" | "wrong answer" | other text}.
    """
    began = time.monotonic()
    error: str | None = None
    try:
        with socket.create_connection((address, port), timeout=timeout) as sock:
            sock.settimeout(timeout)
            sock.sendall(nonce.encode() + b"\n")
            if _line(sock) != nonce.encode():
                error = "wrong answer"
    except ConnectionRefusedError:
        error = "refused"
    except ConnectionResetError:
        # It accepted and hung up on a nonce that is not its own.
        error = "wrong answer"
    except TimeoutError:
        error = "timeout"
    except OSError as caught:
        error = (
            "unreachable"
            if caught.errno in (101, 113)
            else "timeout"
            if isinstance(caught, socket.timeout)
            else str(caught)
        )
    return {"ok": error is None, "ms": round((time.monotonic() - began) * 1000, 1), "error": error}


def _line(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < 256:
        chunk = sock.recv(256)
        if not chunk:
            break
        received += chunk
    return received.strip()


def _owner(root: str, port: int) -> str | None:
    """Name the user who holds `port`, from the kernel's socket table, which everybody may read."""
    seen = None
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in (paths.text(root, table) or "").splitlines()[1:]:
            words = line.split()
            if len(words) <= 7 or int(words[1].rpartition(":")[2], 16) != port:
                continue
            if words[3] == "0A":
                return f"a listener of uid {words[7]}"
            seen = "connections that are still closing"
    return seen
