"""Runs that go on in the code folder that another one is about to use: both would write to the same places."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.path_rules import rename_workdir
from clusterctl.config.spec import TransportKind, load_spec
from clusterctl.run.record import run_lookup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from clusterctl.config.spec import ClusterSpec


def in_the_same_folder(spec: ClusterSpec, root: Path | None = None) -> Iterator[str]:
    """Yield a sentence for each run of this head that works where this one is to work.

    A folder of this machine is the person's own: who starts two runs there has chosen to.
    """
    mine = _folders(spec)
    for run in run_lookup.list_runs(root):
        if not mine or run_lookup.load_summary_or_state(run).over:
            continue
        try:
            theirs = _folders(load_spec(run.spec.read_text()))
        except (OSError, ValueError):
            continue
        if shared := [node for node, place in mine.items() if place in theirs.values()]:
            chosen = any(rename_workdir(host.workdir, spec.name, "") == host.workdir for host in spec.hosts)
            other = "another `workdir`" if chosen else "`--name OTHER`"
            yield f"{run.run} works in the same folder on {fold_hosts(shared)}; {other} gives this run one of its own"


def _folders(spec: ClusterSpec) -> dict[str, tuple[str, str | None]]:
    """Return host and folder of every node that is reached from here."""
    return {
        host.name: (host.address or host.host, host.workdir)
        for host in spec.hosts
        if host.transport is not TransportKind.LOCAL
    }
