"""`clusterctl sync`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from clusterctl.cli import options
from clusterctl.cli.choices import FileChoices, together
from clusterctl.cli.copying.differs import differs_lines
from clusterctl.cli.lookup.reach import sessions_of
from clusterctl.cli.main import WithExamples
from clusterctl.cli.words import parse_size
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import TransportKind
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.render.console import safe
from clusterctl.run.nodes import code_manifest, sync_warnings
from clusterctl.run.nodes.downloads import MAX_BYTES, FetchOptions, pull
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.nodes.uploads import build_code_upload, preview_sync, sync_files
from clusterctl.run.record.rundir import find_runs_root

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.render.console import Console
    from clusterctl.session.session import Session

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncChoices(FileChoices):
    """What a person chose of `sync`."""

    nodes: str | None
    exclude: str | None
    pull: tuple[str, ...]
    to: str | None
    max_size: str | None
    dry_run: bool
    verbose: bool


@click.command("sync", cls=WithExamples)
@options.cluster_file
@options.nodes_option
@options.exclude_option("Not these nodes.")
@click.option(
    "--pull",
    metavar="PATTERN",
    multiple=True,
    help="Fetch files of the nodes' code folders instead, e.g. 'ckpt/**'; may be given again.",
)
@click.option("--to", metavar="DIR", help="Where pulled files go, a folder a node; ./pulled by default.")
@click.option("--max-size", metavar="SIZE", help="What the files of a node may have in all; 10GiB by default.")
@click.option("--dry-run", is_flag=True, help="Only show what would be sent, removed and left out.")
@options.verbose_option("List all that is left out, and by which rule.")
@options.output_options
@together(SyncChoices)
def command(choices: SyncChoices) -> int:
    """Push the code folder to the nodes as `up` does, or with `--pull` fetch files from them.

    Local nodes use the folder itself, so nothing is pushed to them. A folder that is made for pulled files gets a
    `.gitignore`, so that no later start sends them to the nodes. Exits with 102 where no file matches.
    """
    for option, value in (("--to", choices.to), ("--max-size", choices.max_size)):
        if value is not None and not choices.pull:
            raise click.UsageError(f"`{option}` needs `--pull`")
    if choices.dry_run and choices.pull:
        raise click.UsageError("`--dry-run` shows what would be pushed: leave out `--pull`")
    console = choices.console()
    spec = options.load_file(choices.path, choices.files, choices.sets, console=console).spec
    hosts = options.chosen_hosts(spec, choices.nodes, choices.exclude)
    if choices.pull:
        _pull(spec, hosts, console, choices)
    else:
        _push(spec, hosts, console, choices)
    return 0


def _push(spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console, choices: SyncChoices) -> None:
    if spec.sync is None:
        raise RefusedError("the file says `sync: none`", hint="set `sync.source`, or leave `sync` out")
    remote = [h for h in hosts if h.transport is not TransportKind.LOCAL]
    if not remote:
        if not choices.quiet:
            console.narrate(f"nothing to push: local nodes use {spec.sync.source} itself")
        return
    store = code_manifest.ContentStore(find_runs_root().parent / "content")
    manifest = code_manifest.build_manifest(spec.sync, store)
    for doubt in sync_warnings.list_sync_warnings(manifest, store):
        console.narrate(f"warning: {doubt}")
    if choices.dry_run or choices.verbose:
        console.data(
            *(safe(line) for line in sync_warnings.format_exclusions(manifest.left_out, whole=choices.verbose))
        )
    elif not choices.quiet and (not_sent := sync_warnings.describe_user_exclusions(manifest.left_out)) is not None:
        console.narrate(safe(not_sent))
    files = build_code_upload(manifest, store)
    with sessions_of(spec, remote, tell=None if choices.quiet else console.err) as sessions:
        if choices.dry_run:
            seen, errors = call_all(
                sessions, lambda node, session: preview_sync(session, get_workdir(spec, node), files)
            )
            console.data(
                *(line for found, nodes in _alike(seen) for line in differs_lines(nodes, found, len(manifest.files)))
            )
            raise_first(errors)
            return
        sent, errors = call_all(
            sessions,
            lambda node, session: sync_files(session, get_workdir(spec, node), files, run=None, say=lambda _what: None),
        )
    if not choices.quiet:
        of_all = plural(len(manifest.files), "file")
        for (number, total), nodes in _alike(sent):
            console.narrate(f"{fold_hosts(nodes)}: {number} of {of_all} sent, {format_size(total)}")
    raise_first(errors)


def _alike(answers: Mapping[str, T]) -> list[tuple[T, list[str]]]:
    """Return what nodes answered, each with the nodes that did."""
    alike: dict[T, list[str]] = {}
    for node, answer in answers.items():
        alike.setdefault(answer, []).append(node)
    return list(alike.items())


def _pull(spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console, choices: SyncChoices) -> None:
    to, most = Path(choices.to or "pulled"), parse_size(choices.max_size, "--max-size", MAX_BYTES)
    ours = not to.exists()
    with sessions_of(spec, hosts, tell=None if choices.quiet else console.err) as sessions:
        pulled, errors = call_all(
            sessions, lambda node, session: _pull_all(session, get_workdir(spec, node), choices.pull, to / node, most)
        )
    if ours and to.is_dir():
        # What was fetched is no code: the next start must not send it to every node.
        (to / ".gitignore").write_text("*\n")
    told: dict[str, str] = {}
    for node, found in pulled.items():
        names = list(dict.fromkeys(name for files, _ in found.values() for name in files))
        console.data(*[str(to / node / name) for name in names])
        none = [f"nothing matches `{pattern}`" for pattern, (files, _) in found.items() if not files]
        total = sum(length for _, length in found.values())
        what = [f"{plural(len(names), 'file')}, {format_size(total)}"] if names else []
        told[node] = "; ".join([*what, *none])
    if not choices.quiet:
        console.narrate(*(f"{fold_hosts(nodes)}: {text}" for text, nodes in _alike(told)))
    raise_first(errors)
    if not any(files for found in pulled.values() for files, _ in found.values()):
        patterns = ", ".join(f"`{pattern}`" for pattern in choices.pull)
        raise NotFoundError(f"no node has a file that matches {patterns}")


def _pull_all(
    session: Session, workdir: str, patterns: tuple[str, ...], target: Path, most: int
) -> dict[str, tuple[list[str], int]]:
    """Fetch what matches each pattern; return its files and their bytes."""
    found: dict[str, tuple[list[str], int]] = {}
    for pattern in patterns:
        left = most - sum(total for _, total in found.values())
        found[pattern] = pull(session, workdir, pattern, target, FetchOptions(max_bytes=left))
    return found
