"""Code that syncs brought to this node, and that goes with the last run of it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.record import rundir
from clusterctl.agent.record.folders import DEFAULT_WORKDIRS
from clusterctl.agent.record.workspace import Workspace, brought_for
from clusterctl.agent.serve.holds import Hold

if TYPE_CHECKING:
    from clusterctl.agent.record.rundir import RunDir


def code_of(run: RunDir) -> Workspace | None:
    """Return the workdir of a run whose code nobody needs once that run is gone from this node.

    A run whose start failed before it was prepared here has the one that was synced for it. `None` where a person
    chose the folder, where another run of this node has the same or does not say which, where other machines may share
    it (nobody here knows their runs), and where it was synced again since: for something that is no run.
    """
    workdir = _workdir(run)
    if not workdir or not workdir.startswith(os.path.expanduser(DEFAULT_WORKDIRS) + "/"):
        return None
    if rundir.is_network(workdir):
        return None
    for other in rundir.runs(run.root):
        if other != run:
            others = _workdir(other)
            if others is None or (others and os.path.realpath(others) == os.path.realpath(workdir)):
                return None
    place = Workspace(workdir, run.root)
    return None if place.brought_for() is None else place


def remove(place: Workspace) -> int:
    """Remove the code that syncs brought, unless somebody has changed it or is about to use it; return the bytes.

    What a job or a person has written there stays.
    """
    hold = Hold(place, None)
    try:
        return place.forget() if hold.alone() else 0
    finally:
        hold.close()


def _workdir(run: RunDir) -> str | None:
    """Return where a run has its code: nowhere (empty) where it never came to that, `None` where nobody can tell."""
    if not os.path.exists(run.prepare):
        place = brought_for(run.run, run.root)
        return "" if place is None else place.folder
    workdir = (syscalls.read_json(run.prepare) or {}).get("workdir")
    return workdir if isinstance(workdir, str) else None
