"""`down --stalled`: which runs may be stalled, and how one is ended only if it still is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.cli.lookup.controllers import ask_or_adopt

if TYPE_CHECKING:
    from clusterctl.run.record.writer import RunDir
    from clusterctl.run.rules.state import RunState

# A controller that has just taken over looks twice before it calls a run stalled: at most a minute apart.
_SURE_SECONDS = 100.0
_LOOK_SECONDS = 1.0


def may_be_stalled(state: RunState) -> bool:
    """Return whether the journal says that a run is stalled; its controller may know better by now."""
    return not state.over and state.phase.value == "stalled"


def end_if_stalled(run: RunDir, *, kill: bool) -> bool:
    """End a run if the stall rule, asked now, says that it is stalled; return whether it did.

    A run without a controller gets one, which looks at the run for as long as the rule needs to be sure.
    """
    from clusterctl.run.controller.main import adopt_run
    from clusterctl.run.record.reader import load_state

    end = time.monotonic() + _SURE_SECONDS
    while time.monotonic() < end and not load_state(run).over:
        answer = ask_or_adopt(run, "down", {"stalled": True, "kill": kill}, lambda: adopt_run(run))
        if answer is None:
            continue
        if answer.get("stalled") or answer.get("phase") == "none":
            return bool(answer.get("stalled"))
        time.sleep(_LOOK_SECONDS)
    return False
