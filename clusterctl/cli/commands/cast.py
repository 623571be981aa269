"""`clusterctl cast`."""

from __future__ import annotations

import posixpath
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.agent.protocol.command_payload_types import ExecArguments
from clusterctl.cli import cluster_selection, file_transfer, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.file_transfer import RemotePath, parse_cp_path, resolve_node_folder, split_file_pattern
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.cli.option_values import parse_size_option
from clusterctl.config.host_ranges import fold_hosts, group_names_by_value
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import RefusedError, SourceUnreachableError
from clusterctl.formatting import format_duration, format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes import distribution, uploads
from clusterctl.run.nodes.distribution import CastSettings
from clusterctl.run.nodes.downloads import FetchOptions, pull_files
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.nodes.uploads import Destination, Upload
from clusterctl.run.record.rundir import find_runs_root
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import EXEC

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_ALL_NODES = "all"
_NO_LIMIT = 1 << 60
_URL_START = "https://"
_FETCH_TIMEOUT_S = 24 * 3600.0
_MAX_ERROR_BYTES = 300
_DOWNLOAD = """
import os, shutil, sys, urllib.request
url, path = sys.stdin.read().split(None, 1)
path = os.path.expanduser(path)
part = path + ".part"
try:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with urllib.request.urlopen(url) as answer, open(part, "wb") as file:
        shutil.copyfileobj(answer, file, 1 << 20)
        if answer.length:
            raise OSError("the answer ended %d bytes before its end" % answer.length)
    os.replace(part, path)
except Exception as error:
    if os.path.exists(part):
        os.unlink(part)
    sys.exit(str(error))
"""
"""Runs on this machine, or on the node of `--on`. The URL is no argument: other users see arguments, and a URL may be
secret.
"""


@click.command("cast", cls=CliCommand, reads_file=True)
@click.argument("source", metavar="SRC", shell_complete=make_completer("files"))
@click.argument("target", metavar="[NODES:]PATH")
@options.exclude_option("Leave out these nodes.")
@click.option("--on", "origin", metavar="NODE", help="With a URL: let this node fetch it, instead of this machine.")
@click.option("--limit", metavar="RATE", help="The most that each machine sends, and receives, e.g. 50MB/s.")
@click.option("--dry-run", is_flag=True, help="Only show what each node lacks.")
@options.json_option
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    source: str,
    target: str,
    exclude: str | None,
    origin: str | None,
    limit: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Copy large files to all nodes at once: the nodes pass them on to one another, encrypted.

    SRC is a file or folder of this machine, NODE:PATH, or an https:// URL. It is read once, however many nodes there
    are. PATH is as in `cp`; without NODES it is a path on every node. An interrupted cast continues when the command
    is repeated, and nothing that a node has is sent again. A file appears at its place when it is complete. If nodes
    cannot reach one another, this machine sends the files to them.
    """
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(common, None, console=console).spec
    place = _parse_target(target)
    hosts = _select_hosts(spec, place.nodes, exclude)
    limit_bytes = parse_size_option(limit.removesuffix("/s"), "--limit", 0) if limit is not None else None
    if limit_bytes is not None and limit_bytes <= 0:
        raise click.BadParameter("the limit must be more than 0, e.g. 50MB/s", param_hint="--limit")
    if origin is not None and not source.startswith(_URL_START):
        raise click.UsageError("`--on` needs an https:// URL as SRC")
    transfer = file_transfer.TransferSettings(spec, console, common.quiet or as_json, _NO_LIMIT, uses_home_folder=False)
    with ExitStack() as stack:
        job = _prepare_job(transfer, stack, _parse_source(spec, source, place.path, origin), place.path, hosts)
        job = replace(job, settings=replace(job.settings, limit=limit_bytes))
        if dry_run:
            _show_missing(job, console, as_json=as_json)
        else:
            _cast(job, transfer, as_json=as_json)
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The files of a cast.

    Attributes:
        path: The path, on this machine or on `host`.
        host: The node that has the files, or `None`.
        url: The address from which this machine or `host` fetches the file first, or `None`.
    """

    path: str
    host: HostSpec | None = None
    url: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A cast that is ready to start."""

    spec: ClusterSpec
    sessions: Mapping[str, Session]
    places: Mapping[str, Destination]
    files: Upload
    settings: CastSettings = field(default_factory=CastSettings)
    relay: Callable[[], Upload] | None = None
    """Fetches the files of the source node to this machine."""


def _parse_target(word: str) -> RemotePath:
    try:
        parsed = parse_cp_path(word)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return parsed if isinstance(parsed, RemotePath) else RemotePath(_ALL_NODES, parsed)


def _select_hosts(spec: ClusterSpec, nodes: str, exclude: str | None) -> tuple[HostSpec, ...]:
    every = nodes == _ALL_NODES and all(host.name != _ALL_NODES for host in spec.hosts)
    return cluster_selection.select_spec_hosts(spec, None if every else nodes, exclude)


def _is_folder(target: str) -> bool:
    return target.endswith("/") or target in ("", ".", "~")


def _parse_source(spec: ClusterSpec, source: str, target: str, origin: str | None) -> _Source:
    if not source.startswith(_URL_START):
        parsed = _parse_target(source) if isinstance(parse_cp_path(source), RemotePath) else None
        if parsed is None:
            return _Source(path=source)
        return _Source(path=parsed.path, host=_select_one(spec, parsed.nodes, "SRC"))
    name = posixpath.basename(urllib.parse.unquote(urllib.parse.urlsplit(source).path))
    if not name or " " in source:
        raise click.UsageError(f"{source} names no file")
    if origin is None:
        return _Source(path=name, url=source)
    path = posixpath.join(target, name) if _is_folder(target) else target
    return _Source(path=path, host=_select_one(spec, origin, "`--on`"), url=source)


def _select_one(spec: ClusterSpec, nodes: str, what: str) -> HostSpec:
    hosts = _select_hosts(spec, nodes, None)
    if len(hosts) > 1:
        raise click.UsageError(f"{what} must name one node, not {len(hosts)}")
    return hosts[0]


def _prepare_job(
    transfer: file_transfer.TransferSettings,
    stack: ExitStack,
    source: _Source,
    target: str,
    hosts: tuple[HostSpec, ...],
) -> _Job:
    """Fetch and list the files, and connect to the nodes, also to the node that has the files."""
    spec, files = transfer.spec, Upload([], [])
    if source.host is None:
        path = source.path if source.url is None else _fetch_to_head(stack, source.url, source.path)
        files = uploads.build_file_upload([path], transfer.max_bytes)
    wanted = {host.name: host for host in (*hosts, *filter(None, [source.host]))}
    progress = None if transfer.quiet else transfer.console.err
    sessions = stack.enter_context(open_all_sessions(spec, list(wanted.values()), progress=progress))
    places = {node: Destination(get_workdir(spec, node), target, _is_folder(target)) for node in sessions}
    if source.host is None:
        return _Job(spec=spec, sessions=sessions, places=places, files=files)
    session = sessions[source.host.name]
    pattern = split_file_pattern(source.path)
    folder = resolve_node_folder(get_workdir(spec, session.node), pattern.folder)
    if source.url is not None:
        _fetch_to_node(session, source.url, posixpath.join(folder, pattern.pattern))
    files, hashes = distribution.list_node_files(session, folder, pattern.pattern)
    places[session.node] = Destination(folder, ".", is_folder=True)

    def relay() -> Upload:
        here = _make_temporary_folder(stack)
        pull_files(session, folder, pattern.pattern, here, FetchOptions(max_bytes=_NO_LIMIT, follow_links=True))
        return uploads.build_file_upload(sorted(map(str, here.iterdir())), transfer.max_bytes)

    settings = CastSettings(piece_hashes=hashes)
    return _Job(spec=spec, sessions=sessions, places=places, files=files, settings=settings, relay=relay)


def _hide_query(url: str) -> str:
    """Return a URL without the part that may contain a signature."""
    return url.partition("?")[0]


def _fetch_to_head(stack: ExitStack, url: str, name: str) -> str:
    """Fetch a file to a temporary folder, which `stack` removes; return its path."""
    path = str(_make_temporary_folder(stack) / name)
    argv = [sys.executable, "-c", _DOWNLOAD]
    done = subprocess.run(argv, input=f"{url}\n{path}", stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        text = f"cannot fetch {_hide_query(url)}: {done.stderr.strip()}"
        raise RefusedError(text, hint="`--on NODE` lets a node fetch it")
    return path


def _make_temporary_folder(stack: ExitStack) -> Path:
    root = find_runs_root().parent
    root.mkdir(parents=True, exist_ok=True)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root, prefix="fetched-")))


def _fetch_to_node(session: Session, url: str, path: str) -> None:
    errors = bytearray()
    stream = session.allocate_streams(lambda data: errors.extend(data.payload[-_MAX_ERROR_BYTES:]), count=2)
    argv = [session.preamble.python, "-c", _DOWNLOAD]
    question: ExecArguments = {"argv": argv, "stdin": f"{url}\n{path}", "stream": stream}
    answer = EXEC.call(session, question, timeout=_FETCH_TIMEOUT_S)
    if answer["exit_code"] != 0:
        why = errors[-_MAX_ERROR_BYTES:].decode("utf-8", "replace").strip()
        raise RefusedError(
            f"{session.node}: cannot fetch {_hide_query(url)}: {why}", hint="without `--on`, this machine fetches it"
        )


def _show_missing(job: _Job, console: Console, *, as_json: bool) -> None:
    def compare(node: str, session: Session) -> tuple[int, int]:
        ask = partial(uploads.compare_copy, session, job.places[node], job.files.listing, look=True)
        need = uploads.compare_files(session, job.files.listing, ask)[1]["need"]
        return len(need), sum(job.files.entries[number][1] for number in need)

    found, errors = call_all(job.sessions, compare)
    if as_json:
        console.write_stdout_json({node: {"files": count, "bytes": size} for node, (count, size) in found.items()})
    else:
        of = plural(len(job.files.entries), "file")
        for (count, size), nodes in group_names_by_value(found).items():
            console.write_stdout(f"{fold_hosts(nodes)}: {count} of {of} would be sent, {format_size(size)}")
    raise_first(errors)


def _cast(job: _Job, transfer: file_transfer.TransferSettings, *, as_json: bool) -> None:
    began, console = time.monotonic(), transfer.console
    warnings: list[str] = []
    head_sent_bytes: list[int] = []
    progress = file_transfer.UploadProgress(transfer)

    def warn(text: str) -> None:
        warnings.append(text)
        file_transfer.write_warning(transfer, text)

    settings = replace(job.settings, on_plan=progress.set_total, on_warning=warn, on_sent=head_sent_bytes.append)
    sent, errors = distribution.send_files(job.spec, job.sessions, job.places, job.files, progress, settings)
    cut = {node: job.sessions[node] for node, error in errors.items() if isinstance(error, SourceUnreachableError)}
    if cut and job.relay is not None:
        warn(f"{fold_hosts(sorted(cut))} can reach no node that has the files: this machine relays them")
        head = replace(settings, piece_hashes=None)
        relayed, failed = distribution.send_files(job.spec, cut, job.places, job.relay(), progress, head)
        sent, errors = sent | relayed, {n: e for n, e in errors.items() if n not in cut} | failed
    seconds = time.monotonic() - began
    if as_json:
        console.write_stdout_json(
            {
                "nodes": {node: {"files": r.files, "bytes": r.bytes, "path": r.place} for node, r in sent.items()},
                "errors": {node: str(error) for node, error in errors.items()},
                "warnings": warnings,
                "seconds": round(seconds, 3),
                "head_sent_bytes": sum(head_sent_bytes),
            }
        )
    else:
        file_transfer.print_upload_results(transfer, sent, job.files)
        total = sum(result.bytes for result in sent.values())
        if total and not transfer.quiet:
            rate = f"{format_size(total / seconds)}/s"
            console.write_stderr(f"{format_size(total)} in {format_duration(seconds)}, {rate} in all")
    raise_first(errors)
