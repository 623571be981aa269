"""What holds for a session whatever the transport: the local and the SSH tests both run this suite.

A subclass gives the fixture `reach`: a transport and a host that it reaches, with a home of its own.
"""

from __future__ import annotations

import functools
import hashlib
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import clusterctl
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.events import Prepared
from clusterctl.errors import AgentError, NodeError, NotFoundError, RefusedError
from clusterctl.session.connect import open_session
from clusterctl.session.controller_inbox import (
    ClockMeasured,
    EventReceived,
    InboxItem,
    OutputReceived,
    SessionLost,
    StreamReceived,
)
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import StaleEpochError
from clusterctl.transport.agent_archive import AgentArchive, pack_files

if TYPE_CHECKING:
    from clusterctl.config.spec import HostSpec
    from clusterctl.transport.interfaces import Transport

Reach = tuple["Transport", "HostSpec"]
Open = Callable[..., Session]
DEADLINE = 20.0


@functools.cache
def standin_bundle(salt: bytes = b"") -> AgentArchive:
    """The stand-in agent, in place of the real one; another salt makes another bundle."""
    package = Path(clusterctl.__file__).parent
    return pack_files(
        {
            "__main__.py": b"import sys, standin_agent\nsys.exit(standin_agent.main())\n",
            "standin_agent.py": Path(__file__).with_name("standin_agent.py").read_bytes(),
            "clusterctl/__init__.py": b"# " + salt.hex().encode(),
            "clusterctl/agent/__init__.py": b"",
            **{
                f"clusterctl/agent/{name}.py": (package / "agent" / f"{name}.py").read_bytes()
                for name in (
                    "protocol/__init__",
                    "protocol/command_messages",
                    "protocol/frames",
                    "protocol/frozen_dataclass",
                )
            },
        }
    )


def next_of(inbox: queue.SimpleQueue[InboxItem], kind: type[Any]) -> Any:
    """The next item of that kind; others are passed over."""
    while True:
        item = inbox.get(timeout=DEADLINE)
        if isinstance(item, kind):
            return item


class SessionContract:
    @pytest.fixture
    def inbox(self) -> queue.SimpleQueue[InboxItem]:
        return queue.SimpleQueue()

    @pytest.fixture
    def opened(self, reach: Reach, inbox: queue.SimpleQueue[InboxItem]) -> Iterator[Open]:
        sessions: list[Session] = []

        def make(**options: Any) -> Session:
            sessions.append(open_session(*reach, inbox, bundle=standin_bundle(), **options))
            return sessions[-1]

        yield make
        for session in sessions:
            session.close()

    def test_the_agent_is_sent_once_and_found_from_then_on(self, opened: Open) -> None:
        first, second = opened(), opened()
        assert (first.preamble.archive_sent, second.preamble.archive_sent) == (True, False)
        assert second.hello["python_of"] >= [3, 9]

    def test_whoever_waits_is_told_each_stage(self, opened: Open) -> None:
        stages: list[str] = []
        opened(progress=stages.append)
        assert stages[-4:] == ["connected, looking for Python", "sending the agent", "agent started", "joined"]

    def test_every_request_carries_the_epoch_of_the_session(self, opened: Open) -> None:
        session = opened(epoch=3)
        assert session.hello["epoch"] == 3
        session.epoch = 4
        assert session.call(Command.RUNS)["epoch"] == 4

    def test_requests_of_many_threads_get_their_own_answers(self, opened: Open) -> None:
        session = opened()
        with ThreadPoolExecutor(16) as pool:
            answers = list(pool.map(lambda i: session.call(Command.RUNS, {"i": i})["echo"]["i"], range(200)))
        assert answers == list(range(200))

    def test_text_of_any_kind_arrives_unchanged(self, opened: Open) -> None:
        values = ["a'; echo foo", "$(id)", "new\nline", "-x", "\u00e4\u2603", "\udce4 no UTF-8", ""]
        assert opened().call(Command.RUNS, {"values": values})["echo"] == {"values": values}

    def test_a_stream_from_the_node_arrives_whole_and_in_order(self, opened: Open) -> None:
        session = opened()
        parts: list[tuple[int, bytes]] = []
        stream = session.allocate_streams(lambda data: parts.append((data.offset, data.payload)))
        answer = session.call(Command.FETCH, {"stream": stream, "bytes": 5_000_001})
        data = b"".join(payload for _, payload in parts)
        assert [offset for offset, _ in parts] == list(range(0, 5_000_001, 65536))
        assert answer["sha256"] == hashlib.sha256(data).hexdigest()

    def test_a_stream_nobody_listens_to_goes_into_the_inbox(
        self, opened: Open, inbox: queue.SimpleQueue[InboxItem]
    ) -> None:
        session = opened()
        stream = session.allocate_streams(count=2)
        session.call(Command.FETCH, {"stream": stream + 1, "bytes": 3})
        item = next_of(inbox, StreamReceived)
        assert (item.node, item.stream, item.offset, len(item.payload)) == (session.node, stream + 1, 0, 3)

    def test_a_stream_to_the_node_arrives_whole_and_in_order(self, opened: Open) -> None:
        session = opened()
        data = bytes(range(256)) * 20_000
        stream = session.allocate_streams()
        session.call(Command.RECEIVE, {"stream": stream})
        session.send_data(stream, 0, data)
        answer = session.call(Command.MANIFEST, {"stream": stream})
        assert answer == {"need": [], "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def test_what_the_agent_says_by_itself_goes_into_the_inbox(
        self, opened: Open, inbox: queue.SimpleQueue[InboxItem]
    ) -> None:
        session = opened()
        session.call(Command.FOLLOW)
        event = next_of(inbox, EventReceived)
        assert (event.node, event.run, event.stamp.seq, event.event) == (session.node, "r", 7, Prepared(0, [4]))
        output = next_of(inbox, OutputReceived)
        assert output == OutputReceived(session.node, "r", "attempt-0/rank-0.log", (0, 0), 10, b"hello")

    def test_credit_is_given_without_an_answer(self, opened: Open) -> None:
        session = opened()
        session.grant_credit(1000)
        session.grant_credit(24)
        assert session.call(Command.RUNS)["credits"] == 1024

    def test_beats_measure_the_clocks_of_the_node(self, opened: Open, inbox: queue.SimpleQueue[InboxItem]) -> None:
        opened()
        beat = next_of(inbox, ClockMeasured)
        assert abs(beat.mono_offset_s - 50) <= beat.error_s + 0.01
        assert abs(beat.wall_offset_s - 100) <= beat.error_s + 0.01
        assert beat.boot == "boot"

    @pytest.mark.parametrize(
        ("kind", "error"),
        [
            ("refused", RefusedError),
            ("stale_epoch", StaleEpochError),
            ("not_found", NotFoundError),
            ("failed", AgentError),
            ("bad_request", AgentError),
        ],
    )
    def test_a_refusal_becomes_the_error_of_its_kind(self, opened: Open, kind: str, error: type[Exception]) -> None:
        with pytest.raises(error, match="it says no") as caught:
            opened().call(Command.CLEAN, {"kind": kind})
        assert getattr(caught.value, "hint", None) == "the node says: do this"

    def test_a_missing_answer_is_an_error_and_the_session_goes_on(self, opened: Open) -> None:
        session = opened()
        with pytest.raises(AgentError, match=r"no answer to `status` within 0.2s"):
            session.call(Command.STATUS, timeout=0.2)
        assert session.call(Command.RUNS)["echo"] == {}

    def test_an_agent_that_dies_is_quoted_and_fails_whoever_waits(
        self, opened: Open, inbox: queue.SimpleQueue[InboxItem]
    ) -> None:
        session = opened()
        waiting = session.call_async(Command.STATUS)
        session.post(Command.EVIDENCE)
        lost = next_of(inbox, SessionLost)
        assert "RuntimeError: something broke" in str(lost.error)
        assert waiting.exception(DEADLINE) is lost.error
        assert not session.alive
        with pytest.raises(NodeError):
            session.call(Command.RUNS)

    def test_noise_among_frames_ends_the_session_and_is_quoted(
        self, opened: Open, inbox: queue.SimpleQueue[InboxItem]
    ) -> None:
        opened().post(Command.PROBE)
        lost = next_of(inbox, SessionLost)
        assert isinstance(lost.error, AgentError)
        assert "garbled answer" in str(lost.error)
        assert "Segmentation fault" in str(lost.error)

    def test_closing_fails_whoever_waits_and_is_not_a_loss(
        self, opened: Open, inbox: queue.SimpleQueue[InboxItem]
    ) -> None:
        session = opened()
        waiting = session.call_async(Command.STATUS)
        session.close()
        session.close()
        assert isinstance(waiting.exception(DEADLINE), NodeError)
        reader = next((t for t in threading.enumerate() if t.name == f"session-{session.node}"), None)
        if reader is not None:
            reader.join(DEADLINE)
            assert not reader.is_alive()
        while not inbox.empty():
            assert not isinstance(inbox.get(), SessionLost)
