"""Output reaches the controller byte by byte, on credit, and a full disk kills nobody."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time

import pytest

from clusterctl.agent.protocol import frames, run_files
from clusterctl.agent.protocol.command_messages import Command
from tests.agent.conftest import BIN, Node

LOG = "attempt-0/rank-0.log"
INDEX = "attempt-0/rank-0.idx"
MEGABYTES = 50


def flood(megabytes: int) -> bytes:
    out = subprocess.run([sys.executable, str(BIN / "flood.py"), str(megabytes)], capture_output=True, check=True)
    return out.stdout


@pytest.mark.parametrize("pace", [0.0, 0.25], ids=["at once", "at a pace"])
def test_a_flood_arrives_byte_for_byte(node: Node, pace: float) -> None:
    expected = flood(MEGABYTES)
    talk = node.talk()
    node.prepare(talk, 1)
    node.follow(talk, pace=pace)
    node.start(talk, [sys.executable, str(BIN / "flood.py"), str(MEGABYTES)])
    talk.wait_for("swept")
    talk.until(lambda: len(talk.files.get(LOG, b"")) >= len(expected), 60)
    assert bytes(talk.files[LOG]) == expected


def test_no_more_than_the_credit_is_sent_and_events_pass_it(node: Node) -> None:
    talk = node.talk()
    talk.greedy = False
    node.launch([sys.executable, str(BIN / "flood.py"), "5"], talk=talk)
    talk.wait_for("swept")
    talk.beat(1)
    talk.until(lambda: talk.beats)
    assert talk.received == frames.INITIAL_CREDIT_BYTES
    talk.post(Command.CREDIT, bytes=1000)
    talk.until(lambda: talk.received == frames.INITIAL_CREDIT_BYTES + 1000)


def test_little_output_waits_for_the_pace_that_was_asked_for_and_events_pass_it(node: Node) -> None:
    go, talk = node.home / "go", node.talk()
    node.prepare(talk, 1)
    node.follow(talk, pace=3600.0)
    node.start(talk, ["/bin/sh", "-c", f"echo one; until [ -e {go} ]; do sleep 0.05; done; echo two"])
    talk.until(lambda: talk.files)
    go.touch()
    talk.wait_for("swept")
    talk.beat(1)
    talk.until(lambda: talk.beats)
    assert b"two" not in talk.files.get(LOG, b"")
    node.follow(talk, seq=talk.events[-1]["seq"], cursors={name: len(held) for name, held in talk.files.items()})
    talk.until(lambda: talk.files.get(LOG) == b"one\ntwo\n")


def test_the_index_tells_when_each_byte_was_written(node: Node) -> None:
    talk = node.launch(["/bin/sh", "-c", "echo one; sleep 0.8; echo two"])
    talk.wait_for("swept")
    talk.until(lambda: len(talk.files.get(INDEX, b"")) >= 2 * run_files.INDEX_RECORD.size)
    records = list(run_files.INDEX_RECORD.iter_unpack(bytes(talk.files[INDEX])))
    assert [size for size, _ in records] == [4, 8]
    assert 0.3 < records[1][1] - records[0][1] < 1.5
    assert abs(records[1][1] - time.time()) < 30


def test_a_part_of_a_file_can_be_read_without_following(node: Node) -> None:
    talk = node.launch(["/bin/sh", "-c", "echo 0123456789"])
    talk.wait_for("swept")
    answer = talk.ask(Command.READ, **node.where, file=LOG, offset=3, length=4)
    assert (base64.b64decode(answer["data"]), answer["size"], answer["first_valid"]) == (b"3456", 11, 0)
    answer = talk.ask(Command.READ, **node.where, file=LOG, offset=-4, length=100)
    assert (base64.b64decode(answer["data"]), answer["offset"]) == (b"789\n", 7)


def test_a_full_disk_kills_no_worker_and_what_is_dropped_is_counted(small_disk: Node) -> None:
    expected = flood(30)
    talk = small_disk.talk()
    talk.greedy = False
    small_disk.launch([sys.executable, str(BIN / "flood.py"), "30", "slow"], talk=talk, reserve=2 << 20)
    talk.wait_for("swept", seconds=60)
    assert talk.exits()[0]["exit_code"] == 0, talk.exits()[0]["tail"][-300:]
    assert "disk_full" in [event["code"] for event in talk.of("alarm")]
    lost = talk.of("dropped")
    assert lost
    assert sum(event["lost"] for event in lost) == lost[-1]["first_valid"]
    first_valid = lost[-1]["first_valid"]
    again = small_disk.talk()
    small_disk.follow(again)
    again.until(lambda: again.starts.get(LOG, 0) + len(again.files.get(LOG, b"")) == len(expected), 60)
    assert again.starts[LOG] == first_valid
    assert bytes(again.files[LOG]) == expected[first_valid:]


def test_beyond_max_size_what_is_replicated_is_given_back(node: Node) -> None:
    limit = 4 << 20
    talk = node.launch([sys.executable, str(BIN / "flood.py"), "20", "slow"], max_size=limit, reserve=0)
    while not talk.of("exited"):
        talk.read(1)
        talk.post(Command.REPLICATED, **node.where, offsets={LOG: len(talk.files.get(LOG, b""))})
    talk.wait_for("swept")
    assert all(event["lost"] == 0 for event in talk.of("dropped"))
    assert talk.of("dropped")
    expected = flood(20)
    talk.until(lambda: len(talk.files[LOG]) == len(expected))
    assert bytes(talk.files[LOG]) == expected
    assert (node.folder / LOG).stat().st_blocks * 512 < 16 << 20


def test_samples_are_sent_from_where_they_are_still_kept(node: Node) -> None:
    talk = node.launch(["/bin/sleep", "60"], sample_seconds=0.2)
    samples = run_files.SAMPLES_FILE
    talk.until(lambda: talk.files.get(samples))
    size = 3 * run_files.MAX_SAMPLES_BYTES
    os.truncate(node.folder / samples, size)
    first = run_files.find_first_kept_byte(size, run_files.MAX_SAMPLES_BYTES)

    again = node.talk()
    node.follow(again)
    again.until(lambda: samples in again.starts)
    assert again.starts[samples] == first
    answer = again.ask(Command.READ, **node.where, file=samples, offset=0, length=100)
    assert (answer["offset"], answer["first_valid"]) == (first, first)
    assert base64.b64decode(answer["data"]) == bytes(100)
