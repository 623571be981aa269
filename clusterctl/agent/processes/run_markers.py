"""The marks that a process of a run carries, by which it is found again whatever it has done to itself."""

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
    """What tells processes of one run on one node from all others.

    Attributes:
        run: Value of CLUSTERCTL_RUN_ID.
        node: Value of CLUSTERCTL_NODE.
        tag: Value of a resource limit that Linux does not enforce: survives setsid, double fork, a cleared environment.
        folder: The directory of the run, whose files only its own processes write.
        uid: Whose processes they are.
    """

    run_id: bytes
    node_name: bytes
    tag: int
    run_dir: str
    uid: int

    def environment(self) -> dict[bytes, bytes]:
        """Return the marks that travel in the environment."""
        return {b"CLUSTERCTL_RUN_ID": self.run_id, b"CLUSTERCTL_NODE": self.node_name}

    def has_tag(self, pid: int) -> bool:
        """Whether a process carries the surviving mark."""
        return proc.has_limit(pid, self.tag)

    def has_run_environment(self, pid: int) -> bool | None:
        """Whether the environment of a process names the run and the node; `None` where it shows none.

        To be asked aside: where a process is stuck with its memory locked, this hangs.
        """
        environ = proc.read_environment(pid)
        return (
            None
            if not environ
            else environ.get(b"CLUSTERCTL_RUN_ID") == self.run_id and environ.get(b"CLUSTERCTL_NODE") == self.node_name
        )


def make_run_markers(run: RunDir) -> RunMarkers:
    """Return the marks of a run on this node."""
    digest = hashlib.sha256(b"tag" + run.key.encode()).digest()
    # Bit 60 keeps it far above any limit that a person would set; the value stays below RLIM_INFINITY.
    tag = int.from_bytes(digest[:7], "big") | 1 << 60
    return RunMarkers(encode_peer_text(run.run), encode_peer_text(run.node), tag, run.path, os.getuid())
