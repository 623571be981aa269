"""One conversation with one node's agent: requests and their answers, and what the agent says by itself.

One thread a session reads, another sends; all that arrives unasked goes into the owner's inbox as values. Signs of life
go both ways every `BEAT_SECONDS`, when one thread for all sessions says so; their echo also tells how far the node's
clocks are from ours.
"""

from __future__ import annotations

import itertools
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TYPE_CHECKING, Any

from clusterctl.agent.protocol.commands import AGENT_STREAMS, BEAT_SECONDS, Command, ErrorKind, request
from clusterctl.agent.protocol.frames import (
    CHUNK_BYTES,
    MAX_FRAME,
    Data,
    Decoder,
    FrameError,
    TooLargeError,
    encode_data,
    encode_message,
)
from clusterctl.door import answers, journal
from clusterctl.door.bounds import Allowance
from clusterctl.errors import AgentError, ConnectError, NodeError, NodeRefusedError
from clusterctl.session.beats import Beats
from clusterctl.session.calls import Calls, wire
from clusterctl.session.duplex import Duplex
from clusterctl.session.items import (
    EventReceived,
    OutputReceived,
    SessionLost,
    Sink,
    StreamReceived,
    Superseded,
    WholeReceived,
)
from clusterctl.session.limits import seconds_for
from clusterctl.session.pulse import PULSE
from clusterctl.session.refusals import GarbledError, refusal_of
from clusterctl.session.sender import Sender
from clusterctl.session.streams import Streams
from clusterctl.typed import override

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.agent.protocol.types.machine import Hello
    from clusterctl.session.calls import Arguments
    from clusterctl.transport.base import Channel
    from clusterctl.transport.delivery.bootstrap import Preamble

SILENCE_SECONDS = 3 * BEAT_SECONDS
"""A peer that said nothing and took nothing for so long is taken as gone, although its connection may look alive."""

_READ_BYTES = 1 << 20
_QUOTED_CHARACTERS = 300


class Session(Calls):
    """A conversation with the agent of `node`. Every method may be called from any thread.

    Attributes:
        node: Name of the node.
        epoch: What each request carries; `None` before a run has one.
        preamble: What the node said before the first frame.
        hello: The answer to the first request: facts of machine and user.
        warnings: What a person should know of how the connection was made, a sentence each.
        connect_s: Seconds from the first packet to the agent's hello; `None` where nobody measured it.
    """

    def __init__(
        self, node: str, channel: Channel, preamble: Preamble, inbox: Sink, *, epoch: int | None = None
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.preamble = preamble
        self.hello: Hello = {}
        self.connect_s: float | None = None
        self.warnings = (*channel.warnings, *((channel.auth_note,) if channel.auth_note else ()))
        self._channel = channel
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._streams = Streams()
        self._state = threading.Lock()
        self._sender = Sender(
            channel, self._next_beat, lambda _: self._lose(ConnectError(self.node, "the connection was lost"))
        )
        self._pending: dict[int, tuple[Command, Future[Any]]] = {}
        self._allowed = Allowance()
        self._decoder = Decoder(lambda: self._allowed.largest(MAX_FRAME))
        self._stale_told = False
        self._beats = Beats(node)
        self._error: NodeError | None = None
        self._taken = 0
        self._heard = time.monotonic()

    def start(self, first: bytes = b"") -> None:
        """Begin to read; `first` are bytes that came with the preamble."""
        threading.Thread(target=self._read, args=(first,), name=f"session-{self.node}", daemon=True).start()
        self._sender.start(f"sender-{self.node}")
        PULSE.add(self)
        self.beat()

    @property
    def alive(self) -> bool:
        """The conversation goes on, as far as is known."""
        return self._error is None

    @property
    def clock(self) -> tuple[float, float] | None:
        """The node's wall clock minus ours, and the bound of the error (seconds); `None` before it was measured."""
        return self._beats.best

    @property
    def silence_s(self) -> float:
        """Seconds since the node last said anything, or took any of what we send."""
        return time.monotonic() - self._heard

    @override
    def ask(self, command: Command, asked: Arguments, timeout: float | None) -> Any:
        future = self.begin(command, asked)
        timeout = seconds_for(command) if timeout is None else timeout
        try:
            return future.result(timeout)
        except FutureTimeoutError as error:
            self._forget(future)
            raise AgentError(self.node, f"no answer to `{command.value}` within {timeout:g}s") from error

    @override
    def begin(self, command: Command, asked: Arguments) -> Future[Any]:
        number, message = next(self._numbers), wire(asked)
        future: Future[Any] = Future()
        try:
            frame = encode_message(request(number, command, message, self.epoch))
        except TooLargeError as error:
            future.set_exception(NodeRefusedError(self.node, f"`{command.value}` cannot be asked: {error}"))
            return future
        with self._state:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._pending[number] = command, future
            self._allowed.asked(number, command, message)
        self._sender.put(frame)
        return future

    @override
    def tell(self, command: Command, asked: Arguments) -> None:
        number, message = next(self._numbers), wire(asked)
        with self._state:
            self._allowed.asked(number, command, message)
        self._sender.put(encode_message(request(number, command, message, self.epoch)))

    def credit(self, count: int) -> None:
        """Let the node send `count` more bytes of output."""
        self.post(Command.CREDIT, {"bytes": count})

    def new_stream(self, listener: Callable[[Data], None] | None = None, *, count: int = 1) -> int:
        """Return the first of `count` unused stream numbers, to name in a request.

        Args:
            listener: Called on the reading thread with what comes in them; while it works nothing more is read, which
                holds back the node. `None`: it goes into the inbox.
            count: How many numbers in a row.
        """
        return self._streams.name(listener, count)

    def both_ways(self, wake: Callable[[], None]) -> Duplex:
        """Return a stream that goes both ways, to name in a request; `wake` is called when it has something new."""
        return Duplex(self._streams, self.send_data, self.post, wake)

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream, in frames of `CHUNK_BYTES`; waits where the node is slow. None at all are one frame.

        Raises:
            NodeError: The session is lost.
        """
        for start in range(0, len(payload) or 1, CHUNK_BYTES):
            self._sender.put_bulk(encode_data(stream, offset + start, payload[start : start + CHUNK_BYTES]))
            if self._error is not None:
                raise self._error

    def beat(self) -> None:
        """Give a sign of life. Done by itself every `BEAT_SECONDS`."""
        self._sender.beat()

    def close(self, *, error: NodeError | None = None) -> None:
        """End the conversation. Waits for nobody; whoever waits for an answer gets an error; may be repeated."""
        self._end(error or ConnectError(self.node, "the session was closed"))

    def tick(self, *, stopped_s: float) -> None:
        """Beat if it is time, and end a session that has been silent for too long.

        Args:
            stopped_s: For so long this process itself did not run, which is no silence of the node's.
        """
        self._heard += stopped_s
        taken = self._channel.taken
        if taken > self._taken:
            # On a slow link a sign of life, and its echo, stand behind megabytes that are under way.
            self._taken, self._heard = taken, time.monotonic()
        if self.silence_s > SILENCE_SECONDS:
            text = f"no sign of life for {SILENCE_SECONDS:g}s"
            self._lose(ConnectError(self.node, text, hint="the machine or the network between is down, or frozen"))
        elif time.monotonic() - self._beats.last >= BEAT_SECONDS:
            self.beat()

    # --- sending

    def _next_beat(self) -> bytes:
        return self._beats.make(next(self._numbers))

    # --- reading

    def _read(self, first: bytes) -> None:
        data = first or self._receive()
        try:
            while data:
                self._heard = time.monotonic()
                for frame in self._decoder.feed(data):
                    self._take(frame)
                data = self._receive()
            self._lose(self._ended())
        except FrameError as error:
            hint = "something on the machine writes into our connection, or the network damages it"
            self._lose(GarbledError(self.node, f"garbled answer: {str(error)[:_QUOTED_CHARACTERS]}", hint=hint))
        except Exception as error:  # a bug of ours must not look like a node that is merely silent
            self._lose(AgentError(self.node, f"its answer could not be handled: {error!r}"))
            raise

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(_READ_BYTES)
        except OSError:
            return b""

    def _ended(self) -> NodeError:
        stderr = " ".join(self._channel.stderr_tail().split())
        if stderr:
            return AgentError(self.node, f"the agent ended; it said: {stderr[-_QUOTED_CHARACTERS:]!r}")
        return ConnectError(self.node, "the connection was lost")

    def _take(self, frame: dict[str, Any] | Data) -> None:
        if isinstance(frame, Data):
            self._take_data(frame)
        elif "push" in frame:
            self._take_push(frame)
        elif "beat" in frame:
            self._take_beat(frame)
        elif "id" in frame:
            self._take_answer(frame)
        elif "ended" in frame:
            self._lose(self._ended())

    def _take_data(self, data: Data) -> None:
        if data.stream >= AGENT_STREAMS:
            run, file = self._streams.file(data.stream)
            with self._state:
                self._allowed.output(len(data.payload))
            self._inbox.put(OutputReceived(self.node, run, file, data.offset, data.payload))
            return
        listener = self._streams.listener(data.stream)
        if listener is None:
            self._allowed.unheard(len(data.payload))
            self._inbox.put(StreamReceived(self.node, data.stream, data.offset, data.payload))
        else:
            listener(data)

    def _take_push(self, push: dict[str, Any]) -> None:
        if push["push"] == "stream":
            answers.STREAM_PUSH(push)
            answers.place_of(push["file"])
            self._allowed.stream(push["stream"], self._streams.announced)
            self._streams.announce(push["stream"], push["run"], push["file"])
        elif push["push"] == "event":
            answers.EVENT_PUSH(push)
            self._allowed.event(self._decoder.size, time.monotonic())
            decoded = journal.decode_record(push["event"])
            if decoded is not None:
                self._inbox.put(EventReceived(self.node, push["run"], *decoded, push["event"]))
        elif push["push"] == "whole":
            answers.WHOLE_PUSH(push)
            self._streams.end_before(push["run"], push["before"])
            self._inbox.put(WholeReceived(self.node, push["run"], push["before"]))
        elif push["push"] == "taken":
            answers.TAKEN_PUSH(push)
            self._streams.taken(push["stream"], push["bytes"])
        elif push["push"] == "stale":
            self._stale()

    def _stale(self) -> None:
        if not self._stale_told:
            self._stale_told = True
            self._inbox.put(Superseded(self.node))

    def _take_beat(self, answer: dict[str, Any]) -> None:
        answers.BEAT_ANSWER(answer)
        if (received := self._beats.answered(answer)) is not None:
            self._inbox.put(received)

    def _take_answer(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        with self._state:
            pending = self._pending.get(number) if type(number) is int else None
        if pending is None:
            self._allowed.answered(number)
            return  # nobody waits any more
        command, future = pending
        # Before it counts as answered: where it does not fit, whoever waits hears that the session is lost.
        error = answers.refusal(command, answer["error"]) if "error" in answer else None
        result = answers.result(command, answer.get("result")) if error is None else {}
        with self._state:
            self._pending.pop(number, None)
            self._allowed.answered(number)
        if error is None:
            future.set_result(result)
            return
        if error["kind"] == ErrorKind.STALE_EPOCH.value:
            self._stale()
        future.set_exception(refusal_of(self.node, error))

    # --- ending

    def _forget(self, future: Future[Any]) -> None:
        with self._state:
            for number in [n for n, (_, f) in self._pending.items() if f is future]:
                del self._pending[number]

    def _lose(self, error: NodeError) -> None:
        if self._end(error):
            self._inbox.put(SessionLost(self.node, error))

    def _end(self, error: NodeError) -> bool:
        with self._state:
            if self._error is not None:
                return False
            self._error = error
            pending, self._pending = self._pending, {}
        PULSE.remove(self)
        self._sender.close()
        self._channel.close()
        for _, future in pending.values():
            future.set_exception(error)
        return True
