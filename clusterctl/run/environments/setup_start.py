"""Runs `job.setup` on the nodes of a run: once on each node for each text, before the first worker starts."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping

from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ClusterctlError
from clusterctl.plan.layout import get_workdir
from clusterctl.run.environments.node_entries import (
    build_setup_request,
    call_until_failure,
    get_environments_folder,
    make_entry,
)
from clusterctl.run.nodes.fan_out import Progress
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.controller_events import ControllerEvent
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import ENVIRONMENT


def run_setup(
    run: RunDir, spec: ClusterSpec, sessions: Mapping[str, Session], post: Callable[[ControllerEvent], None]
) -> None:
    """Run `job.setup` on each node where this text has not run for this workdir and this Python.

    Raises:
        NodeError, NodesError: The setup failed on nodes, or they were lost.
    """
    job = spec.job
    if job is None or job.setup is None:
        return
    setup = job.setup
    step = Progress("setup", len(sessions), post)
    hosts = {host.name: host for host in spec.hosts}

    def run_on_node(node: str, session: Session, failed: threading.Event) -> bool:
        host, workdir = hosts[node], get_workdir(spec, node)
        content = json.dumps([setup, node, workdir, host.python])
        folder, name = get_environments_folder(session), f"setup{hashlib.sha256(content.encode()).hexdigest()[:24]}"
        is_new = not ENVIRONMENT.call(session, {"folder": folder, "names": [name]})["made"]
        if is_new:
            step.set_waiting(node, "running the setup")
            env = {**spec.env, **host.env, **spec.secrets}
            request = build_setup_request(folder, name, setup, workdir, env, host.python)
            make_entry(run, node, session, request, failed, what="setup", limit_s=job.setup_limit)
        step.finish_node(node)
        return is_new

    try:
        done = call_until_failure(sessions, run_on_node)
    except ClusterctlError:
        step.end(failed=True)
        raise
    step.end("" if any(done.values()) else "as before")
