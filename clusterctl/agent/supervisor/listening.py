"""Who talks to a supervisor: any number of `serve`, over its socket."""

from __future__ import annotations

import os
import traceback
from typing import TYPE_CHECKING, Any, Callable, Union

from clusterctl.agent.linux import syscalls
from clusterctl.agent.linux.event_loop import FrameChannel
from clusterctl.agent.protocol import commands, frames, request_errors

if TYPE_CHECKING:
    import socket

    from clusterctl.agent.linux.event_loop import EventLoop


class Later:
    """An answer that is not known yet."""

    def __init__(self) -> None:
        self.give: Callable[[Callable[[], dict[str, Any]]], None] = lambda _action: None


Answer = Union[dict[str, Any], Later]


class Peers:
    """The conversations. `do` answers a request.

    Attributes:
        count: How many there are.
    """

    def __init__(self, loop: EventLoop, do: Callable[[dict[str, Any]], Answer], say: Callable[[str], None]) -> None:
        self._loop, self._do, self._say = loop, do, say
        self.count = 0

    def listen(self, listener: socket.socket) -> None:
        """Talk to whoever comes."""
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
        self.count += 1
        fd = sock.detach()
        channel: list[FrameChannel] = []
        channel.append(FrameChannel(self._loop, fd, fd, lambda frame: self._answer(channel[0], frame), self._gone))

    def _gone(self, _why: str) -> None:
        self.count -= 1

    def _answer(self, channel: FrameChannel, frame: frames.Frame) -> None:
        if not isinstance(frame, dict):
            return
        self._give(channel, frame.get("id", 0), lambda: self._do(frame))

    def _give(self, channel: FrameChannel, identity: int, action: Callable[[], Answer]) -> None:
        try:
            result = action()
        except Exception as error:
            # `serve` has read the request before: what is missing now may well be missed by a mistake of ours.
            if not isinstance(error, (request_errors.RequestError, frames.FrameError, OSError)):
                self._say(traceback.format_exc())
            message = request_errors.convert_to_request_error(error).answer(identity)
        else:
            if isinstance(result, Later):
                result.give = lambda action: self._give(channel, identity, action)
                return
            message = commands.make_answer(identity, result)
        if identity:
            channel.send(message)
