"""Ending a run whose supervisor hangs where no signal reaches it: by the marks alone, and without anybody's help."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from clusterctl.agent.linux import aside, spawn
from clusterctl.agent.members import marks
from clusterctl.agent.record import journal
from clusterctl.agent.record.state import fold
from clusterctl.agent.serve import summary
from clusterctl.agent.supervisor import ladder

if TYPE_CHECKING:
    from clusterctl.agent.linux.aside import Out
    from clusterctl.agent.record.rundir import RunDir


def sweep(run: RunDir, grace: float) -> None:
    """Begin to end everything of a run on this node but who guards it; it goes on without whoever asked for it.

    Raises:
        OSError: No process is to be had.
    """

    def leave(_out: Out) -> dict[str, Any]:
        if os.fork() == 0:
            try:
                os.setsid()
                spawn.close_all(())
                state = fold(journal.read(run.journal))
                ladder.end_all(marks.marks_of(run), summary.ledger_of(run, state), grace)
            finally:
                os._exit(0)
        return {}

    _, answer = aside.fork(leave)
    try:
        # Until it has left, it would end with this process, whose controller may go at once when it hears of it.
        os.read(answer, 1)
    finally:
        os.close(answer)
