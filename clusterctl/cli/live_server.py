"""The HTTP server of `serve`: one page, and a stream of server-sent events for each browser.

It needs starlette and uvicorn. All state belongs to the thread of the event loop;
another thread reads the files (`live_runs.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from ipaddress import ip_address
from typing import Any

import click
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from clusterctl.cli.live_runs import MAX_RANKS, LiveReader, LiveUpdate, Watch
from clusterctl.cli.option_values import is_own_host, parse_rank_set
from clusterctl.render.live_page import load_live_page

MAX_BROWSERS = 100
"""The most streams at once. The answer to another browser is 429."""
_MAX_CONNECTIONS = 400
_INTERVAL_S, _HEARTBEAT_S = 1.0, 15.0
_SEND_TIMEOUT_S = 10.0
"""A browser that reads nothing for this time is disconnected."""
_MAX_LOG_BATCHES = 20
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _Browser:
    """What one browser has not received yet. A newer event replaces an older event with the same key."""

    def __init__(self, watch: Watch | None) -> None:
        self.watch = watch
        self._sent: dict[str, bytes] = {}
        self._next_log = 0
        self._pending: dict[str, bytes] = {}
        self._news = asyncio.Event()

    def offer(self, update: LiveUpdate) -> None:
        """Take over the events that have changed."""
        events = {"runs": update.runs}
        if self.watch is not None:
            events |= update.sections.get(self.watch.run, {})
            new = {n: event for n, event in update.logs.get(self.watch, {}).items() if n >= self._next_log}
            self._next_log = max(new, default=self._next_log - 1) + 1
            self._pending |= {f"log {number}": event for number, event in new.items()}
            for key in [key for key in self._pending if key.startswith("log ")][:-_MAX_LOG_BATCHES]:
                del self._pending[key]
        changed = {key: event for key, event in events.items() if self._sent.get(key) is not event}
        self._sent = events
        self._pending |= changed
        if self._pending:
            self._news.set()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the events; a comment if there are none for a while."""
        yield b"retry: 2000\nevent: hello\ndata: {}\n\n"
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._news.wait(), _HEARTBEAT_S)
            self._news.clear()
            pending, self._pending = self._pending, {}
            yield b"".join(pending.values()) or b":\n\n"


class LiveServer:
    """Serves the page and its events.

    Args:
        listener: The socket on which to listen.
        token: The first part of every path; a browser without it gets 403.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        self._listener, self._token = listener, token
        self._is_loopback = ip_address(listener.getsockname()[0]).is_loopback
        self._page = load_live_page()
        self._reader = LiveReader()
        self._browsers: set[_Browser] = set()
        self._wake = asyncio.Event()
        paths = [Route("/{token}/", self._send_page), Route("/{token}/events", self._send_events)]
        self._app = Starlette(routes=paths)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                interface="asgi3",
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_MAX_CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
                h11_max_incomplete_event_size=16 << 10,
            )
        )

    def run(self) -> None:
        """Serve until SIGINT or SIGTERM."""
        asyncio.run(self._run())

    async def _run(self) -> None:
        reading = asyncio.create_task(self._read_for_browsers())
        reading.add_done_callback(lambda _: setattr(self._server, "should_exit", True))
        try:
            await self._server.serve(sockets=[self._listener])
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading

    async def _read_for_browsers(self) -> None:
        """Read the files as long as there is a browser, and pass the events on."""
        while True:
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), _INTERVAL_S)
            self._wake.clear()
            if self._browsers:
                watched = {browser.watch for browser in self._browsers if browser.watch is not None}
                try:
                    update = await asyncio.to_thread(self._reader.read, watched)
                except OSError:
                    continue  # `clean` has removed a run meanwhile; the next read finds what is there.
                for browser in self._browsers:
                    browser.offer(update)

    # --- answers

    async def _answer(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Answer a request, or refuse it; disconnect a browser that does not read."""
        headers = dict(scope["headers"])
        given = scope["path"].split("/")[1]

        async def send_in_time(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in _HEADERS.items())]
            try:
                await asyncio.wait_for(send(message), _SEND_TIMEOUT_S)
            except (TimeoutError, asyncio.TimeoutError):
                for connection in self._server.server_state.connections:
                    if getattr(connection, "client", None) == scope["client"]:
                        connection.transport.abort()

        if not is_own_host(headers.get(b"host", b"").decode("latin-1"), is_loopback=self._is_loopback):
            refusal: Response | None = PlainTextResponse("unknown host\n", 421)
        elif not hmac.compare_digest(given.encode(), self._token.encode()):
            refusal = PlainTextResponse("the link needs the token that `clusterctl serve` printed\n", 403)
        else:
            refusal = None
        await (refusal or self._app)(scope, receive, send_in_time)

    async def _send_page(self, _: Request) -> Response:
        return Response(self._page.html, media_type="text/html", headers={"Content-Security-Policy": self._page.policy})

    async def _send_events(self, request: Request) -> Response:
        run, ranks = request.query_params.get("run"), request.query_params.get("ranks", "0")
        try:
            chosen = frozenset(sorted(parse_rank_set(ranks[:400]) or ())[:MAX_RANKS])
        except click.BadParameter as error:
            return PlainTextResponse(f"{error.message}\n", 400)
        if run is not None and await asyncio.to_thread(self._reader.find_run, run) is None:
            return PlainTextResponse("no such run\n", 404)
        if len(self._browsers) >= MAX_BROWSERS:
            return PlainTextResponse("too many browsers\n", 429)
        browser = _Browser(None if run is None else Watch(run, chosen))
        self._browsers.add(browser)
        self._wake.set()

        async def stream() -> AsyncIterator[bytes]:
            try:
                async for events in browser.stream():
                    yield events
            finally:
                self._browsers.discard(browser)

        return StreamingResponse(stream(), media_type="text/event-stream")
