"""What a job finds around it on a node, for programs that a person runs there beside it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from clusterctl.plan.layout import workdir_of

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_types import ProgramArguments
    from clusterctl.config.spec import ClusterSpec


def of_job(spec: ClusterSpec, node: str) -> ProgramArguments:
    """Return code folder, Python, environment and prologue of the job; what ranks have of their own is not in it."""
    host = next(host for host in spec.hosts if host.name == node)
    return {
        "cwd": workdir_of(spec, node),
        "env": {**spec.env, **host.env, **spec.secrets},
        "python": host.python,
        "python_hint": sys.executable,
        "prologue": spec.job.prologue if spec.job else None,
    }
