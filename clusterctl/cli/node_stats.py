"""Loads statistics of nodes and GPUs: the newest samples of a run, or measurements on the nodes of a cluster file."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clusterctl.agent.protocol import command_payload_types
from clusterctl.agent.protocol.command_payload_types import Facts, FactsRequest
from clusterctl.agent.protocol.record_types import HealthSample
from clusterctl.cli import option_values
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ClusterctlError, NotFoundError
from clusterctl.render.stats_table import NodeStats, stats_from_sample
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record import sample_files, state_reader
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import PROBE

_PROBE_DEADLINE_S = 4.0
_PROBE_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsSource:
    """The source of statistics: a run, or the hosts of a cluster file."""

    run: RunDir | None = None
    cluster_file: str | None = None


def find_stats_source(run_or_file: str | None) -> StatsSource:
    """Return the active run; if no run is active, return the cluster file.

    Args:
        run_or_file: The id or name of a run, or a cluster file; `None` for the only active run, or `./cluster.yaml`.

    Raises:
        NotFoundError: There is neither an active run nor a cluster file, and `run_or_file` names no ended run.
        RefusedError: Several runs match `run_or_file`.
    """
    path = option_values.DEFAULT_FILE if run_or_file is None else run_or_file
    is_file = os.path.isfile(path)
    try:
        run = state_reader.find_run(run_or_file)
    except NotFoundError:
        if not is_file:
            raise
        return StatsSource(cluster_file=path)
    over = state_reader.has_run_ended(run)
    if over and run_or_file is None and not is_file:
        raise NotFoundError(
            f"no run is active, and there is no {option_values.DEFAULT_FILE} here",
            hint=f"name a cluster file, or a run: {run.run} is the newest (`clusterctl ps -a`)",
        )
    return StatsSource(cluster_file=path) if over and is_file else StatsSource(run=run)


# --- a run


def load_run_stats(run: RunDir, state: RunState) -> list[NodeStats]:
    """Return the newest statistics of all nodes of a run, in the order of their node ranks."""
    nodes = sorted(state.nodes.values(), key=lambda n: n.node_rank)
    return [build_node_stats(state, node.node, sample_files.read_latest_health(run, node.node)) for node in nodes]


def build_node_stats(state: RunState, node: str, sample: HealthSample | None) -> NodeStats:
    """Return the statistics in a sample of a node; their time is converted to the clock of this head."""
    if sample is None:
        return NodeStats(node=node, time=None, status="unknown", reason="no sample yet")
    stats = stats_from_sample(node, sample)
    return replace(stats, time=sample["t"] - state.clock_ahead_s(node))


def read_run_gpus(run: RunDir) -> dict[str, tuple[int, ...]]:
    """Return the GPUs that a run uses on each node, in the order of local ranks. Omit nodes that use all GPUs."""
    try:
        hosts = json.loads(run.spec.read_text())["hosts"]
        gpus = {host["name"]: host.get("gpus") for host in hosts}
        return {n: tuple(range(g)) if isinstance(g, int) else tuple(g) for n, g in gpus.items() if g is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # The file is missing or damaged.


# --- measurements on nodes


def request_facts(session: Session, *groups: str) -> Facts:
    """Return groups of facts of a node. No command of the cluster file runs, so the user need not trust the file."""
    request: FactsRequest = {"groups": list(groups), "deadline": _PROBE_DEADLINE_S}
    asked: command_payload_types.ProbeArguments = {
        "python": None,
        "prologue": None,
        "env": {},
        "cwd": None,
        "request": request,
    }
    return PROBE.call(session, asked, timeout=_PROBE_DEADLINE_S + _PROBE_MARGIN_S)


def probe_node_stats(
    hosts: Sequence[HostSpec], sessions: Mapping[str, Session], errors: Mapping[str, ClusterctlError]
) -> list[NodeStats]:
    """Measure the statistics of nodes in parallel. If a node does not answer, its result contains the reason.

    `errors` are the errors of the nodes without a session.
    """

    def ask(node: str, session: Session) -> NodeStats:
        facts = request_facts(session, "machine", "gpus")
        try:
            return _make_stats_from_facts(node, facts)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            return _make_unknown_stats(node, f"its answer cannot be read: {error!r}")

    stats, failed = call_all(sessions, ask)
    stats |= {node: _make_unknown_stats(node, error) for node, error in {**errors, **failed}.items()}
    return [stats[host.name] for host in hosts]


def _make_unknown_stats(node: str, why: object) -> NodeStats:
    return NodeStats(node=node, time=None, status="unknown", reason=str(why).removeprefix(f"{node}: "))


def _make_stats_from_facts(node: str, facts: Mapping[str, Any]) -> NodeStats:
    groups = facts["groups"]
    machine, gpus = groups["machine"], groups["gpus"]
    sample: HealthSample = machine["data"] | gpus["data"] | {"t": facts["time"]}
    if gpus["status"] == "timeout":
        sample["status"], sample["reason"] = "stuck", f"the GPU driver: {gpus['reason']}"
    elif gpus["status"] != "ok":
        sample["status"], sample["reason"] = "error", f"measuring the GPUs failed: {gpus['reason']}"
    return stats_from_sample(node, sample)
