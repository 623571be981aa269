"""Splits the job of a spec into its roles: each role is a job of its own on its own nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter

from clusterctl.config.field_types import StartMethod
from clusterctl.config.role_allocation import PROGRAM_KEYS, allocate_roles
from clusterctl.config.spec import ClusterSpec, JobSpec, ReadySpec, RoleSpec
from clusterctl.config.value_parsers import InvalidValueError
from clusterctl.errors import RefusedError
from clusterctl.plan.environment import format_endpoint
from clusterctl.plan.layout import NodeLayout, get_job
from clusterctl.plan.rendezvous import Rendezvous


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePart:
    """A role of a job, or the whole job if it has no roles.

    Attributes:
        name: The name of the role; "" without roles.
        spec: The spec with the role as its job.
        layouts: The layouts of its nodes; node ranks and ranks count from 0.
        first_rank: The rank of the run that has rank 0 of the role.
        is_service: Whether another role needs this one. The run does not wait for its end.
        ready_port: The port of the role's server on its first node, or `None`.
    """

    name: str
    spec: ClusterSpec
    layouts: tuple[NodeLayout, ...]
    first_rank: int = 0
    is_service: bool = False
    ready_port: int | None = None


def list_jobs(job: JobSpec) -> list[JobSpec]:
    """Return the job of each role, or the job itself if it has no roles."""
    return [_build_job(job, role) for role in job.roles.values()] or [job]


def _build_job(job: JobSpec, role: RoleSpec) -> JobSpec:
    program = {key: getattr(role, key) for key in (*PROGRAM_KEYS, "args")}
    # A forkserver starts before the addresses of the roles are known.
    return replace(job, roles={}, start_method=StartMethod.SPAWN, **program)


def assign_roles(spec: ClusterSpec) -> ClusterSpec:
    """Return the spec in which each host has its role, and the hosts are in the order of the roles.

    Raises:
        RefusedError: The hosts do not suffice, or no role takes a host.
    """
    job = spec.job
    if job is None or not job.roles:
        return spec
    if spec.min_nodes is not None or spec.spare_hosts:
        raise RefusedError("a job with roles uses no spares and no `--min-nodes`", hint="remove them, or the roles")
    hosts = {host.name: host for host in spec.hosts}
    try:
        placed = allocate_roles(job.roles, list(hosts))
    except InvalidValueError as error:
        raise RefusedError(f"job.roles: {error}", hint=error.hint) from error
    return replace(
        spec,
        hosts=tuple(
            replace(hosts[host], job_role=role, workers=job.roles[role].workers or hosts[host].workers)
            for host, role in placed.items()
        ),
    )


def split_by_role(spec: ClusterSpec, layouts: Sequence[NodeLayout]) -> list[RolePart]:
    """Return the part of each role, in the order of the file; one part without roles."""
    job = get_job(spec)
    if not job.roles:
        return [RolePart(name="", spec=spec, layouts=tuple(layouts))]
    needed = {name for role in job.roles.values() for name in role.needs}
    parts = []
    for name, role in job.roles.items():
        own = [entry for entry in layouts if entry.host.job_role == name]
        first = own[0].ranks[0]
        parts.append(
            RolePart(
                name=name,
                spec=replace(spec, job=_build_job(job, role), env={**spec.env, **role.env}),
                layouts=tuple(
                    replace(entry, node_rank=number, ranks=tuple(rank - first for rank in entry.ranks))
                    for number, entry in enumerate(own)
                ),
                first_rank=first,
                is_service=name in needed,
                ready_port=None if role.ready is None else role.ready.port,
            )
        )
    return parts


def list_start_phases(job: JobSpec) -> list[tuple[str, ReadySpec | None]]:
    """Return the roles in the order of their starts, each with what the next role waits for."""
    roles, needed = job.roles, {name for role in job.roles.values() for name in role.needs}
    order = TopologicalSorter({name: role.needs for name, role in roles.items()}).static_order()
    return [(name, roles[name].ready if name in needed else None) for name in order] or [("", None)]


def build_role_variables(part: RolePart, parts: Sequence[RolePart], rendezvous: Rendezvous | None) -> Mapping[str, str]:
    """Return the variables that tell the ranks of a role its name and the addresses of all roles; none without roles.

    Without a rendezvous, in a dry run, the addresses are unknown.
    """
    if not part.name:
        return {}
    env = {"CLUSTERCTL_ROLE": part.name, "CLUSTERCTL_RANK_OFFSET": str(part.first_rank), "ROLE_NAME": part.name}
    if rendezvous is None:
        return env
    for other in parts:
        prefix = f"CLUSTERCTL_{other.name.upper()}"
        addresses = [rendezvous.addresses[layout.host.name] for layout in other.layouts]
        env |= {f"{prefix}_HOST": addresses[0], f"{prefix}_HOSTS": ",".join(addresses)}
        if other.ready_port is not None:
            env[f"{prefix}_ADDR"] = format_endpoint(addresses[0], other.ready_port)
    return env
