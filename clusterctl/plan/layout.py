"""Assigns ranks and GPUs to the hosts, before the addresses of the hosts are known. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, Role

PYTHON_PLACEHOLDER = "{python}"
"""Placeholder for the path of the Python interpreter. The supervisor of the node inserts the path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """The ranks and GPUs of a node."""

    host: HostSpec
    node_rank: int
    ranks: tuple[int, ...]
    gpus: tuple[int, ...]


def count_workers(host: HostSpec, found_gpus: int | None) -> int | None:
    """Return the number of workers of a host: `workers`, or else one worker per GPU; `None` if the GPUs are unknown.

    A host without GPUs has one worker.
    """
    if host.workers is not None:
        return host.workers
    gpus = len(host.gpus) if isinstance(host.gpus, tuple) else host.gpus
    if gpus is None:
        gpus = found_gpus
    return None if gpus is None else max(gpus, 1)


def list_claimed_gpus(host: HostSpec, found_gpus: int | None) -> tuple[int, ...]:
    """Return the indices of the GPUs that a run claims on a host. A count of N in the cluster file means 0 to N-1."""
    if isinstance(host.gpus, tuple):
        return host.gpus
    return tuple(range(found_gpus or 0 if host.gpus is None else host.gpus))


def list_cpu_only_hosts(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int | None]) -> list[str]:
    """Return the hosts without a GPU that get one rank on the CPU without a request in the cluster file."""
    return [h.name for h in hosts if h.gpus is None and h.workers is None and found_gpus.get(h.name, 1) in (0, None)]


def assign_ranks(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int | None]) -> tuple[NodeLayout, ...]:
    """Return the ranks of each host, contiguous and in host order. An unknown number of GPUs gives one rank."""
    result, first_rank = [], 0
    for node_rank, host in enumerate(hosts):
        gpus = found_gpus.get(host.name)
        count = count_workers(host, gpus) or 1
        ranks = tuple(range(first_rank, first_rank + count))
        first_rank += count
        result.append(NodeLayout(host=host, node_rank=node_rank, ranks=ranks, gpus=list_claimed_gpus(host, gpus)))
    return tuple(result)


def assign_ranks_from_file(spec: ClusterSpec) -> tuple[NodeLayout, ...] | None:
    """Return the layout that the cluster file alone determines; `None` if a node has to report its GPUs."""
    if any(count_workers(h, None) is None for h in spec.worker_hosts):
        return None
    return assign_ranks(spec.worker_hosts, {})


def assign_ranks_assuming_gpus(spec: ClusterSpec, gpus: int) -> tuple[NodeLayout, ...]:
    """Return the layout with `gpus` GPUs on each host whose number of GPUs is unknown."""
    return assign_ranks(spec.worker_hosts, {host.name: gpus for host in spec.worker_hosts})


def get_workdir(spec: ClusterSpec, node: str) -> str:
    """Return the folder of the code on a node; `~` is the node's own home."""
    host = next(h for h in spec.hosts if h.name == node)
    assert host.workdir is not None, "the loader of cluster files sets `workdir`"
    return host.workdir


def get_job(spec: ClusterSpec) -> JobSpec:
    """Return the job of a spec, which must have a job."""
    assert spec.job is not None, "the cluster file was parsed without a job"
    return spec.job


def choose_nodes(spec: ClusterSpec, busy: Collection[str] = ()) -> ClusterSpec:
    """Return the spec in which the hosts beyond `job.nodes` are spares.

    Free hosts run workers first, in the order of the file. Busy hosts run workers only if too few hosts are free.
    """
    if spec.job is None or spec.job.nodes is None:
        return spec
    workers = [host.name for host in spec.worker_hosts]
    chosen = [name for name in workers if name not in busy][: spec.job.nodes[1]]
    missing = max(0, (spec.min_nodes or 1) - len(chosen))
    chosen += [name for name in workers if name in busy][:missing]
    return _replace_roles(spec, [name for name in workers if name not in chosen])


def move_to_end(spec: ClusterSpec, avoided: Collection[str]) -> ClusterSpec:
    """Return the spec in which avoided hosts follow the others: spares, and with `job.nodes` all hosts."""
    has_choice = spec.job is not None and spec.job.nodes is not None
    is_avoided = {host.name: host.name in avoided and (has_choice or host.role is Role.SPARE) for host in spec.hosts}
    return dataclasses.replace(spec, hosts=tuple(sorted(spec.hosts, key=lambda host: is_avoided[host.name])))


def demote_to_spares(spec: ClusterSpec, missing: Collection[str]) -> ClusterSpec | None:
    """Return the spec in which the missing nodes are spares, which may replace a node later.

    Return `None` if fewer than `min_nodes` nodes remain, or if the file has no `min_nodes`.
    """
    workers = [host for host in spec.worker_hosts if host.name not in missing]
    if spec.min_nodes is None or len(workers) < spec.min_nodes:
        return None
    return _replace_roles(spec, missing)


def choose_ready_nodes(spec: ClusterSpec, ready: Collection[str]) -> ClusterSpec | None:
    """Return the spec in which only nodes whose GPUs are free run workers; `None` if too few are ready."""
    missing = [host.name for host in spec.worker_hosts if host.name not in ready]
    fewer = demote_to_spares(spec, missing) if missing else spec
    return None if fewer is None else choose_nodes(fewer)


def _replace_roles(spec: ClusterSpec, spares: Collection[str]) -> ClusterSpec:
    hosts = [dataclasses.replace(h, role=Role.SPARE) if h.name in spares else h for h in spec.hosts]
    return dataclasses.replace(spec, hosts=tuple(hosts))
