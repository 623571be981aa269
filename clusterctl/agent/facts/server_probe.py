"""Tests whether a server answers at a port, by a connection or by a request of HTTP."""

from __future__ import annotations

import socket

_OK = range(200, 400)
_LOOPBACK = "127.0.0.1"
_MAX_LINE_BYTES = 300


def find_silence(address: str, port: int, path: str | None, timeout_s: float) -> str | None:
    """Return why a server does not answer; `None` if it does.

    Args:
        address: The address at which other nodes reach this node.
        port: The port of the server.
        path: The path that must answer a GET with a status below 400; `None` if a connection suffices.
        timeout_s: The limit of each step, in seconds.
    """
    try:
        with socket.create_connection((address, port), timeout_s) as sock:
            return None if path is None else _find_http_error(sock, f"{address}:{port}", path)
    except OSError as error:
        return f"{error.strerror or error}{_describe_loopback(address, port)}"


def _find_http_error(sock: socket.socket, host: str, path: str) -> str | None:
    sock.sendall(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode("ascii", "replace"))
    with sock.makefile("rb") as answer:
        line = answer.readline(_MAX_LINE_BYTES).decode("ascii", "replace").strip()
    status = line.split(" ")[1:2]
    is_http = line.startswith("HTTP/") and status and status[0].isdigit()
    if is_http and int(status[0]) in _OK:
        return None
    return f"answers `{line}`" if line else "closes the connection without an answer"


def _describe_loopback(address: str, port: int) -> str:
    """Return the end of a sentence about a server that only its own node can reach; "" for any other server."""
    if address == _LOOPBACK:
        return ""
    try:
        with socket.create_connection((_LOOPBACK, port), 1.0):
            return f" at {address}: the server listens on {_LOOPBACK} alone; on 0.0.0.0 the other roles can reach it"
    except OSError:
        return ""
