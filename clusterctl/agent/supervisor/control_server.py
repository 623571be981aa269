"""The server on the supervisor's socket. It answers requests of the agents (`serve`) on this node."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any, Callable, Union

from clusterctl.agent.linux import syscalls
from clusterctl.agent.linux.event_loop import FrameChannel
from clusterctl.agent.protocol import command_messages, frames

if TYPE_CHECKING:
    import socket

    from clusterctl.agent.linux.event_loop import EventLoop


class DeferredReply:
    """A reply that is sent later, by `resolve`."""

    def __init__(self) -> None:
        self.resolve: Callable[[Callable[[], dict[str, Any]]], None] = lambda _action: None


Reply = Union[dict[str, Any], DeferredReply]


class ControlServer:
    """Accepts connections and sends the replies that `handle_request` returns.

    Attributes:
        connection_count: Number of open connections.
    """

    def __init__(
        self, loop: EventLoop, handle_request: Callable[[dict[str, Any]], Reply], log: Callable[[str], None]
    ) -> None:
        self._loop, self._handle_request, self._log = loop, handle_request, log
        self.connection_count = 0

    def listen(self, listener: socket.socket) -> None:
        """Accept the connections of a listening socket."""
        listener.setblocking(False)
        self._loop.on_readable(listener.fileno(), lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        if syscalls.read_peer_credentials(sock)[1] not in (os.getuid(), 0):
            sock.close()
            return
        self.connection_count += 1
        fd = sock.detach()
        channel: list[FrameChannel] = []
        channel.append(
            FrameChannel(self._loop, fd, fd, lambda frame: self._answer(channel[0], frame), self._drop_connection)
        )

    def _drop_connection(self, _why: str) -> None:
        self.connection_count -= 1

    def _answer(self, channel: FrameChannel, frame: frames.Frame) -> None:
        if not isinstance(frame, dict):
            return
        self._reply(channel, frame.get("id", 0), lambda: self._handle_request(frame))

    def _reply(self, channel: FrameChannel, identity: int, action: Callable[[], Reply]) -> None:
        try:
            result = action()
        except Exception as error:
            # The agent has validated the request, so any other error is a bug of clusterctl.
            if not isinstance(error, (command_messages.RequestError, frames.FrameError, OSError)):
                self._log(traceback.format_exc())
            message = command_messages.convert_to_request_error(error).make_answer(identity)
        else:
            if isinstance(result, DeferredReply):
                result.resolve = lambda action: self._reply(channel, identity, action)
                return
            message = command_messages.make_answer(identity, result)
        if identity:
            channel.send(message)
