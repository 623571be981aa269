"""Links that are slow and far: what moves is alive, what does not is noticed, and nothing arrives after an end."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol import Command
from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.session import Item, Session, SessionLost
from clusterctl.sessions import open_session
from clusterctl.transport.ssh import SshTransport
from tests.contract_sessions import DEADLINE, next_of, standin_bundle
from tests.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.conftest import NodeFactory

    Open = Callable[..., Session]

RATE, DELAY = 500_000, 0.15


@pytest.fixture
def dial() -> Iterator[Open]:
    """Opens a session with the stand-in agent through a link."""
    opened: list[Session] = []
    transport = SshTransport(SshSpec(host_keys="accept-new", connect_timeout=30.0))

    def make(link: Relay, inbox: Any = None) -> Session:
        host = HostSpec(name="far", host="far", address=link.address, port=link.port, user="root")
        inbox = queue.SimpleQueue() if inbox is None else inbox
        opened.append(open_session(transport, host, inbox, bundle=standin_bundle()))
        return opened[-1]

    yield make
    for session in opened:
        session.close()
    transport.close()


def test_sending_for_longer_than_silence_is_borne_keeps_a_session(nodes: NodeFactory, dial: Open) -> None:
    (node,) = nodes()
    data = bytes(8_200_000)
    inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
    with Relay((node.address, 22), rate=RATE, delay=DELAY) as link:
        session = dial(link, inbox)
        stream = session.new_stream()
        session.call(Command.RECEIVE, {"stream": stream})
        before = time.monotonic()
        session.send_data(stream, 0, data)
        answer = session.call(Command.MANIFEST, {"stream": stream})
        assert time.monotonic() - before > 16.0
        assert answer["size"] == len(data)
        session.close()


def test_a_link_that_stalls_is_noticed_although_our_kernel_still_takes_what_we_say(
    nodes: NodeFactory, dial: Open
) -> None:
    (node,) = nodes()
    inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
    with Relay((node.address, 22), delay=DELAY) as link:
        session = dial(link, inbox)
        link.stall()
        before = time.monotonic()
        while session.alive and time.monotonic() < before + DEADLINE:
            session.credit(1)
            time.sleep(0.1)
        assert "no sign of life for 15s" in str(next_of(inbox, SessionLost).error)
        assert 10.0 < time.monotonic() - before < 18.0
