"""The event loop of the agent."""

from __future__ import annotations

import os

from clusterctl.agent.linux.event_loop import EventLoop


def test_an_event_of_a_closed_descriptor_is_not_given_to_the_next_owner_of_its_number() -> None:
    loop, received = EventLoop(), []
    first, first_end = os.pipe()
    closed, closed_end = os.pipe()
    fresh: list[int] = []

    def read() -> None:
        # Fails where nothing is to be read.
        received.append(os.read(closed, 8))
        loop.stop()

    def write() -> None:
        os.write(fresh[1], b"its own")

    def replace() -> None:
        os.read(first, 1)
        loop.remove_descriptor(closed)
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        os.dup2(read_end, closed)
        os.close(read_end)
        fresh.extend((closed, write_end))
        loop.on_readable(closed, read)
        loop.call_later(0.05, write)

    loop.on_readable(first, replace)
    loop.on_readable(closed, lambda: None)
    os.write(first_end, b"x")
    os.close(closed_end)
    try:
        loop.run()
        assert received == [b"its own"]
    finally:
        for fd in (first, first_end, *fresh):
            os.close(fd)
