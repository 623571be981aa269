"""A node whose run has a long journal, and a controller that is slow to hear it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import events

if TYPE_CHECKING:
    from tests.agent.conftest import Node

EVENTS = 50_000
MOST_KB = 8 << 10
ALARM = events.Alarm(0, "code", "x" * 200)


def resident_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def lines(first: int, last: int) -> bytes:
    stamps = (events.Stamp(number, 0.0, 0.0, "boot") for number in range(first, last + 1))
    return b"".join(events.encode_event(stamp, ALARM).encode() + b"\n" for stamp in stamps)


def test_a_long_journal_waits_on_the_disk_for_a_controller_that_is_slow_and_arrives_whole(node: Node) -> None:
    node.folder.mkdir(parents=True)
    journal = os.open(node.folder / "journal.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(journal, lines(1, 1))
    talk = node.talk()
    node.follow(talk)
    talk.until(lambda: talk.events)
    before = resident_kb(talk.process.pid)
    rest = lines(2, EVENTS)
    assert os.write(journal, rest) == len(rest)
    os.close(journal)
    talk.until(lambda: len(talk.events) == EVENTS, 60)
    assert [event["seq"] for event in talk.events] == list(range(1, EVENTS + 1))
    assert resident_kb(talk.process.pid) - before < MOST_KB
