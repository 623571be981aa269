"""Our end of a stream that goes both ways holds the node to its window, and itself to the node's."""

from __future__ import annotations

import pytest

from clusterctl.agent.protocol.commands import WINDOW_BYTES, Command
from clusterctl.agent.protocol.frames import FrameError, StreamData
from clusterctl.session.streams import Duplex, Streams


class End:
    """A stream, and all that it did."""

    def __init__(self) -> None:
        self.streams = Streams()
        self.sent: list[tuple[int, bytes]] = []
        self.taken: list[int] = []
        self.woken = 0
        self.stream = Duplex(
            self.streams, lambda _, offset, data: self.sent.append((offset, data)), self._post, self._wake
        )

    def _post(self, command: Command, asked: dict[str, int]) -> None:
        assert (command, asked["stream"]) == (Command.TAKEN, self.stream.number)
        self.taken.append(asked["bytes"])

    def _wake(self) -> None:
        self.woken += 1

    def arrive(self, payload: bytes) -> None:
        listener = self.streams.listener(self.stream.number)
        assert listener is not None
        listener(StreamData(self.stream.number, 0, payload))


@pytest.fixture
def end() -> End:
    return End()


def test_what_comes_is_read_piece_by_piece_and_wakes_its_reader(end: End) -> None:
    for piece in (b"one", b"two", b""):
        end.arrive(piece)

    assert [end.stream.read() for _ in range(4)] == [b"one", b"two", b"", None]
    assert end.woken == 3


def test_the_last_bytes_taken_are_told_at_once(end: End) -> None:
    end.arrive(b"word")
    end.stream.read()
    end.stream.taken(4)

    assert end.taken == [4]


def test_bytes_taken_of_a_flood_are_told_in_large_portions(end: End) -> None:
    for _ in range(100):
        end.arrive(bytes(1024))
    for _ in range(99):
        end.stream.read()
        end.stream.taken(1024)

    assert end.taken == [WINDOW_BYTES // 8] * 3


def test_a_node_that_sends_more_than_its_window_breaks_the_protocol(end: End) -> None:
    end.arrive(bytes(WINDOW_BYTES))
    with pytest.raises(FrameError, match="1 bytes beyond what was taken"):
        end.arrive(b"!")


def test_what_was_taken_may_be_sent_again(end: End) -> None:
    end.arrive(bytes(WINDOW_BYTES))
    end.stream.read()
    end.stream.taken(WINDOW_BYTES)
    end.arrive(bytes(WINDOW_BYTES))

    assert end.stream.read() == bytes(WINDOW_BYTES)


def test_room_shrinks_with_what_is_sent_and_grows_with_what_the_node_took(end: End) -> None:
    end.stream.send(b"12345")
    end.stream.send(b"67")
    assert end.stream.room == WINDOW_BYTES - 7

    end.streams.taken(end.stream.number, 5)

    assert end.stream.room == WINDOW_BYTES - 2
    assert end.sent == [(0, b"12345"), (5, b"67")]


def test_a_node_that_takes_more_than_was_sent_breaks_the_protocol(end: End) -> None:
    end.stream.send(b"12345")
    with pytest.raises(FrameError, match="more was taken than was sent"):
        end.streams.taken(end.stream.number, 6)


def test_of_a_stream_that_is_forgotten_nothing_matters_any_more(end: End) -> None:
    end.stream.forget()
    end.arrive(bytes(2 * WINDOW_BYTES))
    end.streams.taken(end.stream.number, 2 * WINDOW_BYTES)

    assert end.stream.read() is None
