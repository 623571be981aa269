"""A server of webhooks in this process, which answers as a test says."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Receipt(NamedTuple):
    """A message that arrived: when, what, and the answer."""

    time: float
    body: dict[str, Any]
    status: int


@dataclass
class HookServer:
    """What a server received.

    Attributes:
        url: Where it listens.
        answer: Returns the status for a message, and may wait before it does; 0 closes the connection without an answer.
    """

    url: str = ""
    answer: Callable[[dict[str, Any]], int] = field(default=lambda _: 200)
    receipts: list[Receipt] = field(default_factory=list)

    @property
    def accepted(self) -> list[dict[str, Any]]:
        return [receipt.body for receipt in self.receipts if receipt.status == 200]


@contextmanager
def serve_hooks() -> Iterator[HookServer]:
    """Run a server until the block ends."""
    hooks = HookServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived, body = time.time(), json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status = hooks.answer(body)
            hooks.receipts.append(Receipt(arrived, body, status))
            if status:
                self.send_response(status)
                self.end_headers()
            else:
                self.close_connection = True

        def log_message(self, *_: object) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            """A client that has gone is no error of the test."""

    server = Server(("127.0.0.1", 0), Handler)
    hooks.url = f"http://127.0.0.1:{server.server_port}/s3same"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hooks
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
