"""The one node that a person wants to work at: named, or the one of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import Choices
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import NotFoundError
from clusterctl.suggestion import similar

if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_types import RankArguments
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.render.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetChoices(Choices):
    """What a person chose of a command that works at one node."""

    files: tuple[str, ...]
    sets: tuple[str, ...]
    where: str | None
    node: str | None
    rank: int | None
    reference: str | None


@dataclass(frozen=True, slots=True)
class Target:
    """A node.

    Attributes:
        spec: Of the cluster that it belongs to; what it says of a job holds for the node, too.
        host: Itself.
        rank: The rank of a live run that was asked for, or `None`.
    """

    spec: ClusterSpec
    host: HostSpec
    rank: RankArguments | None = None


def target_of(choices: TargetChoices, console: Console) -> Target:
    """Return the node that is meant; where none is named it is the first one of the file.

    Raises:
        click.UsageError: What was chosen says several things.
        NotFoundError: There is no such node or rank.
    """
    chosen = [name for name, value in _named(choices) if value is not None]
    if len(chosen) > 1:
        raise click.UsageError(f"{' and '.join(chosen)} name two things; only one can be used")
    if choices.rank is not None or choices.where is not None:
        option = "--rank" if choices.where is None else "-w"
        options.refuse_beside(option, ("--file", choices.files), ("--set", choices.sets))
    if choices.rank is not None:
        return _of_rank(choices.reference, choices.rank)
    if choices.reference is not None:
        raise click.UsageError("`--run` needs `--rank`")
    if choices.where is not None:
        from clusterctl.cli.lookup.named import spec_of

        spec = spec_of(choices.where)
    else:
        spec = options.load_file(None, choices.files, choices.sets, with_secrets=True, console=console).spec
    return Target(spec, _host(spec, choices.node))


def _named(choices: TargetChoices) -> tuple[tuple[str, object], ...]:
    return (("`NODE`", choices.node), ("`-w`", choices.where), ("`--rank`", choices.rank))


def _host(spec: ClusterSpec, node: str | None) -> HostSpec:
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


def _of_rank(reference: str | None, rank: int) -> Target:
    from clusterctl.config.spec_json import load_spec
    from clusterctl.run.record import run_lookup

    run = run_lookup.find_run(reference)
    state, _ = run_lookup.load_visible_state(run)
    if state.over or rank not in state.workers:
        what = "is over" if state.over else f"has no rank {rank}" if state.workers else "has not started"
        raise NotFoundError(f"{run.run} {what}", hint="`clusterctl ps` lists the runs that go on")
    spec = load_spec(run.spec.read_text())
    node = state.workers[rank].node
    return Target(spec, _host(spec, node), {"run": run.run, "node": node, "rank": rank})
