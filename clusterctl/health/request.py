"""What to ask of a node's probe, as the cluster file has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from clusterctl.health.checks.driver import responsive
from clusterctl.health.registry import DEADLINE_KEY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from clusterctl.agent.protocol.types.facts import Request
    from clusterctl.config.spec import ClusterSpec, HostSpec

DEADLINE = 3.0
"""Seconds that a node's probe may take; `health.thresholds: {probe.deadline: N}` sets another."""
PROCS_DEADLINE = 9.0
"""Seconds for the process list: one that holds a GPU and sleeps in the kernel is watched until that is certain."""


def probe_request(
    spec: ClusterSpec,
    host: HostSpec,
    *,
    peers: Mapping[str, str],
    workdir: str | None = None,
    ports: Iterable[int] = (),
    groups: Iterable[str] | None = None,
    run: str | None = None,
    salt: str = "",
) -> Request:
    """Return the request for one node (`clusterctl.agent.facts` has its shape).

    Args:
        spec: The cluster file.
        host: The node.
        peers: The other nodes' names to the addresses that workers will use.
        workdir: Where the code will lie, where it is known better than in `host.workdir`.
        ports: Ports that the run asks for by number on this node.
        groups: Only these groups of facts; `None` for all.
        run: The run on whose behalf we look, if there is one.
        salt: Goes into hashes that are to be compared with those of other nodes.
    """
    return {
        "deadline": float(spec.health.thresholds.get(DEADLINE_KEY, DEADLINE)),
        "deadlines": {
            "nvml": float(spec.health.thresholds.get(f"{responsive.name}.fail", responsive.thresholds["fail"])),
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


def longest_timeout_s(request: Mapping[str, Any]) -> float:
    """Return the seconds after which a probe has answered, whatever hangs."""
    return max(float(request["deadline"]), *map(float, (request.get("deadlines") or {}).values()))
