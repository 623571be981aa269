"""A number that a node's journal lacks for good: it is asked for, then passed over and said, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc
from clusterctl.agent.members import guardians
from clusterctl.agent.protocol.events import Alarm, Stamp, encode_event
from clusterctl.agent.record.rundir import RunDir
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def test_a_run_goes_on_over_a_gap_in_a_journal_and_says_so(head: LocalHead) -> None:
    gate = head.folder / "gate"
    head.write_local({"command": f"while [ ! -e {gate} ]; do sleep 0.1; done; exit 3"})
    run = head.start()
    node = RunDir(head.env["XDG_STATE_HOME"] + "/clusterctl", run, "localhost")
    with open(node.journal, "rb+", buffering=0) as journal:
        last = json.loads(journal.read().splitlines()[-1])["seq"]
        stamp = Stamp(last + 2, time.time(), time.monotonic(), proc.boot_id())
        journal.write(encode_event(stamp, Alarm(0, "test", "behind the gap")).encode() + b"\n")
    supervisor = guardians.supervisor(node)
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)  # the next one goes on with the numbers of the file

    def said() -> list[str]:
        events = (head.folder.parent / f"state/clusterctl/runs/{run}/events.jsonl").read_text()
        return [
            note for line in events.splitlines() if "its journal lacks" in (note := json.loads(line).get("text", ""))
        ]

    wait_for(said, what="the gap to be told", every=0.1)
    gate.touch()

    assert head.run("wait", run).returncode == 100
    assert head.json("status", run)["cause"]["exit_code"] == 3
    assert said() == [f"localhost: its journal lacks what came behind number {last}"]
