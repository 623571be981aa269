"""What a node is asked where ranks are forked from a process that has imported once for all of them. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import requests
from clusterctl.config.kinds import Launcher, StartMethod
from clusterctl.config.spec import ClusterSpec, Framework, JobSpec
from clusterctl.plan.environment import RunIdentity, shared_environment
from clusterctl.plan.launch import job_argv
from clusterctl.plan.layout import job_of

if TYPE_CHECKING:
    from typing import Any

    from clusterctl.plan.layout import Layout
    from clusterctl.plan.meeting import NodeAnswer


def obstacle(job: JobSpec) -> str | None:
    """Return why the ranks of a job cannot be forked, or `None`."""
    if job.command is not None:
        return "a `job.command` may be any program"
    if job.prologue is not None:
        return "a `job.prologue` makes the environment of each worker, which would come too late"
    if job.launcher is not Launcher.DIRECT:
        return f"`job.launcher: {job.launcher.value}` starts them by itself"
    if job.framework in (Framework.JAX, Framework.TENSORFLOW):
        return f"{job.framework.value} is not known to work in a fork"
    return None


def may_fork(job: JobSpec) -> bool:
    """Return whether nodes are asked to fork the ranks of a job."""
    return job.start_method is not StartMethod.SPAWN and obstacle(job) is None


def note(job: JobSpec) -> str | None:
    """Return what a person is told who asks for a fork that cannot be."""
    why = obstacle(job) if job.start_method is StartMethod.FORK else None
    return None if why is None else f"`job.start_method: fork`: the workers are started anew: {why}"


def _preload(job: JobSpec) -> list[str] | None:
    """Return what is imported once for all ranks; `None` for torch, or numpy where there is no torch."""
    if job.preload is not None:
        return list(job.preload)
    return {Framework.TORCH: ["torch"], Framework.KERAS: ["keras"]}.get(job.framework)


def forked(spec: ClusterSpec, identity: RunIdentity, entry: Layout, answer: NodeAnswer | None) -> dict[str, Any] | None:
    """Return the wire form of `requests.Forked` for a node, or `None` where every worker starts anew."""
    job = job_of(spec)
    if not may_fork(job):
        return None
    return asdict(
        requests.Forked(
            argv=list(job_argv(job)),
            env=dict(shared_environment(spec, identity, entry, answer)),
            preload=_preload(job),
            secrets=sorted(spec.secrets),
            inject=job.inject,
            keep=spec.restart.max_restarts > identity.attempt,
            demanded=job.start_method is StartMethod.FORK,
        )
    )
