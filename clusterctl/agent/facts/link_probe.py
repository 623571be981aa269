"""Tests whether peers can connect to a port of this node and exchange data. A nonce identifies the peers.

The listener serves all peers in parallel, so a silent peer does not delay the others.
"""

from __future__ import annotations

import errno
import fcntl
import select
import socket
import struct
import termios
import time

from clusterctl.agent.linux import port_reservation as ports_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BACKLOG = 128
MAX_PEERS = 512
"""The maximum number of connected peers. If more peers connect, the listener disconnects the oldest peer without the
correct nonce.
"""
_MAX_LINE_BYTES = 256
_CHUNK_BYTES = 1 << 16
_ACKNOWLEDGEMENT_INTERVAL_S = 0.2
"""The maximum seconds between two readings of the number of acknowledged bytes."""


class Listener:
    """A listening port that answers test connections.

    Args:
        port: The port; 0 for any free port.
        nonce: The word that a peer has to send, and that the listener returns.
        payload: The number of bytes after the nonce that the listener returns.

    Attributes:
        port: The port on which this object listens.

    Raises:
        OSError: The port cannot be bound.
    """

    def __init__(self, port: int, nonce: str, payload: int = 0) -> None:
        self._nonce, self._payload = nonce.encode(), payload
        self._peers: dict[int, _Peer] = {}
        self._sock = ports_module.bind_port(port)
        try:
            self._sock.listen(_BACKLOG)
        except OSError:
            self._sock.close()
            raise
        self.port: int = self._sock.getsockname()[1]

    @property
    def descriptor(self) -> int:
        """The descriptor of the listening socket, for a forked process that calls `serve`."""
        return self._sock.fileno()

    def serve(self, timeout_s: float, enough_peers: int | None = None) -> int:
        """Answer peers until `timeout_s` have passed, the socket is shut down or `enough_peers` peers have finished.

        A peer has finished when it has closed the connection.

        Returns:
            The number of peers that have sent the correct nonce.
        """
        until, served = time.monotonic() + timeout_s, 0
        try:
            while (remaining_s := until - time.monotonic()) > 0 and (enough_peers is None or served < enough_peers):
                poll = select.poll()
                poll.register(self.descriptor, select.POLLIN)
                for fd, peer in self._peers.items():
                    poll.register(fd, select.POLLIN | (select.POLLOUT if peer.pending else 0))
                for fd, events in poll.poll(remaining_s * 1000):
                    if fd != self.descriptor:
                        served += fd in self._peers and self._serve_peer(fd)
                    elif events & ~select.POLLIN or not self._accept():
                        return served + sum(peer.has_nonce for peer in self._peers.values())
        finally:
            self.close()
        return served

    def close(self) -> None:
        """Stop listening and disconnect all peers."""
        for peer in self._peers.values():
            peer.sock.close()
        self._peers.clear()
        self._sock.close()

    def _accept(self) -> bool:
        try:
            sock = self._sock.accept()[0]
        except ConnectionError:
            return True
        except OSError as error:
            return error.errno in (errno.EMFILE, errno.ENFILE) and self._disconnect_oldest_peer()
        self._peers[sock.fileno()] = _Peer(sock)
        return len(self._peers) <= MAX_PEERS or self._disconnect_oldest_peer()

    def _disconnect_oldest_peer(self) -> bool:
        """Disconnect the oldest peer without the correct nonce, else the oldest peer. Return `False` without peers."""
        silent = next((fd for fd, peer in self._peers.items() if not peer.has_nonce), next(iter(self._peers), None))
        if silent is None:
            return False
        self._peers.pop(silent).sock.close()
        return True

    def _serve_peer(self, fd: int) -> bool:
        """Exchange data with a peer, and return whether the peer has finished and has sent the correct nonce."""
        peer = self._peers[fd]
        try:
            if peer.exchange(self._nonce, self._payload):
                return False
        except BlockingIOError:
            return False
        except OSError:
            pass
        del self._peers[fd]
        peer.sock.close()
        return peer.has_nonce


class _Peer:
    """A connected peer.

    Attributes:
        has_nonce: Whether the peer has sent the correct nonce.
        pending: The bytes that the listener has to send to the peer.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.has_nonce = False
        self.pending = bytearray()
        self._line = b""
        self._echoed = 0
        sock.setblocking(False)
        # After the peer has closed the connection, the listener resets the connection. A connection in state TIME_WAIT
        # would prevent the run from binding the port.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def exchange(self, nonce: bytes, payload: int) -> bool:
        """Read the received bytes and send pending bytes, without waiting; return whether the peer stays connected."""
        del self.pending[: _send_available(self.sock, self.pending)]
        data = self.sock.recv(_CHUNK_BYTES)
        if not data:
            return False
        if not self.has_nonce:
            self._line += data
            if b"\n" not in self._line:
                return len(self._line) < _MAX_LINE_BYTES
            greeting, _, data = self._line.partition(b"\n")
            self.has_nonce = greeting.strip() == nonce
            if not self.has_nonce:
                return False
            self.pending += nonce + b"\n"
        data = data[: payload - self._echoed]
        self._echoed += len(data)
        self.pending += data
        return True


def probe_connection(address: str, port: int, nonce: str, timeout: float, payload: int = 0) -> dict[str, Any]:
    """Connect to a peer's listener, exchange the nonce, then send `payload` bytes and receive these bytes again.

    Args:
        address: The address of the peer.
        port: The port of the listener.
        nonce: The word that both sides send.
        timeout: The time limit for the whole test in seconds.
        payload: The number of bytes to send; the `payload` of the listener must be the same.

    Returns:
        {"ok", "ms", "error": None | "refused" | "timeout" | "unreachable" | "wrong answer" | "hung up" | other text,
        "source": the local address of this connection, or `None`}. With a payload also {"payload", "sent": bytes that
        the peer's kernel has acknowledged, "received": bytes received, "still": seconds without progress}.
    """
    began = time.monotonic()
    outcome: dict[str, Any] = {"ok": False, "ms": None, "error": None, "source": None}
    if payload:
        outcome.update(payload=payload, sent=0, received=0, still=0.0)
    try:
        with socket.create_connection((address, port), timeout=timeout) as sock:
            outcome["source"] = sock.getsockname()[0]
            sock.sendall(nonce.encode() + b"\n")
            if _receive_line(sock) != nonce.encode():
                outcome["error"] = "wrong answer"
            elif payload:
                outcome["error"] = _exchange_payload(sock, payload, began + timeout, outcome)
    except OSError as error:
        outcome["error"] = _describe_error(error)
    return {**outcome, "ok": outcome["error"] is None, "ms": round((time.monotonic() - began) * 1000, 1)}


def _describe_error(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, ConnectionResetError):
        # The listener resets a connection after a wrong nonce.
        return "wrong answer"
    if isinstance(error, (TimeoutError, socket.timeout)):
        return "timeout"
    return "unreachable" if error.errno in (101, 113) else str(error)


def _exchange_payload(sock: socket.socket, payload: int, until: float, outcome: dict[str, Any]) -> str | None:
    """Send `payload` bytes and receive them again. Store the counts in `outcome`, and return the error or `None`."""
    sock.setblocking(False)
    out, moved = memoryview(bytes(payload)), time.monotonic()
    poll = select.poll()
    while outcome["received"] < payload:
        now = time.monotonic()
        if now >= until:
            outcome["still"] = round(now - moved, 1)
            return "timeout"
        poll.register(sock, select.POLLIN | (select.POLLOUT if out else 0))
        poll.poll(1000 * min(_ACKNOWLEDGEMENT_INTERVAL_S, until - now))
        before = (outcome["sent"], outcome["received"])
        try:
            out = out[_send_available(sock, out) :]
            data = sock.recv(_CHUNK_BYTES)
            if not data:
                return "hung up"
            outcome["received"] += len(data)
        except BlockingIOError:
            pass
        except ConnectionError:
            return "hung up"
        # `waiting` is the number of bytes that the peer's kernel has not acknowledged yet (SIOCOUTQ, tcp(7)).
        waiting: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
        outcome["sent"] = payload - len(out) - waiting
        if (outcome["sent"], outcome["received"]) != before:
            moved = time.monotonic()
    outcome["sent"] = payload
    return None


def _send_available(sock: socket.socket, data: bytearray | memoryview) -> int:
    try:
        return sock.send(data) if data else 0
    except BlockingIOError:
        return 0


def _receive_line(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_LINE_BYTES:
        chunk = sock.recv(1)
        if not chunk:
            break
        received += chunk
    return received.strip()
