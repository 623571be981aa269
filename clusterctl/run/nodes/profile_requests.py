"""Profiles ranks on all nodes at once, and fetches the files that the nodes have written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from clusterctl.agent.protocol.command_payload_types import ProfileAnswer
from clusterctl.errors import ClusterctlError
from clusterctl.run.nodes.downloads import FetchOptions, pull_files
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import PROFILE

_SAVE_TIMEOUT_S = 120.0
"""The seconds that a node has for the traces after the recording: torch may need a minute, and py-spy another one."""


def request_profiles(
    run: str, ranks: Mapping[str, Collection[int]], seconds: float, sessions: Mapping[str, Session], target: Path
) -> tuple[dict[str, ProfileAnswer], dict[str, ClusterctlError]]:
    """Profile ranks, and fetch the file of each rank to the folder `target/NODE`.

    Args:
        run: The id of the run.
        ranks: The ranks of each node.
        seconds: The length of the recordings.
        sessions: The sessions by node.
        target: The folder on the head.

    Returns:
        The answers and the errors by node.
    """

    def profile(node: str, session: Session) -> ProfileAnswer:
        # A method that fails late, as on a full disk, is followed by another method.
        timeout = 3 * seconds + _SAVE_TIMEOUT_S
        answer = PROFILE.call(
            session,
            {"run": run, "node": node, "ranks": sorted(ranks[node]), "seconds": seconds},
            timeout=timeout,
        )
        pull_files(session, answer["folder"], "rank-*.json", target / node, FetchOptions())
        return answer

    return call_all(sessions, profile)
