"""One session with the agent of one node: requests, answers, and messages that the agent pushes.

Each session has a reader thread and a sender thread. Pushed messages go into the owner's inbox as values. One timer
thread sends a heartbeat on every session each `HEARTBEAT_INTERVAL_S`; the reply also measures the node's clock offset.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, is_dataclass
from typing import Any

from clusterctl.agent.protocol.command_messages import (
    FIRST_AGENT_STREAM,
    HEARTBEAT_INTERVAL_S,
    Command,
    ErrorKind,
    make_request,
)
from clusterctl.agent.protocol.command_payload_types import HelloAnswer
from clusterctl.agent.protocol.frames import (
    CHUNK_BYTES,
    MAX_FRAME_BYTES,
    FrameDecoder,
    FrameError,
    FrameTooLargeError,
    StreamData,
    encode_data,
    encode_message,
)
from clusterctl.agent.protocol.run_files import parse_attempt
from clusterctl.errors import AgentError, ConnectError, NodeError, NodeRefusedError
from clusterctl.session.controller_inbox import (
    AttemptsReplicated,
    ControllerSuperseded,
    EventReceived,
    ItemQueue,
    OutputReceived,
    SessionLost,
    StreamReceived,
)
from clusterctl.session.heartbeat import HEARTBEAT_TIMER, ClockSync
from clusterctl.session.requests import REQUESTS, ProtocolError, make_refusal_error
from clusterctl.session.sender import Sender
from clusterctl.transport.base import Channel
from clusterctl.transport.bootstrap import Preamble
from clusterctl.validation import journal, messages
from clusterctl.validation.quota import SessionQuota

SILENCE_TIMEOUT_S = 3 * HEARTBEAT_INTERVAL_S
"""A peer that sends and acknowledges nothing for so long is lost, even if its connection looks alive."""

_READ_BYTES = 1 << 20
_QUOTED_CHARACTERS = 300


def _encode_arguments(arguments: Any) -> dict[str, Any]:
    return asdict(arguments) if is_dataclass(arguments) else dict(arguments or {})  # type: ignore[arg-type]


Listener = Callable[[StreamData], None]


class Streams:
    """The streams of one session. Any thread may allocate; only the reader thread announces and looks up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._named = 0
        self._listeners: dict[int, Listener] = {}
        self._files: dict[int, tuple[str, str]] = {}

    @property
    def open_file_count(self) -> int:
        """How many announced files may still grow."""
        return len(self._files)

    def allocate(self, listener: Listener | None, count: int) -> int:
        """Allocate `count` numbers in a row for one listener and return the first."""
        with self._lock:
            numbers = [next(self._numbers) for _ in range(count)]
            self._named = numbers[-1]
            if listener is not None:
                self._listeners.update(dict.fromkeys(numbers, listener))
        return numbers[0]

    def get_listener(self, number: int) -> Listener | None:
        """Return the listener of a stream of ours; `None` if its data goes into the inbox.

        Raises:
            FrameError: No request named this stream.
        """
        if not 0 < number <= self._named:
            raise FrameError(f"data of stream {number}, which nobody has named")
        return self._listeners.get(number)

    def announce(self, number: int, run: str, file: str) -> None:
        """Record which file a stream of the agent carries."""
        self._files[number] = (run, file)

    def get_file(self, number: int) -> tuple[str, str]:
        """Return run and file of a stream of the agent.

        Raises:
            FrameError: The agent never announced this stream.
        """
        if number not in self._files:
            raise FrameError(f"data of stream {number}, which was never announced")
        return self._files[number]

    def end_before(self, run: str, attempt: int) -> None:
        """Forget the files of a run's attempts below `attempt`: they do not grow any more."""
        self._files = {
            number: (whose, file)
            for number, (whose, file) in self._files.items()
            if whose != run or not -1 < parse_attempt(file) < attempt
        }


class Session:
    """A session with the agent of `node`. Every method may be called from any thread.

    Attributes:
        node: Name of the node.
        epoch: The epoch that each request carries; `None` before the run has one.
        preamble: What the bootstrap script reported before the first frame.
        hello: The answer to the first request: facts of machine and user.
        warnings: What a person should know about the connection, one sentence each.
        connect_s: Seconds from the first packet to the handshake; `None` if it was not measured.
    """

    def __init__(
        self, node: str, channel: Channel, preamble: Preamble, inbox: ItemQueue, *, epoch: int | None = None
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.preamble = preamble
        self.hello: HelloAnswer = {}
        self.connect_s: float | None = None
        self.warnings = (*channel.warnings, *((channel.auth_note,) if channel.auth_note else ()))
        self._channel = channel
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._streams = Streams()
        self._state = threading.Lock()
        self._sender = Sender(
            channel,
            lambda: self._clock.make_heartbeat_frame(next(self._numbers)),
            lambda _: self._end_as_lost(ConnectError(self.node, "the connection was lost")),
        )
        self._pending: dict[int, tuple[Command, Future[Any]]] = {}
        self._quota = SessionQuota()
        self._decoder = FrameDecoder(lambda: self._quota.max_message_bytes(MAX_FRAME_BYTES))
        self._has_reported_stale = False
        self._clock = ClockSync(node)
        self._error: NodeError | None = None
        self._acknowledged_bytes = 0
        self._last_received_s = time.monotonic()

    def start(self, first: bytes = b"") -> None:
        """Start the threads; `first` holds bytes that came with the preamble."""
        threading.Thread(target=self._read, args=(first,), name=f"session-{self.node}", daemon=True).start()
        self._sender.start(f"sender-{self.node}")
        HEARTBEAT_TIMER.add(self)
        self.send_heartbeat()

    @property
    def alive(self) -> bool:
        """Whether the session is open, as far as we know."""
        return self._error is None

    @property
    def clock(self) -> tuple[float, float] | None:
        """The node's wall clock minus ours and the error bound (seconds); `None` before the first measurement."""
        return self._clock.best

    @property
    def silence_s(self) -> float:
        """Seconds since the node last sent or acknowledged anything."""
        return time.monotonic() - self._last_received_s

    def call(self, command: Command, arguments: Any = None, *, timeout: float | None = None) -> Any:
        """Send a request and wait for the answer. `requests.Request.call` is the same with types.

        Args:
            command: The command.
            arguments: An object for JSON, or one of the request dataclasses.
            timeout: Seconds; by default those of the command.

        Raises:
            RefusedError: The node refused; `StaleEpochError` if it obeys a later controller.
            NotFoundError: The node has no such run, rank or file.
            AgentError: The node failed, or did not answer within `timeout` seconds.
            NodeError: The session is lost.
        """
        future = self.call_async(command, arguments)
        timeout = REQUESTS[command].timeout_s if timeout is None else timeout
        try:
            return future.result(timeout)
        except FutureTimeoutError as error:
            with self._state:
                self._pending = {n: entry for n, entry in self._pending.items() if entry[1] is not future}
            raise AgentError(self.node, f"no answer to `{command.value}` within {timeout:g}s") from error

    def call_async(self, command: Command, arguments: Any = None) -> Future[Any]:
        """Send a request; the future gets the answer or the exception of `call`. Callbacks run on the reader thread."""
        number, message = next(self._numbers), _encode_arguments(arguments)
        future: Future[Any] = Future()
        try:
            frame = encode_message(make_request(number, command, message, self.epoch))
        except FrameTooLargeError as error:
            future.set_exception(NodeRefusedError(self.node, f"`{command.value}` cannot be asked: {error}"))
            return future
        with self._state:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._pending[number] = command, future
            self._quota.count_request(number, command, message)
        self._sender.put(frame)
        return future

    def post(self, command: Command, arguments: Any = None) -> None:
        """Send a message that has no answer. A lost session drops it."""
        number, message = next(self._numbers), _encode_arguments(arguments)
        with self._state:
            self._quota.count_request(number, command, message)
        self._sender.put(encode_message(make_request(number, command, message, self.epoch)))

    def grant_credit(self, count: int) -> None:
        """Allow the node to send `count` more bytes of output."""
        self.post(Command.CREDIT, {"bytes": count})

    def new_stream(self, listener: Callable[[StreamData], None] | None = None, *, count: int = 1) -> int:
        """Allocate `count` stream numbers for a request and return the first.

        Args:
            listener: Called on the reader thread with the data of these streams. While it runs, the session reads
                nothing
                else, which holds back the node. `None`: the data goes into the inbox.
            count: How many numbers in a row.
        """
        return self._streams.allocate(listener, count)

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream in frames of `CHUNK_BYTES`; wait if the node is slow. An empty payload is one frame.

        Raises:
            NodeError: The session is lost.
        """
        for start in range(0, len(payload) or 1, CHUNK_BYTES):
            self._sender.put_bulk(encode_data(stream, offset + start, payload[start : start + CHUNK_BYTES]))
            if self._error is not None:
                raise self._error

    def send_heartbeat(self) -> None:
        """Send a heartbeat now. The timer does so every `HEARTBEAT_INTERVAL_S`."""
        self._sender.send_heartbeat()

    def close(self, *, error: NodeError | None = None) -> None:
        """End the session without waiting. Pending requests get an error. May be called again."""
        self._end(error or ConnectError(self.node, "the session was closed"))

    def tick(self, *, stopped_s: float) -> None:
        """Send a heartbeat if it is due; end the session if the node has been silent for too long.

        Args:
            stopped_s: Seconds in which this process itself did not run. They do not count as silence.
        """
        self._last_received_s += stopped_s
        taken = self._channel.acknowledged_bytes
        if taken > self._acknowledged_bytes:
            # On a slow link a heartbeat and its reply wait behind megabytes that are in flight.
            self._acknowledged_bytes, self._last_received_s = taken, time.monotonic()
        if self.silence_s > SILENCE_TIMEOUT_S:
            text = f"no sign of life for {SILENCE_TIMEOUT_S:g}s"
            self._end_as_lost(
                ConnectError(self.node, text, hint="the machine or the network between is down, or frozen")
            )
        elif time.monotonic() - self._clock.last >= HEARTBEAT_INTERVAL_S:
            self.send_heartbeat()

    # --- reading

    def _read(self, first: bytes) -> None:
        data = first or self._receive()
        try:
            while data:
                self._last_received_s = time.monotonic()
                for frame in self._decoder.feed(data):
                    self._take(frame)
                data = self._receive()
            self._end_as_lost(self._ended())
        except FrameError as error:
            hint = "something on the machine writes into our connection, or the network damages it"
            self._end_as_lost(ProtocolError(self.node, f"garbled answer: {str(error)[:_QUOTED_CHARACTERS]}", hint=hint))
        except Exception as error:  # Our own bug must not look like a silent node.
            self._end_as_lost(AgentError(self.node, f"its answer could not be handled: {error!r}"))
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

    def _take(self, frame: dict[str, Any] | StreamData) -> None:
        if isinstance(frame, StreamData):
            self._take_data(frame)
        elif "push" in frame:
            self._take_push(frame)
        elif "beat" in frame:
            self._take_beat(frame)
        elif "id" in frame:
            self._take_answer(frame)
        elif "ended" in frame:
            self._end_as_lost(self._ended())

    def _take_data(self, data: StreamData) -> None:
        if data.stream >= FIRST_AGENT_STREAM:
            run, file = self._streams.get_file(data.stream)
            with self._state:
                self._quota.count_output(len(data.payload))
            self._inbox.put(OutputReceived(self.node, run, file, data.offset, data.payload))
            return
        listener = self._streams.get_listener(data.stream)
        if listener is None:
            self._quota.count_unsubscribed(len(data.payload))
            self._inbox.put(StreamReceived(self.node, data.stream, data.offset, data.payload))
        else:
            listener(data)

    def _take_push(self, push: dict[str, Any]) -> None:
        if push["push"] == "stream":
            messages.STREAM_PUSH(push)
            messages.parse_stream_file(push["file"])
            self._quota.count_stream(push["stream"], self._streams.open_file_count)
            self._streams.announce(push["stream"], push["run"], push["file"])
        elif push["push"] == "event":
            messages.EVENT_PUSH(push)
            self._quota.count_event(self._decoder.size, time.monotonic())
            decoded = journal.parse_record(push["event"])
            if decoded is not None:
                self._inbox.put(EventReceived(self.node, push["run"], *decoded, push["event"]))
        elif push["push"] == "complete":
            messages.ATTEMPTS_REPLICATED_PUSH(push)
            self._streams.end_before(push["run"], push["before"])
            self._inbox.put(AttemptsReplicated(self.node, push["run"], push["before"]))
        elif push["push"] == "stale":
            self._stale()

    def _stale(self) -> None:
        if not self._has_reported_stale:
            self._has_reported_stale = True
            self._inbox.put(ControllerSuperseded(self.node))

    def _take_beat(self, answer: dict[str, Any]) -> None:
        messages.HEARTBEAT_ANSWER(answer)
        if (received := self._clock.measure_offset(answer)) is not None:
            self._inbox.put(received)

    def _take_answer(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        with self._state:
            pending = self._pending.get(number) if type(number) is int else None
        if pending is None:
            self._quota.end_request(number)
            return  # The caller gave up waiting.
        command, future = pending
        # Check it before it counts as answered: if it is invalid, the caller gets the error of the lost session.
        error = messages.validate_error_answer(command, answer["error"]) if "error" in answer else None
        result = REQUESTS[command].validate_answer(answer.get("result")) if error is None else {}
        with self._state:
            self._pending.pop(number, None)
            self._quota.end_request(number)
        if error is None:
            future.set_result(result)
            return
        if error["kind"] == ErrorKind.STALE_EPOCH.value:
            self._stale()
        future.set_exception(make_refusal_error(self.node, error))

    # --- ending

    def _end_as_lost(self, error: NodeError) -> None:
        if self._end(error):
            self._inbox.put(SessionLost(self.node, error))

    def _end(self, error: NodeError) -> bool:
        with self._state:
            if self._error is not None:
                return False
            self._error = error
            pending, self._pending = self._pending, {}
        HEARTBEAT_TIMER.remove(self)
        self._sender.close()
        self._channel.close()
        for _, future in pending.values():
            future.set_exception(error)
        return True
