"""The two ways of `cp`: from the head to nodes, and from nodes to the head."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clusterctl.cli.copying.words import asked_of, folder_of
from clusterctl.cli.lookup.reach import sessions_of
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import NodeRefusedError, NotFoundError, RefusedError
from clusterctl.formatting import format_size, plural
from clusterctl.plan.layout import get_workdir
from clusterctl.run.nodes import uploads
from clusterctl.run.nodes.downloads import FetchOptions, pull
from clusterctl.run.nodes.fan_out import call_all, raise_first

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.render.console import Console
    from clusterctl.session.session import Session


T = TypeVar("T")

Found = dict[str, tuple[list[str], int]]
"""Paths, with the files that each names and their bytes in all."""


@dataclass(frozen=True, slots=True)
class Way:
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

    def __init__(self, way: Way, total: int | None) -> None:
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


def to_nodes(way: Way, sources: Sequence[str], hosts: Sequence[HostSpec], target: str) -> None:
    """Copy files of this machine to all of these nodes at once.

    Raises:
        ClusterctlError: A source is not there, or a node did not take them.
    """
    load = uploads.collect_upload(sources, way.most)
    for path in [] if way.quiet else load.excluded:
        way.console.narrate(f"left out: {path} is no file, and no link to one")
    inside = len(sources) > 1 or target.endswith("/") or target in ("", ".", "~")
    with sessions_of(way.spec, hosts, tell=None if way.quiet else way.console.err) as sessions:
        told = _Counter(way, load.size * len(sessions))

        def one(node: str, session: Session) -> uploads.UploadResult:
            with_node = uploads.Destination(way.base(node), target, inside)
            return uploads.copy_files(session, with_node, load, told)

        sent, errors = call_all(sessions, lambda node, session: _by_node(node, lambda: one(node, session)))
    what = plural(len(load.entries), "file")
    _say(way, {n: f"{s.files} of {what} sent, {format_size(s.bytes)} {{to}} {s.place}" for n, s in sent.items()})
    raise_first(errors)


def to_head(way: Way, sources: Sequence[tuple[Sequence[HostSpec], str]], target: str) -> None:
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

    def one(node: str, session: Session) -> Found:
        into = _Into(here / node, None) if several else None
        return _fetch(
            way, session, wanted[node], lambda path: into or _into(target, path, alone=len(sources) == 1), told
        )

    with sessions_of(way.spec, list(hosts.values()), tell=None if way.quiet else way.console.err) as sessions:
        got, errors = call_all(sessions, lambda node, session: _by_node(node, lambda: one(node, session)))
    some = {node: found for node, found in got.items() if any(names for names, _ in found.values())}
    if ours and here.is_dir():
        _keep_from_nodes(here, something=bool(some))
    _say(way, {node: _told(found, here / "NODE" if several else here) for node, found in some.items()})
    raise_first(errors)
    _refuse_missing(got)


def _fetch(
    way: Way, session: Session, paths: Sequence[str], into: Callable[[str], _Into], told: Callable[[int], None]
) -> Found:
    """Fetch each of these paths of a node; return the files of each, and their bytes."""
    found: Found = {}
    for path in paths:
        asked, to = asked_of(path), into(path)
        left = way.most - sum(total for _, total in found.values())
        how = FetchOptions(max_bytes=left, follow_links=True, new_name=to.named, on_bytes=told)
        found[path] = pull(session, folder_of(way.base(session.node), asked.folder), asked.pattern, to.folder, how)
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
    if here.is_dir() or target.endswith("/") or not asked_of(path).one or not alone:
        return _Into(here, None)
    return _Into(here.parent, here.name)


def _told(found: Found, here: Path) -> str:
    number = len({name for names, _ in found.values() for name in names})
    return f"{plural(number, 'file')}, {format_size(sum(total for _, total in found.values()))} {{to}} {here}"


def _say(way: Way, texts: Mapping[str, str]) -> None:
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


def _refuse_missing(got: Mapping[str, Found]) -> None:
    missing: dict[str, list[str]] = {}
    for node, found in got.items():
        for path, (names, _) in found.items():
            if not names:
                missing.setdefault(path, []).append(node)
    if missing:
        said = "; ".join(f"{fold_hosts(nodes)}: no file is at `{path}`" for path, nodes in missing.items())
        raise NotFoundError(said, hint="a relative path begins in the code folder, an absolute one with `/`")
