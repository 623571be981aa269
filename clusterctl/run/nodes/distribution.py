"""Sends the same files to many nodes at once. A node gets only the files that it lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ClusterctlError
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.nodes.uploads import Destination, Upload, UploadResult, copy_files
from clusterctl.session.node_session import Session


def send_files(
    spec: ClusterSpec,
    sessions: Mapping[str, Session],
    places: Mapping[str, Destination],
    files: Upload,
    on_bytes: Callable[[str, int], None],
) -> tuple[dict[str, UploadResult], dict[str, ClusterctlError]]:
    """Send files to all nodes, each file atomically. Return the results and the errors by node.

    Args:
        spec: The spec of the cluster.
        sessions: The session of each node.
        places: The destination on each node.
        files: The files.
        on_bytes: A function that receives a node and the number of bytes that the node has just received. Several
            threads call it.
    """
    return call_all(sessions, lambda node, session: copy_files(session, places[node], files, partial(on_bytes, node)))
