"""Events that a node's journal lacks: the run says so, and takes every event that is there."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol.events import Alarm, Stamp, encode_event
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def test_a_run_says_that_events_are_missing_and_takes_every_event_behind_them(head: LocalHead) -> None:
    gate = head.folder / "gate"
    head.write_local({"command": f"while [ ! -e {gate} ]; do sleep 0.1; done; exit 3"})
    run = head.start()
    node = RunDir(head.env["XDG_STATE_HOME"] + "/clusterctl", run, "localhost")
    with open(node.journal_file, "rb+", buffering=0) as journal:
        last = json.loads(journal.read().splitlines()[-1])["seq"]
        for seq in (last + 2, last + 3, last + 5):
            stamp = Stamp(seq, time.time(), time.monotonic(), proc.read_boot_id())
            journal.write(encode_event(stamp, Alarm(0, "test", f"event {seq}")).encode() + b"\n")
    supervisor = run_processes.find_supervisor(node)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)  # the next one goes on with the numbers of the file

    records = head.folder.parent / f"state/clusterctl/runs/{run}"

    def texts(file: str, key: str) -> list[str]:
        return [json.loads(line).get(key, "") for line in (records / file).read_text().splitlines()]

    def notes() -> list[str]:
        return [text for text in texts("events.jsonl", "text") if "its journal lacks" in text]

    wait_for(lambda: len(notes()) == 2, what="the notes on both gaps", every=0.1)
    gate.touch()

    assert head.run("wait", run).returncode == 100
    assert head.json("status", run)["cause"]["exit_code"] == 3
    assert notes() == [f"localhost: its journal lacks 1 event before number {last + 2 + 3 * i}" for i in (0, 1)]
    replica = texts("nodes/localhost/journal.jsonl", "message")
    assert [text for text in replica if text.startswith("event ")] == [f"event {last + n}" for n in (2, 3, 5)]
