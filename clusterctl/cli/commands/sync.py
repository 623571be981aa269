"""`clusterctl sync`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.render.terminal.console import Console


@click.command("sync")
@options.cluster_file
@options.nodes_option
@click.option("--exclude", metavar="SET", help="Not these nodes.", shell_complete=options.offer("nodes"))
@click.option("--pull", metavar="PATTERN", help="Fetch files of the nodes' code folders instead, e.g. 'ckpt/**'.")
@click.option("--to", metavar="DIR", help="Where pulled files go, a folder a node; ./pulled by default.")
@click.option("--max-size", metavar="SIZE", help="What the files of a node may have in all; 10GiB by default.")
@options.output_options
def command(
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: str | None,
    exclude: str | None,
    pull: str | None,
    to: str | None,
    max_size: str | None,
    color: str,
    quiet: bool,
) -> int:
    """Push the code folder to the nodes as `up` does, or with `--pull` fetch files from them.

    Local nodes use the folder itself, so nothing is pushed to them.
    """
    for option, value in (("--to", to), ("--max-size", max_size)):
        if value is not None and pull is None:
            raise click.UsageError(f"`{option}` needs `--pull`")
    console = options.console_of(color)
    spec = options.load_file(path, files, sets, console=console).spec
    hosts = options.chosen_hosts(spec, nodes, exclude)
    if pull is not None:
        _pull(spec, hosts, pull, Path(to or "pulled"), console, quiet=quiet, most=_bytes(max_size))
    else:
        _push(spec, hosts, console, quiet=quiet)
    return 0


def _bytes(text: str | None) -> int:
    """Return how many bytes a size in words has."""
    from clusterctl.config.units import size as bytes_of
    from clusterctl.run.nodes.transfer import MOST_BYTES

    if text is None:
        return MOST_BYTES
    try:
        return bytes_of(text)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--max-size") from error


def _push(spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console, *, quiet: bool) -> None:
    from clusterctl.cli.lookup.reach import sessions_of
    from clusterctl.config.spec import TransportKind
    from clusterctl.plan.layout import workdir_of
    from clusterctl.run.nodes import code, sensitive
    from clusterctl.run.nodes.fan_out import each, raise_first
    from clusterctl.run.nodes.transfer import Parcel, push
    from clusterctl.run.record.rundir import runs_root
    from clusterctl.wording import size

    if spec.sync is None:
        raise RefusedError("the file says `sync: none`", hint="set `sync.source`, or leave `sync` out")
    remote = [h for h in hosts if h.transport is TransportKind.SSH]
    if not remote:
        if not quiet:
            console.narrate(f"nothing to push: local nodes use {spec.sync.source} itself")
        return
    store = code.ContentStore(runs_root().parent / "content")
    manifest = code.collect(spec.sync, store)
    doubt = sensitive.sentence(manifest.files)
    if doubt:
        console.narrate(f"warning: {doubt}")
    parcel = Parcel(manifest, store)
    with sessions_of(spec, remote) as sessions:
        sent, errors = each(
            sessions,
            lambda node, session: push(session, workdir_of(spec, node), parcel, run=None, say=lambda _what: None),
        )
    for node, (number, total) in sent.items():
        if not quiet:
            console.narrate(f"{node}: {number} of {len(manifest.files)} files sent, {size(total)}")
    raise_first(errors)


def _pull(
    spec: ClusterSpec,
    hosts: tuple[HostSpec, ...],
    pattern: str,
    to: Path,
    console: Console,
    *,
    quiet: bool,
    most: int,
) -> None:
    from clusterctl.cli.lookup.reach import sessions_of
    from clusterctl.plan.layout import workdir_of
    from clusterctl.render.ranks import count
    from clusterctl.run.nodes.fan_out import each, raise_first
    from clusterctl.run.nodes.transfer import pull
    from clusterctl.wording import size

    with sessions_of(spec, hosts) as sessions:
        got, errors = each(
            sessions, lambda node, session: pull(session, workdir_of(spec, node), pattern, to / node, most=most)
        )
    for node, (files, total) in got.items():
        console.data(*[str(to / node / name) for name in files])
        if not quiet:
            what = f"{count(len(files), 'file')}, {size(total)}" if files else f"nothing matches `{pattern}`"
            console.narrate(f"{node}: {what}")
    raise_first(errors)
