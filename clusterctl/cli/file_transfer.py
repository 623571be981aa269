"""Copies files for `cp`: from the head to nodes, and from nodes to the head."""

from __future__ import annotations

import posixpath
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.config.host_ranges import fold_hosts, group_names_by_value
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import ClusterctlError, NodeRefusedError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.render.cast_progress import render_cast_progress
from clusterctl.run.nodes import uploads
from clusterctl.run.nodes.distribution import CastSettings, send_files
from clusterctl.run.nodes.downloads import FetchOptions, pull_files
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.session.node_session import Session

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_DRAW_EVERY_S = 0.2

FetchedFiles = dict[str, tuple[list[str], int]]
"""For each requested path, the files and their total size in bytes."""


@dataclass(frozen=True, slots=True)
class TransferSettings:
    """The settings of a transfer of files.

    Attributes:
        spec: The spec of the cluster.
        console: The console that prints messages.
        quiet: Whether to print only errors.
        max_bytes: The largest number of bytes to copy to or from one node.
        uses_home_folder: Whether relative paths on nodes start at the home folder instead of the code folder.
    """

    spec: ClusterSpec
    console: Console
    quiet: bool
    max_bytes: int
    uses_home_folder: bool

    def get_base_folder(self, node: str) -> str:
        """Return the folder on a node at which relative paths start."""
        return "~" if self.uses_home_folder else get_workdir(self.spec, node)


class _ProgressCounter:
    """Shows on a terminal how many bytes have been copied so far, from all nodes together."""

    def __init__(self, transfer: TransferSettings) -> None:
        self._transfer, self._done, self._shown = transfer, 0, 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._transfer.quiet or self._done - self._shown < 1 << 20:
                return
            self._shown = self._done
            self._transfer.console.err.draw([format_size(self._done)])


class UploadProgress:
    """Shows on a terminal how much each node has got of the files that it lacks. Any thread may call it."""

    def __init__(self, transfer: TransferSettings) -> None:
        self._transfer = transfer
        self._lock = threading.Lock()
        self._total: Mapping[str, int] = {}
        self._done: Counter[str] = Counter()
        self._began_at = self._drawn_at = time.monotonic()

    def set_total(self, total: Mapping[str, int]) -> None:
        """Set the bytes that each node lacks."""
        with self._lock:
            self._total, self._began_at = total, time.monotonic()

    def __call__(self, node: str, count: int) -> None:
        """Count bytes that a node has got."""
        with self._lock:
            self._done[node] += count
            now = time.monotonic()
            if self._transfer.quiet or now - self._drawn_at < _DRAW_EVERY_S:
                return
            self._drawn_at = now
            terminal = self._transfer.console.err
            rate = sum(self._done.values()) / (now - self._began_at)
            terminal.draw(render_cast_progress(self._done, self._total or self._done, rate, terminal.glyphs))


def copy_to_nodes(transfer: TransferSettings, sources: Sequence[str], hosts: Sequence[HostSpec], target: str) -> None:
    """Copy files of this machine to several nodes in parallel.

    Raises:
        ClusterctlError: A source does not exist, or a node refused the files.
    """
    load = uploads.build_file_upload(sources, transfer.max_bytes)
    for path in [] if transfer.quiet else load.excluded:
        transfer.console.write_stderr(f"left out: {path} is neither a file nor a link to a file")
    inside = len(sources) > 1 or target.endswith("/") or target in ("", ".", "~")
    with open_all_sessions(transfer.spec, hosts, progress=None if transfer.quiet else transfer.console.err) as sessions:
        progress = UploadProgress(transfer)
        progress.set_total(dict.fromkeys(sessions, load.size_bytes))
        settings = CastSettings(on_plan=progress.set_total, on_warning=lambda text: write_warning(transfer, text))
        places = {node: uploads.Destination(transfer.get_base_folder(node), target, inside) for node in sessions}
        sent, errors = send_files(transfer.spec, sessions, places, load, progress, settings)
    print_upload_results(transfer, sent, load)
    raise_first({node: _name_node_in_refusal(node, error) for node, error in errors.items()})


def print_upload_results(
    transfer: TransferSettings, sent: Mapping[str, uploads.UploadResult], files: uploads.Upload
) -> None:
    """Print what each node has got."""
    what = plural(len(files.entries), "file")
    _print_results(
        transfer, {n: f"{s.files} of {what} sent, {format_size(s.bytes)} {{to}} {s.place}" for n, s in sent.items()}
    )


def copy_from_nodes(transfer: TransferSettings, sources: Sequence[tuple[Sequence[HostSpec], str]], target: str) -> None:
    """Copy files of nodes to this machine. If there are several nodes, each node's files get a folder of their own.

    Args:
        transfer: The settings of the transfer.
        sources: The paths to copy, each with its nodes.
        target: The path on this machine to copy to.

    Raises:
        NotFoundError: A path matches no file on a node.
        ClusterctlError: A node refused the request, or this machine cannot write a file.
    """
    hosts = {host.name: host for some, _ in sources for host in some}
    wanted = {name: [path for some, path in sources if name in [h.name for h in some]] for name in hosts}
    several = len(hosts) > 1
    here = Path(target)
    if here.exists() and not here.is_dir() and (several or len(sources) > 1):
        raise RefusedError(f"{target} is a file, so several files cannot be copied to it")
    ours = several and not here.exists()
    counter = _ProgressCounter(transfer)

    def transfer_files(node: str, session: Session) -> FetchedFiles:
        into = _LocalTarget(here / node, None) if several else None
        return _fetch(
            transfer,
            session,
            wanted[node],
            lambda path: into or _choose_local_target(target, path, alone=len(sources) == 1),
            counter,
        )

    with open_all_sessions(
        transfer.spec, list(hosts.values()), progress=None if transfer.quiet else transfer.console.err
    ) as sessions:
        got, errors = call_all(sessions, transfer_files)
    some = {node: found for node, found in got.items() if any(names for names, _ in found.values())}
    if ours and here.is_dir():
        _exclude_from_sync(here, has_files=bool(some))
    _print_results(
        transfer, {node: _format_fetched(found, here / "NODE" if several else here) for node, found in some.items()}
    )
    raise_first({node: _name_node_in_refusal(node, error) for node, error in errors.items()})
    _raise_if_missing(got)


def _fetch(
    transfer: TransferSettings,
    session: Session,
    paths: Sequence[str],
    into: Callable[[str], _LocalTarget],
    counter: Callable[[int], None],
) -> FetchedFiles:
    """Fetch the files at paths of a node; return the names and the total size of the files for each path."""
    found: FetchedFiles = {}
    for path in paths:
        asked, to = split_file_pattern(path), into(path)
        left = transfer.max_bytes - sum(total for _, total in found.values())
        how = FetchOptions(max_bytes=left, follow_links=True, new_name=to.new_name, on_bytes=counter)
        found[path] = pull_files(
            session,
            resolve_node_folder(transfer.get_base_folder(session.node), asked.folder),
            asked.pattern,
            to.folder,
            how,
        )
    return found


def _exclude_from_sync(folder: Path, *, has_files: bool) -> None:
    """Exclude a folder of fetched files from later syncs; remove the folder if it is empty."""
    if has_files:
        (folder / ".gitignore").write_text("*\n")
    elif not any(folder.iterdir()):
        folder.rmdir()


@dataclass(frozen=True, slots=True)
class _LocalTarget:
    folder: Path
    new_name: str | None


def _choose_local_target(target: str, path: str, *, alone: bool) -> _LocalTarget:
    """Return the local folder for one node's files, and the new name of a single file if `target` gives a name."""
    here = Path(target)
    if here.is_dir() or target.endswith("/") or not split_file_pattern(path).is_single_path or not alone:
        return _LocalTarget(here, None)
    return _LocalTarget(here.parent, here.name)


def _format_fetched(found: FetchedFiles, here: Path) -> str:
    number = len({name for names, _ in found.values() for name in names})
    return f"{plural(number, 'file')}, {format_size(sum(total for _, total in found.values()))} {{to}} {here}"


def write_warning(transfer: TransferSettings, text: str) -> None:
    """Print a warning, unless only errors are wanted."""
    if not transfer.quiet:
        transfer.console.write_stderr(f"warning: {text}")


def _print_results(transfer: TransferSettings, texts: Mapping[str, str]) -> None:
    """Print the result of each node; nodes with equal results share a line."""
    if transfer.quiet:
        return
    arrow = transfer.console.err.glyphs.arrow
    alike = group_names_by_value({node: text.replace("{to}", arrow, 1) for node, text in texts.items()})
    transfer.console.write_stderr(*(f"{fold_hosts(nodes)}: {text}" for text, nodes in alike.items()))


def _name_node_in_refusal(node: str, error: ClusterctlError) -> ClusterctlError:
    """Move the node's name out of a refusal's text, so that equal errors of nodes share a line."""
    if not isinstance(error, RefusedError) or not str(error).startswith(f"{node}: "):
        return error
    return NodeRefusedError(node, str(error).removeprefix(f"{node}: "), hint=error.hint)


def _raise_if_missing(got: Mapping[str, FetchedFiles]) -> None:
    missing: dict[str, list[str]] = {}
    for node, found in got.items():
        for path, (names, _) in found.items():
            if not names:
                missing.setdefault(path, []).append(node)
    if missing:
        said = "; ".join(f"{fold_hosts(nodes)}: no file is at `{path}`" for path, nodes in missing.items())
        raise NotFoundError(
            said, hint="a relative path is relative to the code folder; an absolute path begins with `/`"
        )


_WILDCARDS = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A path on nodes.

    Attributes:
        nodes: The set of nodes, or `all`.
        path: The path on each node, relative to the code folder unless it is absolute.
    """

    nodes: str
    path: str


def parse_cp_path(word: str) -> RemotePath | str:
    """Parse an argument of `cp`: `NODES:PATH`, or a path of this machine.

    As in `scp`, a colon after a slash belongs to a path: `./a:b` is a local file. A colon in brackets is part of a set
    of nodes.

    Raises:
        ValueError: There is no node before the colon.
    """
    depth = 0
    for at, sign in enumerate(word):
        depth += (sign == "[") - (sign == "]")
        if sign == "/" and not depth:
            return word
        if sign == ":" and not depth:
            if not at:
                raise ValueError(f"`{word}` names no node before its colon")
            return RemotePath(word[:at], word[at + 1 :])
    return word


@dataclass(frozen=True, slots=True)
class FilePattern:
    """A pattern for files of a node.

    Attributes:
        folder: The folder with the files, relative to the code folder unless it begins with `/` or `~`.
        pattern: The pattern of the files, relative to `folder`.
        is_single_path: Whether the pattern has no wildcard. The target may give the copy of a single path a new name.
    """

    folder: str
    pattern: str
    is_single_path: bool


def split_file_pattern(path: str) -> FilePattern:
    """Split a path into its folder and its pattern with wildcards: `*`, `?`, `[...]`, and `**` for any folders.

    Raises:
        ValueError: The path does not name a file.
    """
    absolute = path.startswith("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or parts == ["~"]:
        return FilePattern("/" if absolute else "~" if parts else "", "*", is_single_path=False)
    if parts[-1] == "..":
        raise ValueError(f"`{path}` is not a name; copy the content instead, as in `{path}/*`")
    wild = next((at for at, part in enumerate(parts) if _WILDCARDS & set(part)), None)
    at = len(parts) - 1 if wild is None else wild
    if ".." in parts[at:]:
        raise ValueError(f"`{path}`: `..` is not allowed after a wildcard")
    return FilePattern(
        ("/" if absolute else "") + "/".join(parts[:at]), "/".join(parts[at:]), is_single_path=wild is None
    )


def resolve_node_folder(workdir: str, folder: str) -> str:
    """Return the path of a folder on a node; a relative folder starts at `workdir`."""
    return folder if folder.startswith(("/", "~")) else posixpath.join(workdir, folder)
