"""Which runs a scaling report takes: how many workers each has, and on which hosts. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.config.path_rules import rename_workdir
from clusterctl.config.spec import ClusterSpec, JobSpec, RestartSpec, TransportKind
from clusterctl.errors import RefusedError
from clusterctl.formatting import plural
from clusterctl.plan.layout import count_workers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.config.spec import HostSpec

MODULE = "clusterctl.agent.worker.bench_model"
"""The built-in model, which travels with the agent."""
SINGLE, PARALLEL, DISTRIBUTED = "single", "dp", "ddp"
JOB = "job"
"""Modes: one device, DataParallel, DistributedDataParallel; and the user's own job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run of the report.

    Attributes:
        workers: How many it has.
        modes: What they measure, one after the other.
        spec: The cluster file cut down to this run.
    """

    workers: int
    modes: tuple[str, ...]
    spec: ClusterSpec


def counts(total: int, asked: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the numbers of workers to measure: those asked for, else 1, 2, 4 … and all.

    Raises:
        RefusedError: More were asked for than there are.
    """
    if asked:
        wanted = tuple(sorted(set(asked)))
        if wanted[0] < 1 or wanted[-1] > total:
            refused = wanted[-1] if wanted[-1] > total else wanted[0]
            raise RefusedError(
                f"{plural(refused, 'worker')} cannot be measured", hint=f"the file has room for 1 to {total}"
            )
        return wanted
    powers = [1 << n for n in range(total.bit_length()) if 1 << n <= total]
    return tuple(sorted({*powers, total}))


def capacities(hosts: Sequence[HostSpec], found_gpus: Mapping[str, int]) -> dict[str, int]:
    """Return how many workers each host has room for: what the file says, else what the node has."""
    return {host.name: count_workers(host, found_gpus.get(host.name)) or 1 for host in hosts}


def spread(workers: int, rooms: Mapping[str, int]) -> dict[str, int]:
    """Give workers to hosts in turn, as many as each has room for; hosts without any are left out."""
    given = dict.fromkeys(rooms, 0)
    while sum(given.values()) < workers:
        for host, room in rooms.items():
            if given[host] < room and sum(given.values()) < workers:
                given[host] += 1
    return {host: count for host, count in given.items() if count}


def series(
    spec: ClusterSpec,
    rooms: Mapping[str, int],
    asked: Sequence[int],
    *,
    built_in: bool,
    options: Sequence[str] = (),
    gpus: Mapping[str, int],
) -> list[Step]:
    """Return the runs of a report, the smallest first.

    Args:
        spec: The cluster file.
        rooms: Workers that each host has room for (`capacities`).
        asked: Numbers of workers to measure; none for 1, 2, 4 … and all.
        built_in: Measure the built-in model, not the job of the file.
        options: More arguments of the built-in model.
        gpus: GPUs that each host has.
    """
    wanted = counts(sum(rooms.values()), asked)
    most = _most_together(spec, spread(wanted[-1], rooms))
    steps = []
    for workers in wanted:
        share = spread(workers, rooms)
        cut = _cut(spec, share)
        if not built_in:
            steps.append(Step(workers=workers, modes=(JOB,), spec=cut))
            continue
        modes: tuple[str, ...] = (SINGLE, DISTRIBUTED) if workers == 1 else (DISTRIBUTED,)
        first = next(iter(share))
        if workers == 1 and gpus.get(first, 0) > 1:
            steps.append(_parallel(spec, cut, first, most, ("--gpus", str(gpus[first]), *options)))
        elif workers == 1:
            modes = (SINGLE, PARALLEL, DISTRIBUTED)
        steps.append(Step(workers=workers, modes=modes, spec=_with_model(cut, modes, most, options)))
    return steps


def _parallel(spec: ClusterSpec, cut: ClusterSpec, name: str, most: int, options: Sequence[str]) -> Step:
    """Return the run with DataParallel: one process with all GPUs of its machine."""
    host = next(h for h in spec.workers if h.name == name)
    alone = replace(cut, hosts=(replace(host, workers=1),))
    return Step(workers=1, modes=(PARALLEL,), spec=_with_model(alone, (PARALLEL,), most, options))


def _most_together(spec: ClusterSpec, share: Mapping[str, int]) -> int:
    """Return how many workers share a machine at most; all `local` hosts are one machine."""
    together: dict[str, int] = {}
    for host in spec.workers:
        machine = "localhost" if host.transport is TransportKind.LOCAL else host.address or host.host
        together[machine] = together.get(machine, 0) + share.get(host.name, 0)
    return max(together.values())


def _cut(spec: ClusterSpec, share: Mapping[str, int]) -> ClusterSpec:
    name = f"{spec.name[:34]}-bench"
    # In a folder of its own, so that what the job writes does not lie among the results of real runs.
    hosts = tuple(
        replace(_smaller(host, share[host.name]), workdir=rename_workdir(host.workdir, spec.name, name))
        for host in spec.workers
        if host.name in share
    )
    return replace(spec, name=name, hosts=hosts, restart=RestartSpec(), results=None)


def _smaller(host: HostSpec, workers: int) -> HostSpec:
    """Give a host fewer workers, and as many GPUs where it has one a worker."""
    gpus = host.gpus
    if isinstance(gpus, tuple):
        gpus = gpus[:workers]
    elif gpus is None or gpus > workers:
        gpus = workers if gpus != 0 and host.workers is None else gpus
    return replace(host, workers=workers, gpus=gpus)


def _with_model(spec: ClusterSpec, modes: tuple[str, ...], most: int, options: Sequence[str]) -> ClusterSpec:
    kept = spec.job or JobSpec()
    job = replace(
        kept,
        script=None,
        command=None,
        module=MODULE,
        args=("--modes", ",".join(modes), "--max-workers", str(most), *options),
        inject=True,
    )
    return replace(spec, job=job)
