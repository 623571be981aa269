"""`clusterctl sync`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.cli.option_values import parse_size_option
from clusterctl.config.host_ranges import fold_hosts, group_names_by_value
from clusterctl.config.spec import ClusterSpec, HostSpec, TransportKind
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.render.console import safe
from clusterctl.run.nodes import code_exclusions, code_manifest
from clusterctl.run.nodes.distribution import send_code
from clusterctl.run.nodes.downloads import MAX_BYTES, FetchOptions, pull_files
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.nodes.uploads import (
    SyncPreview,
    build_code_upload,
    describe_replaced_files,
    preview_sync,
)
from clusterctl.run.record.rundir import find_runs_root
from clusterctl.session.node_session import Session

if TYPE_CHECKING:
    from clusterctl.render.console import Console


@click.command("sync", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@options.exclude_option("Leave out these nodes.")
@click.option(
    "--pull",
    metavar="PATTERN",
    multiple=True,
    help="Fetch these files from the code folders of the nodes, e.g. 'ckpt/**'; may be repeated.",
)
@click.option("--to", metavar="DIR", help="Put pulled files here, in one folder for each node; ./pulled by default.")
@click.option("--max-size", metavar="SIZE", help="Maximum size of the files pulled from one node; 10GiB by default.")
@click.option("--dry-run", is_flag=True, help="Only show which files would be sent, removed and left out.")
@options.verbose_option("List every file that is left out, with the rule that excludes it.")
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    path: str | None,
    nodes: str | None,
    exclude: str | None,
    pull: tuple[str, ...],
    to: str | None,
    max_size: str | None,
    dry_run: bool,
    verbose: bool,
) -> int:
    """Push the code folder to the nodes as `up` does, or fetch files from the nodes with `--pull`.

    Local nodes use the folder itself, so nothing is pushed to them. A new folder for pulled files gets a `.gitignore`,
    so that later starts do not send these files to the nodes. With `--pull`, `sync` exits with 102 if no file matches.
    """
    for option, value in (("--to", to), ("--max-size", max_size)):
        if value is not None and not pull:
            raise click.UsageError(f"`{option}` needs `--pull`")
    if dry_run and pull:
        raise click.UsageError("`--dry-run` works only without `--pull`")
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    hosts = cluster_selection.select_spec_hosts(spec, nodes, exclude)
    if pull:
        _pull(
            spec,
            hosts,
            console,
            pull,
            Path(to or "pulled"),
            parse_size_option(max_size, "--max-size", MAX_BYTES),
            quiet=common.quiet,
        )
    else:
        _push(spec, hosts, console, dry_run=dry_run, verbose=verbose, quiet=common.quiet)
    return 0


def _push(
    spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console, *, dry_run: bool, verbose: bool, quiet: bool
) -> None:
    if spec.sync is None:
        raise RefusedError("the cluster file has `sync: none`", hint="set `sync.source`, or leave `sync` out")
    remote = [h for h in hosts if h.transport is not TransportKind.LOCAL]
    if not remote:
        if not quiet:
            console.write_stderr(f"nothing to push: local nodes use {spec.sync.source} itself")
        return
    store = code_manifest.ContentStore(find_runs_root().parent / "content")
    manifest = code_manifest.build_manifest(spec.sync, store)
    for doubt in code_exclusions.list_sync_warnings(manifest, store):
        console.write_stderr(f"warning: {doubt}")
    if dry_run or verbose:
        console.write_stdout(
            *(safe(line) for line in code_exclusions.format_exclusions(manifest.excluded, is_complete=verbose))
        )
    elif not quiet and (not_sent := code_exclusions.describe_user_exclusions(manifest.excluded)) is not None:
        console.write_stderr(safe(not_sent))
    files = build_code_upload(manifest, store)
    with open_all_sessions(spec, remote, progress=None if quiet else console.err) as sessions:
        if dry_run:
            previews, errors = call_all(
                sessions, lambda node, session: preview_sync(session, get_workdir(spec, node), files)
            )
            console.write_stdout(
                *(
                    line
                    for preview, nodes in group_names_by_value(previews).items()
                    for line in render_sync_preview(nodes, preview, len(manifest.files))
                )
            )
            raise_first(errors)
            return
        sent, errors = send_code(
            spec, sessions, files, run=None, on_warning=lambda text: console.write_stderr(f"warning: {text}")
        )
    if not quiet:
        total_files = plural(len(manifest.files), "file")
        for (number, total, _), nodes in group_names_by_value(sent).items():
            console.write_stderr(f"{fold_hosts(nodes)}: {number} of {total_files} sent, {format_size(total)}")
    if (warning := describe_replaced_files(sent)) is not None:
        console.write_stderr(f"warning: {warning}")
    raise_first(errors)


def _pull(
    spec: ClusterSpec,
    hosts: tuple[HostSpec, ...],
    console: Console,
    patterns: tuple[str, ...],
    to: Path,
    max_bytes: int,
    *,
    quiet: bool,
) -> None:
    is_new_folder = not to.exists()
    with open_all_sessions(spec, hosts, progress=None if quiet else console.err) as sessions:
        pulled, errors = call_all(
            sessions,
            lambda node, session: _pull_patterns(session, get_workdir(spec, node), patterns, to / node, max_bytes),
        )
    if is_new_folder and to.is_dir():
        # The next start must not send the fetched files to the nodes as code.
        (to / ".gitignore").write_text("*\n")
    told: dict[str, str] = {}
    for node, found in pulled.items():
        names = list(dict.fromkeys(name for files, _ in found.values() for name in files))
        console.write_stdout(*[str(to / node / name) for name in names])
        none = [f"nothing matches `{pattern}`" for pattern, (files, _) in found.items() if not files]
        total = sum(length for _, length in found.values())
        what = [f"{plural(len(names), 'file')}, {format_size(total)}"] if names else []
        told[node] = "; ".join([*what, *none])
    if not quiet:
        console.write_stderr(*(f"{fold_hosts(nodes)}: {text}" for text, nodes in group_names_by_value(told).items()))
    raise_first(errors)
    if not any(files for found in pulled.values() for files, _ in found.values()):
        quoted = ", ".join(f"`{pattern}`" for pattern in patterns)
        raise NotFoundError(f"no node has a file that matches {quoted}")


def _pull_patterns(
    session: Session, workdir: str, patterns: tuple[str, ...], target: Path, max_bytes: int
) -> dict[str, tuple[list[str], int]]:
    """Fetch the files that match the patterns; return file names and total bytes by pattern."""
    found: dict[str, tuple[list[str], int]] = {}
    for pattern in patterns:
        left = max_bytes - sum(total for _, total in found.values())
        found[pattern] = pull_files(session, workdir, pattern, target, FetchOptions(max_bytes=left))
    return found


_MAX_LISTED = 20


def render_sync_preview(nodes: Sequence[str], preview: SyncPreview, total_files: int) -> list[str]:
    """Return lines with the files that a sync would send to nodes, and the files that it would remove there.

    Args:
        nodes: Nodes with the same differences.
        preview: The files that a sync would send and remove.
        total_files: The number of files in the code folder.
    """
    total = sum(length for _, length in preview.files_to_send)
    parts = [f"{len(preview.files_to_send)} of {plural(total_files, 'file')} would be sent, {format_size(total)}"]
    if preview.removal_count:
        parts.append(f"{preview.removal_count} would be removed")
    if preview.active_run is not None:
        parts.append(f"refused while run {preview.active_run} uses the folder")
    sent = sorted(preview.files_to_send, key=lambda file: (-file[1], file[0]))
    return [
        f"{fold_hosts(nodes)}: {'; '.join(parts)}",
        *(f"  send    {format_size(length):>9}  {safe(path)}" for path, length in sent[:_MAX_LISTED]),
        *_count_unlisted(len(sent)),
        *(f"  remove  {'':9}  {safe(path)}" for path in preview.removed_paths[:_MAX_LISTED]),
        *_count_unlisted(preview.removal_count),
    ]


def _count_unlisted(number: int) -> list[str]:
    return [f"  and {number - _MAX_LISTED} more"] if number > _MAX_LISTED else []
