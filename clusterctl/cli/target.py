"""The node of `shell` and `port-forward`: the named one, the one of a rank, or the first of the file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.lookup.named import spec_of
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import load_spec
from clusterctl.errors import NotFoundError
from clusterctl.run.record import state_reader
from clusterctl.suggestion import similar

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_types import RankArguments
    from clusterctl.cli.command import CommonOptions
    from clusterctl.config.spec import ClusterSpec, HostSpec


@dataclass(frozen=True, slots=True)
class Target:
    """A node.

    Attributes:
        spec: The cluster of the node, and its job.
        host: The node.
        rank: The requested rank of a live run, or `None`.
    """

    spec: ClusterSpec
    host: HostSpec
    rank: RankArguments | None = None


def find_target(
    common: CommonOptions, *, node: str | None, host: str | None, rank: int | None, reference: str | None
) -> Target:
    """Return the node that the options name, or the first node of the file if they name none.

    Args:
        common: Names the cluster file.
        node: A node of the file.
        host: A host that needs no cluster file.
        rank: A rank of a live run.
        reference: The run of the rank.

    Raises:
        click.UsageError: The options contradict each other.
        NotFoundError: There is no such node or rank.
    """
    chosen = [name for name, value in (("`NODE`", node), ("`-w`", host), ("`--rank`", rank)) if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} name two things; only one can be used")
    if rank is not None or host is not None:
        options.refuse_beside("--rank" if host is None else "-w", ("--file", common.files), ("--set", common.sets))
    if rank is not None:
        return _find_rank(reference, rank)
    if reference is not None:
        raise click.UsageError("`--run` needs `--rank`")
    if host is not None:
        spec = spec_of(host)
    else:
        spec = options.load_file(common, None, with_secrets=True, console=common.console()).spec
    return Target(spec, _find_host(spec, node))


def _find_host(spec: ClusterSpec, node: str | None) -> HostSpec:
    if node is None:
        return spec.hosts[0]
    for host in spec.hosts:
        if host.name == node:
            return host
    names = [host.name for host in spec.hosts]
    close = similar(node, names)
    raise NotFoundError(
        f"no node `{node}`", hint=f"did you mean `{close}`?" if close else f"there are: {fold_hosts(names)}"
    )


def _find_rank(reference: str | None, rank: int) -> Target:
    run = state_reader.find_run(reference)
    state, _ = state_reader.load_visible_state(run)
    if state.over or rank not in state.workers:
        what = "is over" if state.over else f"has no rank {rank}" if state.workers else "has not started"
        raise NotFoundError(f"{run.run} {what}", hint="`clusterctl ps` lists the runs that go on")
    spec = load_spec(run.spec.read_text())
    node = state.workers[rank].node
    return Target(spec, _find_host(spec, node), {"run": run.run, "node": node, "rank": rank})
