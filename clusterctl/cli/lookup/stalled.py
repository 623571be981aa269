"""Where the ranks of a stalled run were when it was last looked at, from the evidence that is kept with it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.evidence_files import list_stall_folders
from clusterctl.render.stacks import summarize_stacks
from clusterctl.run.record.saved_verdict import read_evidence
from clusterctl.run.rules import why_evidence

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


def where_ranks_are(run: RunDir, state: RunState) -> list[str]:
    """Return a few lines that say where which ranks are; nothing while no evidence is there."""
    nodes = {rank: worker.node for rank, worker in state.workers.items()}
    for name in reversed(list_stall_folders(str(run.path))):
        if found := read_evidence(run.path / name):
            with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):
                return summarize_stacks(why_evidence.fold_stacks(why_evidence.parse_rank_stacks(found)), nodes)
    return []
