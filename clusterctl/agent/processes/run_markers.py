"""Markers of the processes of a run: environment variables, and a tag in a resource limit."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.spawn import encode_peer_text

if TYPE_CHECKING:
    from clusterctl.agent.node_state.run_dir import RunDir


@dataclass(frozen=True)
class RunMarkers:
    """Markers that tell the processes of one run on one node from all others.

    Attributes:
        run_id: Value of CLUSTERCTL_RUN_ID.
        node_name: Value of CLUSTERCTL_NODE.
        tag: Value of a resource limit that Linux does not enforce. It survives setsid, double fork and a cleared
            environment.
        uid: The user of the processes.
    """

    run_id: bytes
    node_name: bytes
    tag: int
    uid: int

    def environment(self) -> dict[bytes, bytes]:
        """Return the markers that are environment variables."""
        return {b"CLUSTERCTL_RUN_ID": self.run_id, b"CLUSTERCTL_NODE": self.node_name}

    def has_tag(self, pid: int) -> bool:
        """Return whether a process carries the tag."""
        return proc.has_limit(pid, self.tag)

    def has_run_environment(self, pid: int) -> bool | None:
        """Return whether the environment of a process names the run and the node; `None` if it cannot be read.

        Call this in a child: the read hangs if the process is stuck with its memory locked.
        """
        environ = proc.read_environment(pid)
        return self.environment().items() <= environ.items() if environ else None


def make_run_markers(run: RunDir) -> RunMarkers:
    """Return the markers of a run on this node."""
    digest = hashlib.sha256(b"tag" + run.key.encode()).digest()
    # Bit 60 makes the tag larger than any limit that a person would set, and keeps it below RLIM_INFINITY.
    tag = int.from_bytes(digest[:7], "big") | 1 << 60
    return RunMarkers(encode_peer_text(run.run), encode_peer_text(run.node), tag, os.getuid())
