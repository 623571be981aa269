"""What a head does that may have few files open: it goes on with those, and waits where there are none at all."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.run.controller.control_socket import ControlServer
from clusterctl.run.controller.replication import ReplicaQueue
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import create_run_dir
from clusterctl.session.controller_inbox import OutputReceived


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Leave this process room for so many more open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunDirWriter]:
    made = RunDirWriter(create_run_dir("few", tmp_path))
    yield made
    made.close()


def test_replicas_of_more_files_than_may_be_open_are_whole(tmp_path: Path) -> None:
    files = [f"attempt-0/rank-{rank}.log" for rank in range(100)]
    with descriptors_left(12):
        writer = RunDirWriter(create_run_dir("few", tmp_path))
        for offset, text in ((0, b"one "), (4, b"two")):
            for file in files:
                writer.replicate("n1", file, offset, text)
        writer.close()

    assert {(writer.run.node("n1") / file).read_bytes() for file in files} == {b"one two"}


def test_the_output_of_64_nodes_with_8_ranks_leaves_room_for_their_connections_however_many_attempts_there_were(
    tmp_path: Path,
) -> None:
    nodes, limit = [f"n{number}" for number in range(64)], 1024
    output = [
        f"attempt-{attempt}/rank-{{}}.{kind}" for attempt in range(3) for kind in ("log", "idx") for _ in range(8)
    ]
    with descriptors_left(0), contextlib.ExitStack() as stack:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        writer = stack.enter_context(contextlib.closing(RunDirWriter(create_run_dir("many", tmp_path))))
        connections = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in nodes]
        for number, node in enumerate(nodes):
            writer.append_node_event(node, {"seq": 1})
            for local, file in enumerate(output):
                writer.replicate(node, file.format(8 * number + local % 8), 0, b"x")
        # Each can be dialed anew while the old one is still open.
        connections += [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in nodes]

        assert writer.flush()
        assert sum(len(writer.list_cursors(node)) for node in nodes) == len(nodes) * len(output) > limit


def test_output_waits_for_a_descriptor_and_a_person_is_told_why(writer: RunDirWriter) -> None:
    stored: list[OutputReceived] = []
    said: list[str] = []
    intake = ReplicaQueue(writer, lambda item, _size: stored.append(item), lambda text, _level: said.append(text))
    pieces = [OutputReceived("n1", "r", "attempt-0/rank-0.log", (0, 0), at, b"abc") for at in (0, 3)]

    with descriptors_left(0):
        for piece in pieces:
            intake.store_or_queue(piece)
        assert (stored, intake.is_paused) == ([], True)
    intake._retry_at = 0.0
    intake.retry_queued()

    assert stored == pieces
    assert (writer.run.node("n1") / pieces[0].file).read_bytes() == b"abcabc"
    assert said == [
        "the head cannot open more files (`ulimit -n`): replication waits, workers are not affected",
        "the head can open files again: replication continues",
    ]


def test_events_wait_for_a_descriptor_and_keep_their_order(writer: RunDirWriter) -> None:
    with descriptors_left(0):
        for seq in range(3):
            writer.append_node_event("n1", {"seq": seq})
        assert not writer.flush()
    assert writer.flush()

    lines = (writer.run.node("n1") / "journal.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [0, 1, 2]


def test_a_controller_without_a_descriptor_for_a_peer_hears_it_as_soon_as_there_is_one() -> None:
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()
    address = f"\0clusterctl-test-{os.getpid()}-{os.urandom(4).hex()}"
    commands: set[str] = set()
    with contextlib.closing(ControlServer(address, heard.put)), contextlib.ExitStack() as stack:
        peers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        with descriptors_left(0), contextlib.suppress(queue.Empty):
            for number, peer in enumerate(peers):
                peer.connect(address)
                peer.sendall(b'{"command": "%d"}\n' % number)
            # The kernel takes a descriptor before a peer is there: for the first there may be one.
            while True:
                commands.add(heard.get(timeout=0.5).command)
        while len(commands) < len(peers):
            commands.add(heard.get(timeout=10).command)
