"""Who runs what: from the spec and the nodes' answers to ranks, rendezvous, environment and argv. Pure.

Host order is node rank; ranks are contiguous per node. What torchrun gives a worker, ours gives too (torch 2.13,
`torch/distributed/elastic/agent/server/local_elastic_agent.py`), with torchrun's meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from clusterctl.config.kinds import Launcher
from clusterctl.config.spec import ClusterSpec, JobSpec
from clusterctl.plan.environment import (
    TORCHRUN_SETS,
    Common,
    RunIdentity,
    framework_values,
    replaced_of_login,
    sourced_environment,
    worker_environment,
)
from clusterctl.plan.interfaces import interface_environments
from clusterctl.plan.layout import PYTHON, Layout, entries_if, job_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.plan.meeting import Meeting, NodeAnswer


T = TypeVar("T")

_COUNTED = "GPUS"
"""Stands for a number on a command line that is counted at the start."""

STRICT_BASH = ("bash", "-eo", "pipefail", "-c")
"""What runs a text of the user's: the first command that fails ends it, in a pipe too, as a prologue does on nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """One worker; `env` is what the launcher adds, merged over the node's own environment.

    Attributes:
        hosts: Where `argv` is a launcher of the node: the ranks that it starts. Else empty.
        hosted: What it starts as each of them.
    """

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    hosts: tuple[int, ...] = ()
    hosted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node's part of an attempt.

    Attributes:
        python: The interpreter that the cluster file names for it; `None` where the node finds one.
        replaced: What its login sets and its workers get otherwise, in words.
    """

    node: str
    node_rank: int
    address: str | None
    workers: tuple[WorkerPlan, ...]
    python: str | None = None
    replaced: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the node, whoever starts them."""
        return tuple(rank for worker in self.workers for rank in (worker.hosts or (worker.rank,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A whole attempt, ready to be printed or sent."""

    run: str
    attempt: int
    world_size: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodePlan, ...]


_HIDDEN = "***"


def plan_launch(
    spec: ClusterSpec,
    identity: RunIdentity,
    entries: Sequence[Layout],
    answers: Mapping[str, NodeAnswer],
    where: Meeting | None,
    ports: Mapping[str, Sequence[int]],
) -> LaunchPlan:
    """Return what every node must do for one attempt.

    Args:
        spec: What the user asked for.
        identity: Which attempt of which run.
        entries: Ranks of each node, in order of node rank.
        answers: What the nodes said of themselves; a node without one is planned with what is known.
        where: Addresses and interfaces, or `None` in a dry run.
        ports: The ports that each node holds, in the order of `ports_wanted`.
    """
    common = _common(spec, identity, entries, answers, where, ports)
    nodes = tuple(_node_plan(common, entry, answers.get(entry.host.name)) for entry in entries)
    return LaunchPlan(
        run=identity.run,
        attempt=identity.attempt,
        world_size=common.world,
        master_addr=where.master_addr if where else None,
        master_port=common.master_port,
        nodes=nodes,
    )


def _common(
    spec: ClusterSpec,
    identity: RunIdentity,
    entries: Sequence[Layout],
    answers: Mapping[str, NodeAnswer],
    where: Meeting | None,
    ports: Mapping[str, Sequence[int]],
) -> Common:
    held = list(ports.get(entries[0].host.name, ()))
    routes = {} if where is None else where.interfaces
    return Common(
        spec=spec,
        identity=identity,
        world=sum(len(e.ranks) for e in entries),
        nodes=len(entries),
        where=where,
        master_port=held[0] if held else spec.network.master_port,
        frameworks=framework_values(spec, entries, where, ports),
        interfaces=interface_environments(spec, [e.host for e in entries], answers, routes),
    )


def environment_with_sources(
    spec: ClusterSpec,
    entries: Sequence[Layout],
    rank: int,
    answers: Mapping[str, NodeAnswer],
    where: Meeting | None,
) -> dict[str, tuple[str, str]]:
    """Return the value of each variable that a rank is given, and who sets it (`sourced_environment`)."""
    identity = RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    common = _common(spec, identity, entries, answers, where, {})
    entry = next(e for e in entries if rank in e.ranks)
    parts = sourced_environment(common, entry, answers.get(entry.host.name), rank, entry.ranks.index(rank))
    found = {name: (value, source) for source, part in parts for name, value in part.items()}
    return {**found, **dict.fromkeys(spec.secrets, (_HIDDEN, "secrets"))}


def _node_plan(common: Common, entry: Layout, answer: NodeAnswer | None) -> NodePlan:
    if job_of(common.spec).launcher is Launcher.TORCHRUN:
        workers: tuple[WorkerPlan, ...] = (_torchrun_plan(common, entry, answer),)
    else:
        workers = tuple(
            WorkerPlan(
                rank=rank,
                local_rank=local,
                argv=job_argv(job_of(common.spec)),
                env=worker_environment(common, entry, answer, rank, local),
            )
            for local, rank in enumerate(entry.ranks)
        )
    name = entry.host.name
    address = common.where.addresses[name] if common.where else entry.host.internal_ip
    return NodePlan(
        node=name,
        node_rank=entry.node_rank,
        address=address,
        workers=workers,
        python=entry.host.python,
        replaced=tuple(replaced_of_login(common.spec, entry, answer, workers[0].env)),
    )


def job_argv(job: JobSpec) -> tuple[str, ...]:
    """Return the argument list of one worker. A command given as a string goes to one strict bash, as a prologue."""
    match job:
        case JobSpec(script=str() as script):
            return (PYTHON, script, *job.args)
        case JobSpec(module=str() as module):
            return (PYTHON, "-m", module, *job.args)
        case JobSpec(command=str() as text):
            return (*STRICT_BASH, text, "bash", *job.args)
        case JobSpec(command=tuple() as argv):
            return (*argv, *job.args)
        case _:
            raise AssertionError("a job has one of script, module, command")


def _torchrun_plan(common: Common, entry: Layout, answer: NodeAnswer | None) -> WorkerPlan:
    """Return the one process per node that starts real torchrun; its workers get their ranks from it."""
    master = common.where.master_addr if common.where else ""
    argv = [PYTHON, "-m", "torch.distributed.run", f"--nnodes={common.nodes}", f"--node-rank={entry.node_rank}"]
    argv += [f"--nproc-per-node={len(entry.ranks)}", "--rdzv-backend=static", "--max-restarts=0"]
    argv += [f"--master-addr={master}", f"--master-port={common.master_port or 0}"]
    argv += ["--signals-to-handle=SIGTERM,SIGINT,SIGQUIT", "--no-python"]
    env = dict(worker_environment(common, entry, answer, entry.ranks[0], 0))
    for name in TORCHRUN_SETS:
        env.pop(name, None)
    return WorkerPlan(
        rank=entry.ranks[0],
        local_rank=0,
        argv=tuple(argv),
        env=env,
        hosts=entry.ranks,
        hosted=job_argv(job_of(common.spec)),
    )


def plan_json(plan: LaunchPlan, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return a plan in its published shape; secrets are hidden, and what only a node can tell is `None`."""
    hidden = dict.fromkeys(secrets, _HIDDEN)
    return {
        "run": plan.run,
        "world_size": plan.world_size,
        "master_addr": plan.master_addr,
        "master_port": plan.master_port,
        "nodes": [
            {
                "node": node.node,
                "node_rank": node.node_rank,
                "address": node.address,
                "workers": [
                    {
                        "rank": w.rank,
                        "local_rank": w.local_rank,
                        "argv": [node.python if a == PYTHON else a for a in (*w.argv, *w.hosted)],
                        "env": {**w.env, **hidden},
                    }
                    for w in node.workers
                ],
            }
            for node in plan.nodes
        ],
    }


def unknown_plan_json(spec: ClusterSpec, identity: RunIdentity) -> dict[str, Any]:
    """Return a plan in its published shape where only the nodes can tell how many workers there are.

    A node that has to be asked for its GPUs has one worker, which stands for all of them. `None` is what depends on the
    answers: it is what differs between a plan for one GPU on each of these nodes and a plan for two.
    """
    one, two = (
        plan_json(plan_launch(spec, identity, entries_if(spec, gpus), {}, None, {}), spec.secrets) for gpus in (1, 2)
    )
    nodes = [
        {**of_one, "workers": [_in_common(a, b) for a, b in _pairs(of_one["workers"], of_two["workers"])]}
        for of_one, of_two in zip(one["nodes"], two["nodes"], strict=True)
    ]
    return {**one, "world_size": None, "nodes": nodes}


def _pairs(some: list[dict[str, Any]], more: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair workers of the same node in two plans: the last one of the larger plan is another one than the first."""
    return zip(some, more if len(more) == len(some) else more[-1:], strict=True)


def _in_common(one: dict[str, Any], two: dict[str, Any]) -> dict[str, Any]:
    """Return what a worker has in both of two plans, with `None` for the rest."""
    return {
        "rank": _equal(one["rank"], two["rank"]),
        "local_rank": _equal(one["local_rank"], two["local_rank"]),
        "argv": [a if a == b else _COUNTED for a, b in zip(one["argv"], two["argv"], strict=True)],
        "env": {name: _equal(value, two["env"].get(name)) for name, value in one["env"].items()},
    }


def _equal(one: T, two: T) -> T | None:
    return one if one == two else None
