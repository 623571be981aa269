"""Measurements of deep checks: their names, their form in facts, and the formulas of bus bandwidth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

GROUP = "deep"
"""The group of facts with the measurements of a node. Its only fact, `measurements`, lists them as JSON."""


class Measure(str, Enum):
    """What a measurement measures.

    Values that end with `_errors` count faults: 0 is healthy. `GEMM_DIGEST`, `PCIE_LINK` and `THROTTLE` are
    categories (`Measurement.digest`). All other values are rates: less is worse.
    """

    CONTEXT_ERRORS = "context_errors"  # Of GPUs that torch could not use at all; `detail` has the error.
    MEMORY_ERRORS = "memory_errors"  # Words that did not have the value written before.
    GEMM_ERRORS = "gemm_errors"  # Repeats of one GEMM whose bits differ from the first.
    GEMM_DIGEST = "gemm_digest"  # Hash of the result, the same on all GPUs of a model.
    GEMM_TFLOPS = "gemm_tflops"
    MEMORY_BANDWIDTH = "memory_bandwidth"  # GB/s, reads and writes together.
    HOST_TO_DEVICE = "host_to_device"  # GB/s.
    DEVICE_TO_HOST = "device_to_host"  # GB/s.
    CLOCK = "clock"  # MHz under load.
    PCIE_LINK = "pcie_link"  # Generation and width under load, such as `5x16`.
    THROTTLE = "throttle"  # Reasons under load that mean a fault, such as `hw_thermal`; `none`.
    NODE_ALL_REDUCE = "node_all_reduce"  # GB/s of bus bandwidth among the GPUs of a node.
    PAIR_ALL_REDUCE = "pair_all_reduce"  # The same between two nodes.
    GROUP_ALL_REDUCE = "group_all_reduce"  # The same among more nodes.

    @property
    def counts_errors(self) -> bool:
        """Whether the value counts faults."""
        return self.value.endswith("_errors")

    @property
    def is_category(self) -> bool:
        """Whether a measurement has a digest in place of a value."""
        return self in (Measure.GEMM_DIGEST, Measure.PCIE_LINK, Measure.THROTTLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One measured value. Repeats are several measurements: of rates the best one counts, because load only slows down.

    Attributes:
        node: Name of the node, which also holds the measurement in its facts.
        measure: What was measured.
        gpu: Index of the GPU, or `None`. Without GPUs, the CPU is measured.
        peers: The other nodes that took part: one for a pair, more for a group.
        variant: What else distinguishes the value by design, such as the precision of a GEMM or `ring/simple` of a
            collective. Values are compared within one variant.
        model: Everything of the machine that may change the value by design: the model of the GPU or CPU, and
            for digests the versions of the libraries. Values are compared within one model.
        value: The number. `None`: it could not be measured, and `detail` says why.
        digest: The value of a category. `None`: as for `value`.
        detail: What else was seen, such as power and temperature, or the error.
    """

    node: str
    measure: Measure
    gpu: int | None = None
    peers: tuple[str, ...] = ()
    variant: str = ""
    model: str = ""
    value: float | None = None
    digest: str | None = None
    detail: str = ""

    @property
    def members(self) -> frozenset[str]:
        """The nodes that took part."""
        return frozenset((self.node, *self.peers))

    @property
    def is_measured(self) -> bool:
        """Whether there is a value."""
        return (self.digest if self.measure.is_category else self.value) is not None

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as an entry of the group of facts."""
        return {**asdict(self), "measure": self.measure.value, "peers": list(self.peers)}


def measurement_from_json(value: Mapping[str, Any]) -> Measurement:
    """Return a measurement from its JSON.

    Raises:
        LookupError, TypeError, ValueError: A field is missing, unknown or invalid.
    """
    return Measurement(**{**value, "measure": Measure(value["measure"]), "peers": tuple(value.get("peers", ()))})


def add_measurements(facts_by_node: Mapping[str, dict[str, Any]], measurements: Iterable[Measurement]) -> None:
    """Write measurements into the facts of their nodes. All nodes with facts then count as measured."""
    entries: dict[str, list[dict[str, Any]]] = {node: [] for node in facts_by_node}
    for measurement in measurements:
        entries[measurement.node].append(measurement.to_json())
    for node, facts in facts_by_node.items():
        if "groups" in facts:
            group = {"status": "ok", "reason": None, "data": {"measurements": entries[node]}, "ms": None}
            facts["groups"][GROUP] = group


def compute_bus_bandwidth(*, ranks: int, size_bytes: int, duration_s: float) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, by the formula of nccl-tests (`doc/PERFORMANCE.md`).

    Bus bandwidth does not depend on the number of ranks if the slowest link limits the all-reduce, so that it can be
    compared with the speed of the hardware.

    Args:
        ranks: Number of ranks.
        size_bytes: The size of the buffer of a rank.
        duration_s: Seconds of one all-reduce.
    """
    return 2 * (ranks - 1) / ranks * size_bytes / duration_s / 1e9
