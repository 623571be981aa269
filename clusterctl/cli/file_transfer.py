"""The file transfers of `cp`: from the head to nodes, and from nodes to the head."""

from __future__ import annotations

import posixpath
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.spec import ClusterSpec, HostSpec
from clusterctl.errors import NodeRefusedError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes import uploads
from clusterctl.run.nodes.downloads import FetchOptions, pull
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.session.session import Session

if TYPE_CHECKING:
    from clusterctl.render.console import Console

T = TypeVar("T")

FetchedFiles = dict[str, tuple[list[str], int]]
"""Paths, with the files that each names and their bytes in all."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What both ways need.

    Attributes:
        spec: Of the cluster.
        console: Where it is said.
        quiet: Nothing is said but what went wrong.
        most: Bytes of one node.
        at_home: Relative paths of nodes begin in the home, not in the code folder.
    """

    spec: ClusterSpec
    console: Console
    quiet: bool
    most: int
    at_home: bool

    def base(self, node: str) -> str:
        """Return where relative paths of a node begin."""
        return "~" if self.at_home else get_workdir(self.spec, node)


class _Counter:
    """Says on a terminal how many bytes have moved so far, on all nodes together."""

    def __init__(self, way: Transfer, total: int | None) -> None:
        self._way, self._total, self._done, self._shown = way, total, 0, 0
        self._lock = threading.Lock()

    def __call__(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._way.quiet or self._done - self._shown < 1 << 20:
                return
            self._shown = self._done
            of = "" if self._total is None else f" of at most {format_size(self._total)}"
            self._way.console.err.draw([f"{format_size(self._done)}{of}"])


def copy_to_nodes(way: Transfer, sources: Sequence[str], hosts: Sequence[HostSpec], target: str) -> None:
    """Copy files of this machine to all of these nodes at once.

    Raises:
        ClusterctlError: A source is not there, or a node did not take them.
    """
    load = uploads.collect_upload(sources, way.most)
    for path in [] if way.quiet else load.excluded:
        way.console.narrate(f"left out: {path} is no file, and no link to one")
    inside = len(sources) > 1 or target.endswith("/") or target in ("", ".", "~")
    with open_all_sessions(way.spec, hosts, tell=None if way.quiet else way.console.err) as sessions:
        told = _Counter(way, load.size * len(sessions))

        def one(node: str, session: Session) -> uploads.UploadResult:
            with_node = uploads.Destination(way.base(node), target, inside)
            return uploads.copy_files(session, with_node, load, told)

        sent, errors = call_all(sessions, lambda node, session: _by_node(node, lambda: one(node, session)))
    what = plural(len(load.entries), "file")
    _say(way, {n: f"{s.files} of {what} sent, {format_size(s.bytes)} {{to}} {s.place}" for n, s in sent.items()})
    raise_first(errors)


def copy_from_nodes(way: Transfer, sources: Sequence[tuple[Sequence[HostSpec], str]], target: str) -> None:
    """Copy files of nodes here, into a folder a node where there are several.

    Args:
        way: How.
        sources: Paths, and the nodes on which each is.
        target: A path of this machine.

    Raises:
        NotFoundError: A node has none of what a path names.
        ClusterctlError: A node did not give it, or it cannot be written.
    """
    hosts = {host.name: host for some, _ in sources for host in some}
    wanted = {name: [path for some, path in sources if name in [h.name for h in some]] for name in hosts}
    several = len(hosts) > 1
    here = Path(target)
    if here.exists() and not here.is_dir() and (several or len(sources) > 1):
        raise RefusedError(f"{target} is a file, and several are to be copied there")
    ours = several and not here.exists()
    told = _Counter(way, None)

    def one(node: str, session: Session) -> FetchedFiles:
        into = _Into(here / node, None) if several else None
        return _fetch(
            way, session, wanted[node], lambda path: into or _into(target, path, alone=len(sources) == 1), told
        )

    with open_all_sessions(way.spec, list(hosts.values()), tell=None if way.quiet else way.console.err) as sessions:
        got, errors = call_all(sessions, lambda node, session: _by_node(node, lambda: one(node, session)))
    some = {node: found for node, found in got.items() if any(names for names, _ in found.values())}
    if ours and here.is_dir():
        _keep_from_nodes(here, something=bool(some))
    _say(way, {node: _told(found, here / "NODE" if several else here) for node, found in some.items()})
    raise_first(errors)
    _refuse_missing(got)


def _fetch(
    way: Transfer, session: Session, paths: Sequence[str], into: Callable[[str], _Into], told: Callable[[int], None]
) -> FetchedFiles:
    """Fetch each of these paths of a node; return the files of each, and their bytes."""
    found: FetchedFiles = {}
    for path in paths:
        asked, to = split_pattern(path), into(path)
        left = way.most - sum(total for _, total in found.values())
        how = FetchOptions(max_bytes=left, follow_links=True, new_name=to.named, on_bytes=told)
        found[path] = pull(
            session, resolve_node_folder(way.base(session.node), asked.folder), asked.pattern, to.folder, how
        )
    return found


def _keep_from_nodes(folder: Path, *, something: bool) -> None:
    """Have no later start send a folder of results to every node; remove it where nothing came."""
    if something:
        (folder / ".gitignore").write_text("*\n")
    elif not any(folder.iterdir()):
        folder.rmdir()


@dataclass(frozen=True, slots=True)
class _Into:
    folder: Path
    named: str | None


def _into(target: str, path: str, *, alone: bool) -> _Into:
    """Return where files of one node go: into a folder, or under the name that the target is."""
    here = Path(target)
    if here.is_dir() or target.endswith("/") or not split_pattern(path).one or not alone:
        return _Into(here, None)
    return _Into(here.parent, here.name)


def _told(found: FetchedFiles, here: Path) -> str:
    number = len({name for names, _ in found.values() for name in names})
    return f"{plural(number, 'file')}, {format_size(sum(total for _, total in found.values()))} {{to}} {here}"


def _say(way: Transfer, texts: Mapping[str, str]) -> None:
    """Say what moved, once for nodes of which the same is true."""
    if way.quiet:
        return
    alike: dict[str, list[str]] = {}
    arrow = way.console.err.glyphs.arrow
    for node, text in texts.items():
        alike.setdefault(text.replace("{to}", arrow, 1), []).append(node)
    way.console.narrate(*(f"{fold_hosts(nodes)}: {text}" for text, nodes in alike.items()))


def _by_node(node: str, call: Callable[[], T]) -> T:
    """Do something with a node; what it refuses is told with its name, once for nodes that refuse the same."""
    try:
        return call()
    except RefusedError as error:
        if not str(error).startswith(f"{node}: "):
            raise
        raise NodeRefusedError(node, str(error).removeprefix(f"{node}: "), hint=error.hint) from error


def _refuse_missing(got: Mapping[str, FetchedFiles]) -> None:
    missing: dict[str, list[str]] = {}
    for node, found in got.items():
        for path, (names, _) in found.items():
            if not names:
                missing.setdefault(path, []).append(node)
    if missing:
        said = "; ".join(f"{fold_hosts(nodes)}: no file is at `{path}`" for path, nodes in missing.items())
        raise NotFoundError(said, hint="a relative path begins in the code folder, an absolute one with `/`")


_WILD = frozenset("*?[")


@dataclass(frozen=True, slots=True)
class RemotePath:
    """Files of nodes.

    Attributes:
        nodes: A set of their names, or `all`.
        path: On each of them; relative to the code folder.
    """

    nodes: str
    path: str


def parse_path(word: str) -> RemotePath | str:
    """Return what a word names: `NODES:PATH`, or a path of this machine.

    As for `scp`, a colon behind a slash belongs to a path: `./a:b` is a file here. One in brackets is part of a set.

    Raises:
        ValueError: Nodes are to be named, and none are.
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
    """Files of a node, as it is asked for them.

    Attributes:
        folder: Where the pattern begins; relative to the code folder, unless it begins with `/` or `~`.
        pattern: What is meant there.
        one: It names one file or folder, which may be given another name.
    """

    folder: str
    pattern: str
    one: bool


def split_pattern(path: str) -> FilePattern:
    """Return how a node is asked for a path, which may hold wildcards: `*`, `?`, `[...]`, and `**` for any folders.

    Raises:
        ValueError: It names no files.
    """
    absolute = path.startswith("/")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts or parts == ["~"]:
        return FilePattern("/" if absolute else "~" if parts else "", "*", one=False)
    if parts[-1] == "..":
        raise ValueError(f"`{path}` has no name of its own; name what is in it, as in `{path}/*`")
    wild = next((at for at, part in enumerate(parts) if _WILD & set(part)), None)
    at = len(parts) - 1 if wild is None else wild
    if ".." in parts[at:]:
        raise ValueError(f"`{path}`: no `..` can stand behind a wildcard")
    return FilePattern(("/" if absolute else "") + "/".join(parts[:at]), "/".join(parts[at:]), one=wild is None)


def resolve_node_folder(workdir: str, folder: str) -> str:
    """Return a folder that may be relative to the code folder as a node finds it."""
    return folder if folder.startswith(("/", "~")) else posixpath.join(workdir, folder)
