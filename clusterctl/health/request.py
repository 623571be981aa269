"""Builds the request for the facts of a node from the cluster file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clusterctl.agent.protocol.command_payload_types import FactsRequest
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.health.checks.gpu_driver import check_response_time
from clusterctl.health.registry import DEADLINE_KEY

DEADLINE = 3.0
"""Seconds for collecting the facts of a node; `health.thresholds: {probe.deadline: N}` replaces this number."""
PROCS_DEADLINE = 9.0
"""Seconds for the facts about processes: the agent watches each process that holds a GPU and sleeps in the kernel."""


def build_probe_request(
    spec: ClusterSpec,
    host: HostSpec,
    *,
    peers: Mapping[str, str],
    workdir: str | None = None,
    ports: Iterable[int] = (),
    groups: Iterable[str] | None = None,
    run: str | None = None,
    salt: str = "",
) -> FactsRequest:
    """Return the request for the facts of one node (format: `clusterctl.agent.facts`).

    Args:
        spec: The cluster file.
        host: The node.
        peers: Name of each node to the address that workers will use.
        workdir: Folder of the code; `None` for `host.workdir`.
        ports: Port numbers on this node that the cluster file names.
        groups: Names of the requested groups of facts; `None` for all.
        run: Id of the run that requests the facts, or `None`.
        salt: Salt for hashes that checks compare between nodes.
    """
    return {
        "deadline": float(spec.health.thresholds.get(DEADLINE_KEY, DEADLINE)),
        "deadlines": {
            "nvml": float(
                spec.health.thresholds.get(f"{check_response_time.name}.fail", check_response_time.thresholds["fail"])
            ),
            "procs": PROCS_DEADLINE,
        },
        "groups": None if groups is None else list(groups),
        "workdir": workdir or host.workdir,
        "mounts": [str(path) for path in spec.health.expect.get("mounts") or ()],
        "peers": {node: address for node, address in peers.items() if node != host.name},
        "ports": list(ports),
        "expect_gpus": host.gpus not in (0, ()),
        "checkpoints": spec.job.checkpoint.pattern if spec.job else None,
        "node": host.name,
        "run": run,
        "salt": salt,
    }


def get_longest_deadline(request: Mapping[str, Any]) -> float:
    """Return the seconds after which the agent answers the request, even if a group of facts hangs."""
    return max(float(request["deadline"]), *map(float, (request.get("deadlines") or {}).values()))
