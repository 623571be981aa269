"""How large the newest checkpoint is: the next one needs as much room."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes


def collect(workdir: str, pattern: str) -> shapes.Checkpoint:
    """Return the group `checkpoint`: path and size of the newest complete one, each `None` where there is none yet."""
    # A folder of many large checkpoints may take its time: this has a child of its own, and is imported only there.
    from clusterctl.agent.facts import checkpoint_files

    checkpoints = checkpoint_files.complete(os.path.expanduser(workdir), pattern)
    if not checkpoints:
        return {"path": None, "bytes": None}
    path = os.path.join(os.path.expanduser(workdir), checkpoints[0]["path"])
    return {"path": path, "bytes": checkpoint_files.total(path)}
