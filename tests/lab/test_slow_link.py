"""Links that are slow and far: what moves is alive, what does not is noticed, and nothing arrives after an end."""

from __future__ import annotations

import os
import queue
import time
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.config.spec import HostSpec, SshSpec, SyncSpec
from clusterctl.run.nodes.code_manifest import ContentStore, build_manifest
from clusterctl.run.nodes.uploads import build_code_upload, sync_files
from clusterctl.session.connect import open_session
from clusterctl.session.controller_inbox import InboxItem, SessionLost
from clusterctl.session.node_session import Session
from clusterctl.transport.ssh.paramiko_transport import SshTransport
from tests.contract_sessions import DEADLINE, next_of
from tests.relay import Relay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.lab.conftest import NodeFactory

    Open = Callable[..., Session]

RATE, DELAY = 500_000, 0.15


@pytest.fixture
def dial() -> Iterator[Open]:
    """Opens a session through a link."""
    opened: list[Session] = []
    transport = SshTransport(SshSpec(host_keys="accept-new", connect_timeout=30.0))

    def make(link: Relay, inbox: Any = None) -> Session:
        host = HostSpec(name="far", host="far", address=link.address, port=link.port, user="root")
        inbox = queue.SimpleQueue() if inbox is None else inbox
        opened.append(open_session(transport, host, inbox))
        return opened[-1]

    yield make
    for session in opened:
        session.close()
    transport.close()


def test_a_sync_may_take_longer_than_silence_is_borne(nodes: NodeFactory, dial: Open, tmp_path: Path) -> None:
    (node,) = nodes()
    files = {"weights.bin": os.urandom(8_200_000), "pkg/train.py": b"print(1)\n", "pkg/empty": b""}
    for name, content in files.items():
        (tmp_path / "code" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "code" / name).write_bytes(content)
    store = ContentStore(tmp_path / "content")
    upload = build_code_upload(build_manifest(SyncSpec(source=str(tmp_path / "code")), store), store)
    with Relay((node.address, 22), rate=RATE, delay=DELAY) as link:
        session = dial(link)
        before = time.monotonic()
        assert sync_files(session, "~/code", upload, run=None, on_activity=lambda _: None)[0] == 3
        assert time.monotonic() - before > 16.0
        assert sync_files(session, "~/code", upload, run=None, on_activity=lambda _: None)[0] == 0
        session.close()
    assert {name: node.path(f"/root/code/{name}").read_bytes() for name in files} == files


def test_a_link_that_stalls_is_noticed_although_our_kernel_still_takes_what_we_say(
    nodes: NodeFactory, dial: Open
) -> None:
    (node,) = nodes()
    inbox: queue.SimpleQueue[InboxItem] = queue.SimpleQueue()
    with Relay((node.address, 22), delay=DELAY) as link:
        session = dial(link, inbox)
        link.stall()
        before = time.monotonic()
        while session.alive and time.monotonic() < before + DEADLINE:
            session.grant_credit(1)
            time.sleep(0.1)
        assert "no sign of life for 15s" in str(next_of(inbox, SessionLost).error)
        assert 10.0 < time.monotonic() - before < 18.0
