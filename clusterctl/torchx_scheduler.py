"""A scheduler of TorchX: `torchx run -s clusterctl -cfg cluster_file=cluster.yaml dist.ddp -j 2x8 --script train.py`.

Each replica of the role is one process per host, which starts the workers itself; torchrun does so in `dist.ddp`. All
else is a run like any other: `clusterctl status`, `logs`, `why` and `down` take the id of the application.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from torchx.schedulers.api import DescribeAppResponse, ListAppResponse, Scheduler, Stream, filter_regex
from torchx.specs import AppDef, AppDryRunInfo, AppState, ReplicaStatus, Role, RoleStatus, macros, runopts
from typing_extensions import override

from clusterctl import api
from clusterctl.config.spec import ClusterSpec, JobSpec
from clusterctl.config.spec import Role as HostRole
from clusterctl.errors import NotFoundError, RefusedError

_STATES = {
    api.RunPhase.SUCCEEDED: AppState.SUCCEEDED,
    api.RunPhase.FAILED: AppState.FAILED,
    api.RunPhase.CANCELLED: AppState.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Request:
    """What `schedule` starts; as text, it is the job of the cluster file."""

    spec: ClusterSpec
    has_health_check: bool

    @override
    def __str__(self) -> str:
        job = self.spec.job
        assert job is not None
        return json.dumps({"name": self.spec.name, "env": dict(self.spec.env), "command": job.command}, indent=2)


class ClusterctlScheduler(Scheduler[Mapping[str, Any]]):
    """Starts applications of one role on the hosts of a cluster file."""

    def __init__(self, session_name: str) -> None:
        super().__init__("clusterctl", session_name)

    def _run_opts(self) -> runopts:
        options = runopts()
        options.add("cluster_file", type_=str, default="cluster.yaml", help="cluster file with the hosts")
        options.add("health", type_=bool, default=True, help="whether to check the hosts before the start")
        return options

    def _submit_dryrun(self, app: AppDef, cfg: Mapping[str, Any]) -> AppDryRunInfo[Request]:
        return AppDryRunInfo(Request(_make_spec(app, api.load(cfg["cluster_file"])), bool(cfg["health"])), str)

    def schedule(self, dryrun_info: AppDryRunInfo[Request]) -> str:
        """Start a run, and return its id."""
        request = dryrun_info.request
        return api.up(request.spec, health=request.has_health_check).id

    def describe(self, app_id: str) -> DescribeAppResponse | None:
        """Return the state of a run and of its hosts, or `None` if this head has no such run."""
        status = _find_status(app_id)
        if status is None:
            return None
        state = _STATES.get(status.phase, AppState.RUNNING)
        workers = status.details["workers"]
        replicas = [ReplicaStatus(worker["rank"], state, "worker", hostname=worker["node"]) for worker in workers]
        return DescribeAppResponse(
            app_id=app_id,
            state=state,
            msg=(status.details.get("cause") or {}).get("message", ""),
            roles=[Role("worker", image="", num_replicas=len(workers))],
            roles_statuses=[RoleStatus("worker", replicas)],
        )

    def list(self) -> list[ListAppResponse]:
        """Return all runs of this head."""
        runs = [run.status() for run in api.list_runs()]
        return [ListAppResponse(run.run, _STATES.get(run.phase, AppState.RUNNING)) for run in runs]

    def _cancel_existing(self, app_id: str) -> None:
        api.Run(app_id).down()

    def log_iter(
        self,
        app_id: str,
        role_name: str,
        k: int = 0,
        regex: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        should_tail: bool = False,
        streams: Stream | None = None,
    ) -> Iterable[str]:
        """Yield the output of one host; `until` and `streams` are ignored."""
        start = None if since is None else since.timestamp()
        lines = (f"{line.text}\n" for line in api.Run(app_id).logs(ranks=[k], since=start, follow=should_tail))
        return filter_regex(regex, lines) if regex else lines


def create_scheduler(session_name: str, **_options: object) -> ClusterctlScheduler:
    """Return the scheduler; TorchX calls this by the entry point."""
    return ClusterctlScheduler(session_name)


def _make_spec(app: AppDef, spec: ClusterSpec) -> ClusterSpec:
    if len(app.roles) != 1:
        raise RefusedError(
            f"`{app.name}` has {len(app.roles)} roles", hint="start each role as an application of its own"
        )
    # bash of `dist.ddp` reads the two variables on the host.
    values = macros.Values(img_root="", app_id=app.name, replica_id="$GROUP_RANK", rank0_env="MASTER_ADDR")
    role = values.apply(app.roles[0])
    hosts = tuple(replace(host, workers=1) for host in spec.hosts)
    count = sum(host.role is HostRole.WORKER for host in hosts)
    if role.num_replicas > count:
        raise RefusedError(
            f"`{app.name}` needs {role.num_replicas} hosts, and the cluster file has {count}",
            hint="use fewer nodes (`-j NODESxWORKERS`) or add hosts",
        )
    job = replace(
        spec.job or JobSpec(),
        script=None,
        module=None,
        command=(role.entrypoint, *role.args),
        args=(),
        nodes=(role.num_replicas, role.num_replicas),
    )
    return replace(spec, name=app.name, hosts=hosts, env={**spec.env, **role.env}, job=job)


def _find_status(app_id: str) -> api.RunStatus | None:
    try:
        return api.Run(app_id).status()
    except NotFoundError:
        return None
