"""A server of the live page, and browsers that are not: plain HTTP connections."""

from __future__ import annotations

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from email.message import Message
from typing import Any
from urllib.parse import quote, urlsplit


@dataclass(frozen=True, kw_only=True)
class Server:
    """A running `clusterctl serve`; `path` begins with the token."""

    url: str
    pid: int

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or 0

    @property
    def path(self) -> str:
        """The path of the page."""
        return urlsplit(self.url).path

    def ask(self, path: str, *, host: str | None = None, method: str = "GET") -> tuple[int, Message, bytes]:
        """Return status, headers and body of the answer to a request."""
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=20)) as connection:
            connection.putrequest(method, path, skip_host=host is not None)
            if host:
                connection.putheader("Host", host)
            connection.endheaders()
            with connection.getresponse() as answer:
                return answer.status, answer.headers, answer.read()

    def events(self, run: str | None = None, ranks: str = "0") -> Iterator[tuple[str, Any]]:
        """Give the events of a stream: name and value."""
        with contextlib.closing(http.client.HTTPConnection(*self.address, timeout=20)) as connection:
            connection.request(
                "GET", f"{self.path}events?ranks={ranks}" + ("" if run is None else f"&run={quote(run)}")
            )
            with connection.getresponse() as answer:
                assert answer.status == 200, answer.read()
                assert answer.headers["Content-Type"].startswith("text/event-stream")
                name = ""
                while line := answer.readline():
                    key, _, value = line.decode().rstrip("\n").partition(": ")
                    if key == "event":
                        name = value
                    elif key == "data":
                        yield name, json.loads(value)

    def wait_for(self, *names: str, run: str | None = None, ranks: str = "0", within_s: float = 30.0) -> dict[str, Any]:
        """Return the first value of each of these events."""
        found: dict[str, Any] = {}
        deadline = time.monotonic() + within_s
        with contextlib.closing(self.events(run, ranks)) as events:
            for name, value in events:
                if name in names:
                    found.setdefault(name, value)
                if found.keys() == set(names):
                    return found
                assert time.monotonic() < deadline, f"only {sorted(found)} of {names}"
        raise AssertionError(f"the stream ended after {sorted(found)}")


@contextlib.contextmanager
def serving(env: Mapping[str, str], words: list[str], address: str = "0") -> Iterator[Server]:
    """Serve, and end the server."""
    argv = [sys.executable, "-m", "clusterctl", *words, "--listen", address]
    with subprocess.Popen(argv, env=dict(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Server(url=process.stdout.readline().strip(), pid=process.pid)
        finally:
            process.terminate()
            _, said = process.communicate(timeout=30)
            assert "Traceback" not in said, said
