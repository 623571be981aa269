"""Ending a run whose supervisor hangs where no signal reaches it: by the marks alone, and without anybody's help."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from clusterctl.agent import aside, fold, journal, marks, run_commands, spawn, stopping

if TYPE_CHECKING:
    from clusterctl.agent.aside import Out
    from clusterctl.agent.rundir import RunDir


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
                state = fold.fold(journal.read(run.journal))
                stopping.end_all(marks.marks_of(run), run_commands.ledger_of(run, state), grace)
            finally:
                os._exit(0)
        return {}

    os.close(aside.fork(leave)[1])
