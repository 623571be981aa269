"""A session with the agent of one node, which sends requests, and receives answers and pushed messages.

Each session has a reader thread and a sender thread. The reader thread puts pushed messages into the inbox of the
session's owner. One timer thread sends a heartbeat on every session each `HEARTBEAT_INTERVAL_S`. The answer to a
heartbeat also measures the node's clock offset.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict, is_dataclass
from typing import Any, NamedTuple

from clusterctl.agent.protocol.command_messages import (
    FIRST_AGENT_STREAM,
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
from clusterctl.errors import AgentError, ConnectError, NodeError, NodeRefusedError
from clusterctl.session.controller_inbox import (
    AttemptsReplicated,
    ControllerSuperseded,
    EventReceived,
    InboxItemQueue,
    OutputReceived,
    SessionLost,
    StreamReceived,
)
from clusterctl.session.heartbeat import HEARTBEAT_INTERVAL_S, HEARTBEAT_TIMER, ClockOffsetMeter
from clusterctl.session.request_definitions import REQUESTS, ProtocolError, convert_error_answer
from clusterctl.session.sender import Sender
from clusterctl.transport.bootstrap import Preamble
from clusterctl.transport.interfaces import Channel
from clusterctl.validation import journal_lines, message_validators
from clusterctl.validation.session_quota import SessionQuota

SILENCE_TIMEOUT_S = 3 * HEARTBEAT_INTERVAL_S
"""The session is lost if the node sends and acknowledges nothing for so long, even if the connection is still open."""

_READ_BYTES = 1 << 20
_QUOTED_CHARACTERS = 300


def _encode_arguments(arguments: Any) -> dict[str, Any]:
    return asdict(arguments) if is_dataclass(arguments) else dict(arguments or {})  # type: ignore[arg-type]


Listener = Callable[[StreamData], None]


class AnnouncedFile(NamedTuple):
    """A file of a run that the agent sends. `place` is its attempt and rank; `None` for the file of samples."""

    run: str
    name: str
    place: tuple[int, int] | None


class StreamTable:
    """The streams of one session.

    Any thread may call `allocate`, and only the reader thread may call the other methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._last_allocated = 0
        self._listeners: dict[int, Listener] = {}
        self._files: dict[int, AnnouncedFile] = {}

    def count_open_files(self) -> int:
        """Return the number of announced files that may still grow."""
        return len(self._files)

    def allocate(self, listener: Listener | None, count: int) -> int:
        """Allocate `count` consecutive stream numbers for one listener and return the first number."""
        with self._lock:
            numbers = [next(self._numbers) for _ in range(count)]
            self._last_allocated = numbers[-1]
            if listener is not None:
                self._listeners.update(dict.fromkeys(numbers, listener))
        return numbers[0]

    def get_listener(self, number: int) -> Listener | None:
        """Return the listener of a stream that the head has allocated; `None` if the data goes into the inbox.

        Raises:
            FrameError: The head never allocated this stream.
        """
        if not 0 < number <= self._last_allocated:
            raise FrameError(f"data of stream {number}, which no request has named")
        return self._listeners.get(number)

    def record_announced_file(self, number: int, file: AnnouncedFile) -> None:
        """Record the file whose content the agent sends on this stream."""
        self._files[number] = file

    def get_announced_file(self, number: int) -> AnnouncedFile:
        """Return the file of a stream that the agent has announced.

        Raises:
            FrameError: The agent never announced this stream.
        """
        if number not in self._files:
            raise FrameError(f"data of stream {number}, which was never announced")
        return self._files[number]

    def forget_ended_files(self, run: str, attempt: int) -> None:
        """Forget the files of a run's attempts below `attempt`, which do not grow any more."""
        self._files = {
            number: file
            for number, file in self._files.items()
            if file.run != run or file.place is None or file.place[0] >= attempt
        }


class Session:
    """A session with the agent of `node`. Every method may be called from any thread.

    Attributes:
        node: The name of the node.
        epoch: The epoch in each request; `None` before the run has an epoch.
        preamble: The Python that the bootstrap script reported before the first frame.
        hello: The answer to the first request: facts about the machine and the user.
        host_key: The fingerprint of the node's host key, or `None`.
        warnings: Warnings about the connection for the user, one sentence each.
        connect_s: The seconds from the first packet to the end of the handshake; `None` if they were not measured.
    """

    def __init__(
        self, node: str, channel: Channel, preamble: Preamble, inbox: InboxItemQueue, *, epoch: int | None = None
    ) -> None:
        self.node = node
        self.epoch = epoch
        self.preamble = preamble
        self.hello: HelloAnswer = {}
        self.connect_s: float | None = None
        self.host_key = channel.host_key
        self.warnings = (*channel.warnings, *((channel.login_note,) if channel.login_note else ()))
        self._channel = channel
        self._inbox = inbox
        self._numbers = itertools.count(1)
        self._streams = StreamTable()
        self._lock = threading.Lock()
        self._sender = Sender(
            channel,
            lambda: self._clock.make_heartbeat_frame(next(self._numbers)),
            lambda _: self._end_as_lost(ConnectError(self.node, "the connection was lost")),
        )
        self._pending: dict[int, tuple[Command, Future[Any]]] = {}
        self._quota = SessionQuota()
        self._decoder = FrameDecoder(lambda: self._quota.get_max_message_bytes(MAX_FRAME_BYTES))
        self._has_reported_stale = False
        self._clock = ClockOffsetMeter(node)
        self._error: NodeError | None = None
        self._acknowledged_bytes = 0
        self._last_received_s = time.monotonic()

    def start(self, first: bytes = b"") -> None:
        """Start the threads. `first` holds the bytes that arrived together with the preamble."""
        threading.Thread(target=self._read, args=(first,), name=f"session-{self.node}", daemon=True).start()
        self._sender.start(f"sender-{self.node}")
        HEARTBEAT_TIMER.add(self)
        self.send_heartbeat()

    @property
    def alive(self) -> bool:
        """Whether the session is open: neither side has closed it and no error has ended it."""
        return self._error is None

    @property
    def clock(self) -> tuple[float, float] | None:
        """The node's wall clock minus the head's, and the maximum error of this difference, in seconds.

        `None` before the first measurement.
        """
        return self._clock.best_offset

    @property
    def silence_s(self) -> float:
        """The seconds since the node last sent or acknowledged any data."""
        return time.monotonic() - self._last_received_s

    def call(self, command: Command, arguments: Any = None, *, timeout: float | None = None) -> Any:
        """Send a request and wait for the answer. `request_definitions.Request.call` does the same with types.

        Args:
            command: The command.
            arguments: A mapping that JSON can represent, or a dataclass of `run_requests`.
            timeout: The time limit in seconds; by default the limit in `REQUESTS`.

        Raises:
            RefusedError: The node refused the command. `StaleEpochError`: it obeys a later controller.
            NotFoundError: The node has no such run, rank or file.
            AgentError: The command failed on the node, or the node did not answer within `timeout` seconds.
            NodeError: The session is lost.
        """
        future = self.call_async(command, arguments)
        timeout = REQUESTS[command].timeout_s if timeout is None else timeout
        try:
            return future.result(timeout)
        except FutureTimeoutError as error:
            with self._lock:
                self._pending = {n: entry for n, entry in self._pending.items() if entry[1] is not future}
            raise AgentError(self.node, f"no answer to `{command.value}` within {timeout:g}s") from error

    def call_async(self, command: Command, arguments: Any = None) -> Future[Any]:
        """Send a request. The returned future gets the answer, or the exception that `call` would raise.

        The reader thread runs the callbacks of the future.
        """
        number, message = next(self._numbers), _encode_arguments(arguments)
        future: Future[Any] = Future()
        try:
            frame = encode_message(make_request(number, command, message, self.epoch))
        except FrameTooLargeError as error:
            future.set_exception(NodeRefusedError(self.node, f"the request `{command.value}` cannot be sent: {error}"))
            return future
        with self._lock:
            if self._error is not None:
                future.set_exception(self._error)
                return future
            self._pending[number] = command, future
            self._quota.count_request(number, command, message)
        self._sender.put(frame)
        return future

    def post(self, command: Command, arguments: Any = None) -> None:
        """Send a request that has no answer. If the session is lost, drop the request."""
        number, message = next(self._numbers), _encode_arguments(arguments)
        with self._lock:
            self._quota.count_request(number, command, message)
        self._sender.put(encode_message(make_request(number, command, message, self.epoch)))

    def grant_credit(self, count: int) -> None:
        """Allow the node to send `count` more bytes of output."""
        self.post(Command.CREDIT, {"bytes": count})

    def allocate_streams(self, listener: Callable[[StreamData], None] | None = None, *, count: int = 1) -> int:
        """Allocate `count` consecutive stream numbers for a request and return the first number.

        Args:
            listener: The function that the reader thread calls with the data of these streams. During the call the
                session reads nothing else, so the node has to wait. With `None` the data goes into the inbox.
            count: The number of streams.
        """
        return self._streams.allocate(listener, count)

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream in frames of `CHUNK_BYTES`, and wait while the node is slow.

        An empty payload is sent as one empty frame.

        Raises:
            NodeError: The session is lost.
        """
        for start in range(0, len(payload) or 1, CHUNK_BYTES):
            self._sender.put_bulk(encode_data(stream, offset + start, payload[start : start + CHUNK_BYTES]))
            if self._error is not None:
                raise self._error

    def send_heartbeat(self) -> None:
        """Send a heartbeat now. The timer also sends a heartbeat every `HEARTBEAT_INTERVAL_S`."""
        self._sender.send_heartbeat()

    def close(self, *, error: NodeError | None = None) -> None:
        """End the session without waiting. All pending requests get `error`. A second call does nothing."""
        self._end(error or ConnectError(self.node, "the session was closed"))

    def tick(self, *, suspended_s: float) -> None:
        """Send a heartbeat if it is due; end the session if the node has been silent for `SILENCE_TIMEOUT_S`.

        Args:
            suspended_s: The seconds for which this process itself was suspended. These seconds do not count as silence.
        """
        self._last_received_s += suspended_s
        taken = self._channel.acknowledged_bytes
        if taken > self._acknowledged_bytes:
            # On a slow link, megabytes of unacknowledged data delay a heartbeat and its answer. Acknowledged bytes show
            # that the node is alive.
            self._acknowledged_bytes, self._last_received_s = taken, time.monotonic()
        if self.silence_s > SILENCE_TIMEOUT_S:
            text = f"no sign of life for {SILENCE_TIMEOUT_S:g}s"
            self._end_as_lost(ConnectError(self.node, text, hint="the machine or the network to it is down, or frozen"))
        elif time.monotonic() - self._clock.last_sent_s >= HEARTBEAT_INTERVAL_S:
            self.send_heartbeat()

    # --- reading

    def _read(self, first: bytes) -> None:
        data = first or self._receive()
        try:
            while data:
                self._last_received_s = time.monotonic()
                for frame in self._decoder.feed(data):
                    self._handle_frame(frame)
                data = self._receive()
            self._end_as_lost(self._make_loss_error())
        except FrameError as error:
            hint = "a program on the machine writes into clusterctl's connection, or the network damages the data"
            self._end_as_lost(ProtocolError(self.node, f"garbled answer: {str(error)[:_QUOTED_CHARACTERS]}", hint=hint))
        except Exception as error:  # A bug of clusterctl must not look like a silent node.
            self._end_as_lost(AgentError(self.node, f"the processing of its answer failed: {error!r}"))
            raise

    def _receive(self) -> bytes:
        try:
            return self._channel.recv(_READ_BYTES)
        except OSError:
            return b""

    def _make_loss_error(self) -> NodeError:
        stderr = " ".join(self._channel.stderr_tail().split())
        if stderr:
            return AgentError(self.node, f"the agent ended; it said: {stderr[-_QUOTED_CHARACTERS:]!r}")
        return ConnectError(self.node, "the connection was lost")

    def _handle_frame(self, frame: dict[str, Any] | StreamData) -> None:
        if isinstance(frame, StreamData):
            self._handle_data(frame)
        elif "push" in frame:
            self._handle_push(frame)
        elif "beat" in frame:
            self._handle_heartbeat_answer(frame)
        elif "id" in frame:
            self._handle_answer(frame)
        elif "ended" in frame:
            self._end_as_lost(self._make_loss_error())

    def _handle_data(self, data: StreamData) -> None:
        if data.stream >= FIRST_AGENT_STREAM:
            file = self._streams.get_announced_file(data.stream)
            with self._lock:
                self._quota.count_output(len(data.payload))
            self._inbox.put(OutputReceived(self.node, file.run, file.name, file.place, data.offset, data.payload))
            return
        listener = self._streams.get_listener(data.stream)
        if listener is None:
            self._quota.count_bytes_without_listener(len(data.payload))
            self._inbox.put(StreamReceived(self.node, data.stream, data.offset, data.payload))
        else:
            listener(data)

    def _handle_push(self, push: dict[str, Any]) -> None:
        if push["push"] == "stream":
            message_validators.STREAM_PUSH(push)
            place = message_validators.parse_stream_file_name(push["file"])
            self._quota.count_stream(push["stream"], self._streams.count_open_files())
            self._streams.record_announced_file(push["stream"], AnnouncedFile(push["run"], push["file"], place))
        elif push["push"] == "event":
            message_validators.EVENT_PUSH(push)
            self._quota.count_event(self._decoder.last_frame_bytes, time.monotonic())
            decoded = journal_lines.parse_event_record(push["event"])
            if decoded is not None:
                self._inbox.put(EventReceived(self.node, push["run"], *decoded, push["event"]))
        elif push["push"] == "complete":
            message_validators.ATTEMPTS_REPLICATED_PUSH(push)
            self._streams.forget_ended_files(push["run"], push["before"])
            self._inbox.put(AttemptsReplicated(self.node, push["run"], push["before"]))
        elif push["push"] == "stale":
            self._report_superseded()

    def _report_superseded(self) -> None:
        if not self._has_reported_stale:
            self._has_reported_stale = True
            self._inbox.put(ControllerSuperseded(self.node))

    def _handle_heartbeat_answer(self, answer: dict[str, Any]) -> None:
        message_validators.HEARTBEAT_ANSWER(answer)
        if (received := self._clock.measure_offset(answer)) is not None:
            self._inbox.put(received)

    def _handle_answer(self, answer: dict[str, Any]) -> None:
        number = answer["id"]
        with self._lock:
            pending = self._pending.get(number) if type(number) is int else None
        if pending is None:
            self._quota.end_request(number)
            return  # The time limit of the caller is over.
        command, future = pending
        # Validate the answer before the request is removed from `_pending`. If the answer is invalid, the session ends,
        # and the caller gets the error of the lost session.
        error = message_validators.validate_error_answer(command, answer["error"]) if "error" in answer else None
        result = REQUESTS[command].validate_answer(answer.get("result")) if error is None else {}
        with self._lock:
            self._pending.pop(number, None)
            self._quota.end_request(number)
        if error is None:
            future.set_result(result)
            return
        if error["kind"] == ErrorKind.STALE_EPOCH.value:
            self._report_superseded()
        future.set_exception(convert_error_answer(self.node, error))

    # --- ending

    def _end_as_lost(self, error: NodeError) -> None:
        if self._end(error):
            self._inbox.put(SessionLost(self.node, error))

    def _end(self, error: NodeError) -> bool:
        with self._lock:
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
