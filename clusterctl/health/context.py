"""What a verdict depends on beside the facts: promises and tolerances of the cluster file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.spec import ClusterSpec, HealthSpec, HostSpec

NOT_SYNCED = "not synced"
"""The `code_hash` of a node whose code does not come by sync."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What the cluster file says about one node.

    Attributes:
        gpus: Declared count or indices; `None` for "what the node turns out to have".
        workdir: Where the code will lie; `None` where only the node can tell.
        workers: How many ranks it is to run; `None` for one a GPU.
        env: Names that the file sets for this host alone: they are meant to differ.
    """

    gpus: int | tuple[int, ...] | None = None
    workdir: str | None = None
    workers: int | None = None
    env: frozenset[str] = frozenset()

    @property
    def count(self) -> int | None:
        """How many GPUs are declared, or `None`."""
        return len(self.gpus) if isinstance(self.gpus, tuple) else self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Everything that a verdict depends on beside the facts.

    Facts that only the controller knows stand in `facts["controller"]` of each node, every key optional:

        clock        {"offset": s, "error": s}     the node's clock minus the controller's, and the bound of the error
        rendezvous   {"address", "port", "role": "listen" | "connect", "ok": bool, "error": str | None, "ms": number,
                     "listener": node}; of the listener "peers" and "reached_by", how many tried and came through
        code_hash    the content hash of the synced code on that node, "" where none was synced yet, `NOT_SYNCED`
        live_runs    ids of runs of clusterctl that are meant to be alive on that node
        strange_runs ids of runs found there of which neither that node nor this head knows anything
        rebooted_under  the run of this head that lost the node, where it has booted since
        ring         ways between this node and others that count against it: [{"from", "to", "address", "port",
                     "ok": bool, or `None` where it could not be tried, "error": str | None, "ms": number, "sent": bytes
                     that arrived there, "received": bytes that came back, "payload": bytes each way, "still": seconds
                     since anything moved}]
        own_run      the id of the run on whose behalf we look: what it holds is not foreign
        connect_ms   how long the connection took to open

    A node that gave no facts is `{"unreachable": "why"}`, its facts empty otherwise.

    Attributes:
        nodes: What is declared for each node, in order of node rank.
        spares: Those of them that only wait: compared with the others, whose majority they do not change.
        expect: `health.expect`: facts that the user promises (`EXPECT_KEYS`).
        ignore: `check` or `check@node`, both with shell wildcards.
        severity: Check to `fail`, `warn` or `ignore`.
        required: Checks whose UNKNOWN counts as FAIL.
        thresholds: Overrides of the numbers in the registry, such as `host.disk.warn`.
        framework: What `job.framework` says, or `None`.
    """

    nodes: Mapping[str, Expectation] = field(default_factory=dict)
    spares: frozenset[str] = frozenset()
    expect: Mapping[str, Any] = field(default_factory=dict)
    ignore: tuple[str, ...] = ()
    severity: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    thresholds: Mapping[str, float] = field(default_factory=dict)
    framework: str | None = None

    @property
    def multi_node(self) -> bool:
        """More than one node takes part."""
        return len(self.nodes) > 1

    @classmethod
    def from_spec(cls, spec: ClusterSpec) -> Context:
        """Read the promises and tolerances of a cluster file. Spares are judged like everybody else."""
        health: HealthSpec = spec.health
        return cls(
            nodes={host.name: _expectation(host) for host in spec.hosts},
            spares=frozenset(host.name for host in spec.spares),
            expect=health.expect,
            ignore=health.ignore,
            severity=health.severity,
            required=health.required,
            thresholds=health.thresholds,
            framework=spec.job.framework.value if spec.job else None,
        )


def _expectation(host: HostSpec) -> Expectation:
    return Expectation(gpus=host.gpus, workdir=host.workdir, workers=host.workers, env=frozenset(host.env))


EXPECT_KEYS: dict[str, str] = {
    "gpu_model": "name of every GPU, shell wildcards allowed",
    "driver": "version of the GPU driver, shell wildcards allowed",
    "python": "Python version of the job, shell wildcards allowed",
    "torch": "torch version of the job, shell wildcards allowed",
    "cuda": "CUDA version that torch was built for, shell wildcards allowed",
    "nccl": "NCCL version, shell wildcards allowed",
    "mig": "true where MIG is meant to be on",
    "nvlinks": "active NVLinks of each GPU (0 where no bridge is fitted)",
    "pcie_width": "PCIe lanes of each GPU",
    "ib_ports": "active InfiniBand or RoCE ports of each node",
    "mounts": "paths that must answer on every node",
    "allowed_procs": "names of processes that may hold a GPU, beside the monitoring agents known to us",
}
"""Keys of `health.expect`."""
