"""A script that writes `> /dev/stderr`, as a person runs it: all of its output is there, and what to write instead is said."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from tests.lab.faulty import controller_pid
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

EMPTIES = "echo a warning > /dev/stderr; echo behind it"
EMPTIES_AGAIN = "echo again > /dev/stderr; echo end"


def lines(head: LocalHead, run: str) -> list[str]:
    return head.run("logs", "--no-prefix", run).stdout.splitlines()


def test_what_a_script_writes_before_and_behind_is_shown_and_the_remedy_said_once(head: LocalHead) -> None:
    gates = [head.folder / name for name in ("one", "two")]
    wait = "while [ ! -e {} ]; do sleep 0.05; done; "
    head.write_local({"command": f"seq 99; {wait.format(gates[0])}{EMPTIES}; {wait.format(gates[1])}{EMPTIES_AGAIN}"})
    run = head.start()
    # Each time fewer bytes follow: an emptied file is noticed by its smaller size.
    first = [str(number) for number in range(1, 100)]
    wait_for(lambda: lines(head, run) == first, what="the first lines", every=0.2)
    gates[0].touch()
    before = [*first, "a warning", "behind it"]
    wait_for(lambda: lines(head, run) == before, what="what follows", every=0.2)
    os.kill(controller_pid(head, run), signal.SIGKILL)
    wait_for(lambda: not head.json("status", run)["attended"], what="the controller to be gone", every=0.2)
    gates[1].touch()
    attached = head.run("attach", "--adopt", run)

    assert attached.returncode == 0, attached.stderr
    assert attached.stderr.count("rank 0 has emptied its own output") == 1
    assert "`>> /dev/stderr`" in attached.stderr
    shown = lines(head, run)
    assert shown[: len(before)] == before
    assert shown[-2:] == ["again", "end"]
    assert len(shown) - len(before) in (2, 3)  # between them nothing, or the place of what nobody had been sent
