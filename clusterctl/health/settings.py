"""The settings of health checks: the `health` section of the cluster file, and the declaration of each node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from clusterctl.config.spec import ClusterSpec, HealthSpec

NOT_SYNCED = "not synced"
"""The `code_hash` of a node to which the run does not sync code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeclaration:
    """The declaration of one node in the cluster file.

    Attributes:
        gpus: Declared number or indices of GPUs; `None` for all GPUs of the node.
        workdir: Folder of the code; `None` if only the node knows the folder.
        workers: Number of ranks; `None` for one rank per GPU.
        env: Names of variables that the file sets for this host only. Their values may differ from other nodes.
    """

    gpus: int | tuple[int, ...] | None = None
    workdir: str | None = None
    workers: int | None = None
    env: frozenset[str] = frozenset()

    @property
    def gpu_count(self) -> int | None:
        """The number of declared GPUs, or `None`."""
        return len(self.gpus) if isinstance(self.gpus, tuple) else self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthSettings:
    """Settings by which checks judge facts.

    Facts that only the controller knows are in `facts["controller"]` of each node. Every key is optional:

        clock        {"offset": s, "error": s}     the node's clock minus the controller's, and the error bound
        rendezvous   {"address", "port", "role": "listen" | "connect", "ok": bool, "error": str | None, "ms": number,
                     "listener": node}; for the listener also "peers" (number of connecting nodes) and "reached_by"
                     (number of nodes that connected)
        code_hash    the content hash of the synced code on the node, "" before the first sync, or `NOT_SYNCED`
        live_runs    ids of runs of clusterctl that should be alive on the node
        strange_runs ids of runs on the node that neither the node nor this head knows
        rebooted_under  the run of this head that lost the node, if the node has booted since
        ring         transfers between this node and others: [{"from", "to", "address", "port",
                     "ok": bool (`None` if the transfer could not be tried), "error": str | None, "ms": number,
                     "sent": bytes that arrived, "received": bytes that came back, "payload": bytes each way,
                     "still": seconds without progress}]
        own_run      the id of the run that asks for the checks; its processes are not foreign
        place        boot id, pid and network namespace that SSH reaches; two nodes with equal places are one machine
        host_key     the fingerprint of the node's host key
        connect_ms   how long the connection took to open

    The facts of a node that did not report any are `{"unreachable": REASON}`.

    Attributes:
        nodes: The declaration of each node, in order of node rank.
        spares: Names of the spare nodes. Checks compare spares with the other nodes, but spares have no vote.
        expect: `health.expect`: facts that the user promises (`EXPECT_KEYS`).
        ignore: Ignored findings, each as `CHECK` or `CHECK@NODE` with shell wildcards.
        severity: Name of a check to `fail`, `warn` or `ignore`.
        required: Names of checks that count as FAIL if they are UNKNOWN.
        thresholds: Values that replace default thresholds of checks, such as `host.disk.warn`.
        framework: The value of `job.framework`, or `None`.
    """

    nodes: Mapping[str, NodeDeclaration] = field(default_factory=dict)
    spares: frozenset[str] = frozenset()
    expect: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    framework: str | None = None

    @property
    def is_multi_node(self) -> bool:
        """Whether more than one node takes part."""
        return len(self.nodes) > 1

    @classmethod
    def from_spec(cls, spec: ClusterSpec) -> HealthSettings:
        """Return the settings of a cluster file."""
        health: HealthSpec = spec.health
        return cls(
            nodes={
                host.name: NodeDeclaration(
                    gpus=host.gpus, workdir=host.workdir, workers=host.workers, env=frozenset(host.env)
                )
                for host in spec.hosts
            },
            spares=frozenset(host.name for host in spec.spare_hosts),
            expect=health.expect,
            ignore=health.ignore,
            severity=health.severity,
            required=health.required,
            thresholds=health.thresholds,
            framework=spec.job.framework.value if spec.job else None,
        )


EXPECT_KEYS: dict[str, str] = {
    "gpu_model": "name of every GPU, shell wildcards allowed",
    "driver": "version of the GPU driver, shell wildcards allowed",
    "python": "Python version of the job, shell wildcards allowed",
    "torch": "torch version of the job, shell wildcards allowed",
    "cuda": "CUDA version that torch was built for, shell wildcards allowed",
    "nccl": "NCCL version, shell wildcards allowed",
    "mig": "true if MIG should be on",
    "nvlinks": "number of active NVLinks of each GPU (0 without a bridge)",
    "pcie_width": "number of PCIe lanes of each GPU",
    "ib_ports": "number of active InfiniBand or RoCE ports of each node",
    "mounts": "paths of mounts that must answer on every node",
    "allowed_procs": "names of processes that may use a GPU, besides known monitoring agents",
}
"""Keys of `health.expect`, with descriptions for the documentation."""
