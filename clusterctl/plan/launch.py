"""Plans a launch: ranks, rendezvous, environment and argv of each worker, from the spec and the nodes' facts. Pure.

Node ranks follow the order of the hosts. The ranks of a node are contiguous. A worker gets the same variables as under
torchrun, with the same meaning (torch 2.13, `torch/distributed/elastic/agent/server/local_elastic_agent.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from clusterctl.agent.protocol import run_requests
from clusterctl.agent.protocol.command_payload_types import Container, ProgramArguments
from clusterctl.config.field_types import StartMethod
from clusterctl.config.sections.shell_text_analysis import analyze_shell_variables
from clusterctl.config.spec import ClusterSpec, Framework, JobSpec
from clusterctl.plan import roles
from clusterctl.plan.environment import (
    AttemptSettings,
    RunIdentity,
    build_shared_environment,
    build_worker_environment,
    choose_interface_variables,
    describe_replaced_login_variables,
    format_endpoint,
    list_environment_sources,
    list_tensorflow_workers,
)
from clusterctl.plan.layout import PYTHON_PLACEHOLDER, NodeLayout, assign_ranks_assuming_gpus, get_job, get_workdir
from clusterctl.plan.rendezvous import NodeFacts, Rendezvous
from clusterctl.plan.roles import RolePart

_UNKNOWN_COUNT = "GPUS"
"""Placeholder for the number of GPUs on a command line, while the number is unknown."""

STRICT_BASH = ("bash", "--norc", "-eo", "pipefail", "-c")
"""Arguments that run a shell command of the user. The shell ends at the first failed command, also within a pipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """The plan of one worker; `env` holds the variables that clusterctl adds to the environment of the login."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """One node's part of an attempt.

    Attributes:
        python: The interpreter that the cluster file names; `None` if the node has to find one.
        replaced_login_variables: A sentence for each variable of the login whose value clusterctl replaces for the
            workers.
        role: The role of the node; "" without roles.
        is_service: Whether another role needs this one.
    """

    node: str
    node_rank: int
    address: str | None
    workers: tuple[WorkerPlan, ...]
    python: str | None = None
    replaced_login_variables: tuple[str, ...] = ()
    role: str = ""
    is_service: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the node."""
        return tuple(worker.rank for worker in self.workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """The plan of an attempt on all nodes."""

    run: str
    attempt: int
    world_size: int | None
    master_addr: str | None
    master_port: int | None
    nodes: tuple[NodePlan, ...]


_REDACTED = "***"


def plan_launch(
    spec: ClusterSpec,
    identity: RunIdentity,
    layouts: Sequence[NodeLayout],
    node_facts: Mapping[str, NodeFacts],
    rendezvous: Rendezvous | None,
    ports: Mapping[str, Sequence[int]],
) -> LaunchPlan:
    """Return the launch plan of one attempt.

    Args:
        spec: The spec of the cluster file.
        identity: The run and the attempt.
        layouts: The ranks of each node, in order of node rank.
        node_facts: The facts of each node; a node may be missing in a dry run.
        rendezvous: Addresses and interfaces, or `None` in a dry run.
        ports: The reserved ports of each node, in the order of `list_requested_ports`.
    """
    parts = roles.split_by_role(spec, layouts)
    planned = [_plan_part(part, parts, identity, node_facts, rendezvous, ports) for part in parts]
    nodes = [node for _, part in planned for node in part]
    return LaunchPlan(
        run=identity.run,
        attempt=identity.attempt,
        world_size=sum(len(node.workers) for node in nodes),
        master_addr=rendezvous.master_addr if rendezvous else None,
        master_port=planned[0][0].master_port,
        nodes=tuple(replace(node, node_rank=number) for number, node in enumerate(nodes)),
    )


def _plan_part(
    part: RolePart,
    parts: Sequence[RolePart],
    identity: RunIdentity,
    node_facts: Mapping[str, NodeFacts],
    rendezvous: Rendezvous | None,
    ports: Mapping[str, Sequence[int]],
) -> tuple[AttemptSettings, list[NodePlan]]:
    variables = roles.build_role_variables(part, parts, rendezvous)
    if part.name and rendezvous is not None:
        rendezvous = replace(rendezvous, master_addr=rendezvous.addresses[part.layouts[0].host.name])
    settings = _build_settings(part.spec, identity, part.layouts, node_facts, rendezvous, ports)
    settings = replace(settings, role_variables=variables)
    return settings, [_plan_node(settings, part, layout, node_facts.get(layout.host.name)) for layout in part.layouts]


def _build_settings(
    spec: ClusterSpec,
    identity: RunIdentity,
    layouts: Sequence[NodeLayout],
    node_facts: Mapping[str, NodeFacts],
    rendezvous: Rendezvous | None,
    ports: Mapping[str, Sequence[int]],
) -> AttemptSettings:
    reserved_ports = list(ports.get(layouts[0].host.name, ()))
    routes = {} if rendezvous is None else rendezvous.interfaces
    framework = get_job(spec).framework
    tf_workers: list[str] = []
    jax_coordinator = None
    if rendezvous is not None and framework is Framework.TENSORFLOW and ports:
        tf_workers = list_tensorflow_workers(layouts, rendezvous, ports)
    elif rendezvous is not None and framework is Framework.JAX and ports:
        jax_coordinator = format_endpoint(rendezvous.master_addr, reserved_ports[1])
    return AttemptSettings(
        spec=spec,
        identity=identity,
        world_size=sum(len(e.ranks) for e in layouts),
        node_count=len(layouts),
        rendezvous=rendezvous,
        master_port=reserved_ports[0] if reserved_ports else spec.network.master_port,
        tf_workers=tf_workers,
        jax_coordinator=jax_coordinator,
        interfaces=choose_interface_variables(spec, [e.host for e in layouts], node_facts, routes),
    )


def explain_environment(
    spec: ClusterSpec,
    layouts: Sequence[NodeLayout],
    rank: int,
    node_facts: Mapping[str, NodeFacts],
    rendezvous: Rendezvous | None,
) -> dict[str, tuple[str, str]]:
    """Return value and source of each variable of a rank (see `list_environment_sources`); secrets are redacted."""
    identity = RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    parts = roles.split_by_role(spec, layouts)
    part = max((part for part in parts if part.first_rank <= rank), key=lambda part: part.first_rank)
    settings, _ = _plan_part(part, parts, identity, node_facts, rendezvous, {})
    own = rank - part.first_rank
    layout = next(e for e in part.layouts if own in e.ranks)
    sources = list_environment_sources(settings, layout, node_facts.get(layout.host.name), own, layout.ranks.index(own))
    found = {name: (value, source) for source, env in sources for name, value in env.items()}
    return {**found, **dict.fromkeys(spec.secrets, (_REDACTED, "secrets"))}


def _plan_node(settings: AttemptSettings, part: RolePart, layout: NodeLayout, facts: NodeFacts | None) -> NodePlan:
    environments = [
        build_worker_environment(settings, layout, facts, rank, local_rank)
        for local_rank, rank in enumerate(layout.ranks)
    ]
    workers = tuple(
        WorkerPlan(
            rank=part.first_rank + rank,
            local_rank=local_rank,
            argv=build_job_argv(get_job(settings.spec), {*environments[local_rank], *settings.spec.secrets}),
            env=environments[local_rank],
        )
        for local_rank, rank in enumerate(layout.ranks)
    )
    name = layout.host.name
    address = settings.rendezvous.addresses[name] if settings.rendezvous else layout.host.internal_ip
    return NodePlan(
        node=name,
        node_rank=layout.node_rank,
        address=address,
        workers=workers,
        python=layout.host.python,
        replaced_login_variables=tuple(describe_replaced_login_variables(settings.spec, layout, facts, workers[0].env)),
        role=part.name,
        is_service=part.is_service,
    )


def build_job_argv(job: JobSpec, known_variables: Collection[str] = ()) -> tuple[str, ...]:
    """Return the arguments of one worker. A `job.command` that is a string runs in `STRICT_BASH`.

    Args:
        job: The job.
        known_variables: Variables that clusterctl sets. For any other variable that the command reads, bash warns if
            the variable is not set.
    """
    match job:
        case JobSpec(script=str() as script):
            return (PYTHON_PLACEHOLDER, script, *job.args)
        case JobSpec(module=str() as module):
            return (PYTHON_PLACEHOLDER, "-m", module, *job.args)
        case JobSpec(command=str() as text):
            return (*STRICT_BASH, _report_unset_variables(text, known_variables) + text, "bash", *job.args)
        case JobSpec(command=tuple() as argv):
            return (*argv, *job.args)
        case _:
            raise AssertionError("a job has one of script, module, command")


def _report_unset_variables(text: str, known_variables: Collection[str]) -> str:
    """Return shell commands that print a warning for each unset variable that the shell command `text` reads."""
    return "".join(
        f"[[ -v {name} ]] || echo 'clusterctl: `${name}` is not set on this node: bash takes it as empty' >&2; "
        for name in analyze_shell_variables(text).inherited
        if name not in known_variables
    )


def plan_to_json(plan: LaunchPlan, secrets: Mapping[str, str]) -> dict[str, Any]:
    """Return a plan as the JSON of `--json`; secrets are redacted, and values that only a node knows are `None`."""
    hidden = dict.fromkeys(secrets, _REDACTED)
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
                **({"role": node.role, "is_service": node.is_service} if node.role else {}),
                "workers": [
                    {
                        "rank": w.rank,
                        "local_rank": w.local_rank,
                        "argv": [node.python if a == PYTHON_PLACEHOLDER else a for a in w.argv],
                        "env": {**w.env, **hidden},
                    }
                    for w in node.workers
                ],
            }
            for node in plan.nodes
        ],
    }


def partial_plan_to_json(spec: ClusterSpec, identity: RunIdentity) -> dict[str, Any]:
    """Return the JSON of a plan whose number of workers is unknown until the nodes report their GPUs.

    The plan shows one worker for each node with an unknown number of GPUs. A value that depends on this number is
    `None`. To find these values, two plans are compared: one with one GPU on each of these nodes, and one with two
    GPUs.
    """
    one, two = (
        plan_to_json(plan_launch(spec, identity, assign_ranks_assuming_gpus(spec, gpus), {}, None, {}), spec.secrets)
        for gpus in (1, 2)
    )
    return {**_keep_equal(one, two), "world_size": None}


def _keep_equal(one: Any, two: Any) -> Any:
    """Merge two plans. Different values become `None`; different words of a command become `_UNKNOWN_COUNT`."""
    if isinstance(one, dict):
        return {key: _keep_equal(value, two.get(key)) for key, value in one.items()}
    if isinstance(one, list):
        # Compare the only worker of the smaller plan with the last worker of the larger plan.
        pairs = list(zip(one, two[-len(one) :], strict=True))
        return [_UNKNOWN_COUNT if isinstance(a, str) and a != b else _keep_equal(a, b) for a, b in pairs]
    return one if one == two else None


def find_fork_obstacle(job: JobSpec) -> str | None:
    """Return the reason why the ranks of a job cannot be forked, or `None`."""
    if job.roles:
        return "the addresses of the roles are known only after the fork"
    if job.command is not None:
        return "a `job.command` may be any program"
    if job.prologue is not None:
        return "a `job.prologue` sets the environment of each worker, and a fork would run it too late"
    if job.framework in (Framework.JAX, Framework.TENSORFLOW):
        return f"{job.framework.value} is not known to work in a fork"
    return None


def describe_refused_fork(job: JobSpec) -> str | None:
    """Return a warning if the file demands a fork that is not possible, or `None`."""
    why = find_fork_obstacle(job) if job.start_method is StartMethod.FORK else None
    return None if why is None else f"`job.start_method: fork`: workers start as new processes instead: {why}"


def build_fork_request(
    spec: ClusterSpec, identity: RunIdentity, layout: NodeLayout, facts: NodeFacts | None
) -> dict[str, Any] | None:
    """Return the JSON form of `ForkSettings` for a node; `None` if every worker starts as a new process."""
    job = get_job(spec)
    if job.start_method is StartMethod.SPAWN or find_fork_obstacle(job) is not None or build_container(spec):
        return None
    # With `None` the node imports torch, or numpy if torch is not installed.
    preload = {Framework.TORCH: ["torch"], Framework.KERAS: ["keras"]}.get(job.framework)
    return asdict(
        run_requests.ForkSettings(
            argv=list(build_job_argv(job)),
            env=dict(build_shared_environment(spec, identity, layout, facts)),
            preload=preload if job.preload is None else list(job.preload),
            secrets=sorted(spec.secrets),
            inject=job.inject,
            keep=spec.restart.max_restarts > identity.attempt,
            demanded=job.start_method is StartMethod.FORK,
        )
    )


def build_container(spec: ClusterSpec) -> Container | None:
    """Return the container of the workers, or `None`."""
    container = spec.environment.container if spec.environment is not None else None
    if container is None:
        return None
    return {
        "image": container.image,
        "runtime": container.runtime,
        "args": list(container.args),
        "mounts": list(container.mounts),
    }


def build_program_arguments(spec: ClusterSpec, node: str) -> ProgramArguments:
    """Return code folder, Python, environment and prologue of the job, without the variables of a rank."""
    host = next(host for host in spec.hosts if host.name == node)
    return {
        "cwd": get_workdir(spec, node),
        "env": {**spec.env, **host.env, **spec.secrets},
        "python": host.python,
        "python_hint": sys.executable,
        "prologue": spec.job.prologue if spec.job else None,
        "container": build_container(spec),
    }
