"""`clusterctl cp`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from clusterctl.cli import cluster_selection, file_transfer, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.file_transfer import RemotePath, parse_cp_path, split_file_pattern
from clusterctl.cli.node_sessions import build_ad_hoc_spec
from clusterctl.cli.option_values import DEFAULT_FILE, parse_size_option
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import NotFoundError
from clusterctl.run.nodes.downloads import MAX_BYTES

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_ALL_NODES = "all"


@click.command("cp", cls=CliCommand, reads_file=True)
@click.argument("words", metavar="SRC... DST", nargs=-1, required=True, shell_complete=make_completer("files"))
@options.exclude_option("Leave out these nodes.")
@click.option(
    "--max-size", metavar="SIZE", help="Maximum size of the files copied to or from one node; 10GiB by default."
)
@click.pass_obj
def command(common: CommonOptions, *, words: tuple[str, ...], exclude: str | None, max_size: str | None) -> int:
    """Copy files and folders to nodes or from nodes. NODES:PATH is a path on nodes, as in `gpu[01-04]:data`.

    `all:PATH` means every node of the cluster file. A relative PATH is relative to the code folder, or to the home
    folder if there is no cluster file. PATH may contain wildcards; quote them. All nodes get the same files. `cp` does
    not send files that a node already has. With several source nodes, DST gets one folder for each node. Each file is
    replaced atomically and keeps its mode. `cp` refuses to overwrite code of a live run (exit code 6), and exits with
    102 if a file is missing.
    """
    *sources, target = _parse_paths(words)
    if not sources:
        raise click.UsageError("give source and destination, as in `clusterctl cp data.bin all:data/`")
    remote_sources = [source for source in sources if isinstance(source, RemotePath)]
    if remote_sources and len(remote_sources) < len(sources):
        raise click.UsageError("the sources must be either all on nodes or all on this machine")
    if remote_sources and isinstance(target, RemotePath):
        raise click.UsageError("files cannot be copied from nodes to nodes: copy them to this machine first")
    if not remote_sources and not isinstance(target, RemotePath):
        raise click.UsageError(f"no path names a node; write NODES:PATH, as in `all:{target}`")
    console = common.console()
    named = [word for word in (*sources, target) if isinstance(word, RemotePath)]
    max_bytes = parse_size_option(max_size, "--max-size", MAX_BYTES)
    spec_of_file = _load_spec(common, named, console, exclude)
    spec = spec_of_file or build_ad_hoc_spec(",".join(one.nodes for one in named))
    transfer = file_transfer.TransferSettings(
        spec, console, common.quiet, max_bytes, uses_home_folder=spec_of_file is None
    )
    if isinstance(target, RemotePath):
        file_transfer.copy_to_nodes(
            transfer, [str(source) for source in sources], _select_hosts(spec, target, exclude), target.path
        )
    else:
        file_transfer.copy_from_nodes(
            transfer, [(_select_hosts(spec, one, exclude), one.path) for one in remote_sources], str(target)
        )
    return 0


def _parse_paths(words: tuple[str, ...]) -> list[RemotePath | str]:
    try:
        parsed = [parse_cp_path(word) for word in words]
        for source in parsed[:-1]:
            if isinstance(source, RemotePath):
                split_file_pattern(source.path)
        return parsed
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _load_spec(
    common: CommonOptions, named: list[RemotePath], console: Console, exclude: str | None
) -> ClusterSpec | None:
    """Return the spec of the cluster file. Without a file, return `None`; the paths then contain host names for ssh."""
    if common.files or common.sets or os.path.isfile(DEFAULT_FILE):
        return cluster_selection.load_chosen_cluster_file(common, None, console=console).spec
    if exclude or any(one.nodes == _ALL_NODES for one in named):
        raise NotFoundError(
            f"no {DEFAULT_FILE} is in this folder, so the nodes are unknown",
            hint="name a cluster file with `--file`, or write host names for ssh",
        )
    return None


def _select_hosts(spec: ClusterSpec, one: RemotePath, exclude: str | None) -> tuple[HostSpec, ...]:
    every = one.nodes == _ALL_NODES and all(host.name != _ALL_NODES for host in spec.hosts)
    return cluster_selection.select_spec_hosts(spec, None if every else one.nodes, exclude)
