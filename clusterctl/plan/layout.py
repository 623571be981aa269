"""Which ranks lie on which hosts, before any node has chosen an address. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.config.spec import ClusterSpec, Framework, HostSpec, JobSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


PYTHON = "{python}"
"""Stands for the interpreter that the node resolved; the supervisor puts its path there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which ranks a node has."""

    host: HostSpec
    node_rank: int
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]


def worker_count(host: HostSpec, found_gpus: int | None) -> int | None:
    """Return how many workers a host starts: what it says, else one a GPU, else 1; `None` until its GPUs are known."""
    if host.workers is not None:
        return host.workers
    gpus = found_gpus if host.gpus is None else _count(host.gpus)
    return None if gpus is None else max(gpus, 1)


def claimed_gpus(host: HostSpec, found_gpus: int | None) -> tuple[int, ...]:
    """Return the device indices that a run takes on a host: the list it names, or 0..N-1 for a count."""
    if isinstance(host.gpus, tuple):
        return host.gpus
    return tuple(range(found_gpus or 0 if host.gpus is None else host.gpus))


def left_to_cpu(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int | None]) -> list[str]:
    """Return the hosts that get one rank, on their CPU, although nobody said that: they turn out to have no GPU."""
    return [h.name for h in hosts if h.gpus is None and h.workers is None and found_gpus.get(h.name, 1) in (0, None)]


def _count(gpus: int | tuple[int, ...]) -> int:
    return len(gpus) if isinstance(gpus, tuple) else gpus


def layout(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int | None]) -> tuple[Layout, ...]:
    """Return the ranks of each host, contiguous and in host order. Unknown counts give one rank."""
    result, first = [], 0
    for node_rank, host in enumerate(hosts):
        gpus = found_gpus.get(host.name)
        count = worker_count(host, gpus) or 1
        ranks = tuple(range(first, first + count))
        first += count
        result.append(Layout(host=host, node_rank=node_rank, ranks=ranks, gpus=claimed_gpus(host, gpus)))
    return tuple(result)


def ports_wanted(spec: ClusterSpec, entry: Layout) -> tuple[int, ...]:
    """Return the ports that a node holds for an attempt; 0 asks for any free one.

    Node 0 holds the master port first, then the JAX coordinator's; a TensorFlow node holds one a worker.
    """
    job = job_of(spec)
    ports: list[int] = []
    if entry.node_rank == 0:
        ports.append(spec.network.master_port or 0)
        if job.framework is Framework.JAX:
            ports.append(0)
    if job.framework is Framework.TENSORFLOW:
        ports += [0] * len(entry.ranks)
    return tuple(ports)


def known_entries(spec: ClusterSpec) -> tuple[Layout, ...] | None:
    """Return the layout where the file alone determines it, or `None` where a node must be asked for its GPUs."""
    if any(worker_count(h, None) is None for h in spec.workers):
        return None
    return layout(spec.workers, {})


def entries_if(spec: ClusterSpec, gpus: int) -> tuple[Layout, ...]:
    """Return the layout where each host that has to be asked for its GPUs has so many."""
    return layout(spec.workers, {host.name: gpus for host in spec.workers})


def workdir_of(spec: ClusterSpec, node: str) -> str:
    """Return where the code lies on a node; `~` is the node's own home."""
    host = next(h for h in spec.hosts if h.name == node)
    assert host.workdir is not None, "whatever reads a cluster file fills it in"
    return host.workdir


def job_of(spec: ClusterSpec) -> JobSpec:
    """Return what the workers run, of a spec that has it."""
    assert spec.job is not None, "the cluster file was parsed without a job"
    return spec.job
