"""Which files of a folder go to the nodes, and by which rule the others are excluded."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from clusterctl.errors import RefusedError

T = TypeVar("T")

NEVER_SENT = frozenset({".git", ".hg", ".svn", ".ssh"})
# `nohup.out` is what `nohup clusterctl up` writes, which grows while it is sent.
_NO_CODE = frozenset({"__pycache__", "nohup.out"})
_GIT_SECONDS = 60.0


class SelectedFile(NamedTuple):
    """A file that is sent, a link, or a folder in which nothing is sent.

    Attributes:
        path: Relative to the folder.
        status: Of the file, or of the link itself.
        target: Where a link leads, as it is written on the nodes; `None` for a file.
    """

    path: str
    status: os.stat_result
    target: str | None = None

    @property
    def is_folder(self) -> bool:
        """Return whether this is a folder in which nothing is sent."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def size_bytes(self) -> int:
        """The size of the content, 0 for a folder."""
        return 0 if self.is_folder else self.status.st_size


@dataclass(frozen=True, slots=True)
class ExcludedPath:
    """Something that nodes do not get.

    Attributes:
        path: Relative to the folder; that of a folder ends with a slash.
        rule: What leaves it out.
        target: Where a link leads.
        remedy: What a person can do who did not mean to leave it out; empty where a rule of theirs says it.
        written_in: `sync.exclude`, or the `.gitignore` that has the rule; empty for a rule that nobody wrote.
        size_bytes: Of a file that such a rule leaves out; 0 for a folder.
    """

    path: str
    rule: str
    target: str = ""
    remedy: str = ""
    written_in: str = ""
    size_bytes: int = 0

    @property
    def shown(self) -> str:
        """The path, and where it leads."""
        return f"{self.path} -> {self.target}" if self.target else self.path

    @property
    def way_to_send(self) -> str:
        """What a person writes who wants it sent in spite of a `.gitignore`; empty where none leaves it out."""
        return f"`sync: {{exclude: ['!{self.path}']}}`" if self.written_in.endswith(_IGNORE) else ""


class Rule(NamedTuple):
    """What leaves something out: in words, and where it is written (see `LeftOut`)."""

    words: str
    written_in: str = ""


_IGNORE = ".gitignore"
_OUTSIDE = "a link out of the folder"
_WITHOUT_TARGET = "a link to what is not sent"
EMPTY_SUBMODULE = "an empty submodule"
_VENV = "a virtual environment"


def select_files(
    source: Path, exclude: tuple[str, ...], left_out: Callable[[ExcludedPath], None]
) -> Iterator[SelectedFile]:
    """Yield what is sent of a folder, in order.

    `exclude` has the last word. Apart from that all is sent that git tracks, and what no `.gitignore` names. Links
    inside the folder stay links; `.git`, `.ssh` and links to elsewhere are never sent. Of a folder that is empty, or in
    which a `.gitignore` leaves out all, the folder itself is sent.

    Args:
        source: The folder.
        exclude: Patterns as in .gitignore.
        left_out: Takes what is not sent.

    Raises:
        RefusedError: A folder, or a `.gitignore`, cannot be read.
    """
    select_files = _FolderWalk(source, exclude, left_out)
    yield from select_files.folder("", [], None)
    select_files.look_at_links()


class _GitIndex:
    """What git tracks, relative to the folder that is sent."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self.submodules: set[str] = set()
        self.failures: dict[str, str] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add(self, folder: Path, relative: str) -> None:
        """Ask git what it tracks in a folder."""
        argv = ["git", "-C", str(folder), "-c", "core.fsmonitor=false", "ls-files", "-z", "--stage"]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        try:
            done = subprocess.run(argv, env=environ, capture_output=True, timeout=_GIT_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.failures[relative] = getattr(error, "strerror", None) or str(error)
            return
        if done.returncode:
            self.failures[relative] = next(iter(done.stderr.decode(errors="replace").splitlines()), "git failed")
        for entry in filter(None, done.stdout.split(b"\0")):
            head, _, name = entry.partition(b"\t")
            path = _below(relative, os.fsdecode(name))
            self._paths.add(path)
            if head.startswith(b"160000"):
                self.submodules.add(path)
            while (path := path.rpartition("/")[0]) and path not in self._paths:
                self._paths.add(path)


_Rules = list[tuple[str, Any]]


class _FolderWalk:
    def __init__(self, source: Path, exclude: tuple[str, ...], left_out: Callable[[ExcludedPath], None]) -> None:
        self._source, self._top, self._tell = source, os.path.realpath(source), left_out
        self._left_out_otherwise = 0
        self._exclude: _Rules = [("", _parse_rules(exclude))]
        self._tracked = _GitIndex()
        self._is_git_doubted = False
        self._sent: set[str] = {"."}
        self._links: list[tuple[str, str, str]] = []
        if any(
            os.path.lexists(os.path.join(above, ".git")) for above in (self._top, *map(str, Path(self._top).parents))
        ):
            self._tracked.add(source, "")

    def folder(self, folder: str, rules: _Rules, ignored: Rule | None) -> Iterator[SelectedFile]:
        """Yield what is sent of one folder.

        Args:
            folder: Relative to the source.
            rules: Of the `.gitignore` files above, with the folder of each.
            ignored: The rule that leaves the folder out, but for what git tracks in it.
        """
        base = self._source / folder
        entries = read_if_present(lambda: sorted(os.scandir(base), key=lambda e: e.name), base) or []
        if folder and any(entry.name == ".git" for entry in entries):
            self._tracked.add(base, folder)
        ignore = base / _IGNORE
        text = read_if_present(lambda: ignore.read_text(errors="replace"), ignore)
        if text is not None:
            rules = [*rules, (folder, _parse_rules(text.splitlines()))]
        for entry in entries:
            path = _below(folder, entry.name)
            if entry.name in NEVER_SENT:
                self._leave_out(ExcludedPath(path, f"`{entry.name}` is never sent"))
            elif entry.is_dir(follow_symlinks=False):
                yield from self._inner(path, entry, rules, ignored)
            else:
                yield from self._file(path, entry, rules, ignored)

    def _inner(self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: Rule | None) -> Iterator[SelectedFile]:
        rule = self._rule(path, entry, rules, ignored)
        is_submodule = path in self._tracked.submodules
        if rule is not None and (path not in self._tracked or _find_last_match(f"{path}/", self._exclude) is not None):
            self._leave(f"{path}/", rule)
        elif is_submodule and not any(name != ".git" for name in os.listdir(entry.path)):
            self._leave_out(ExcludedPath(f"{path}/", EMPTY_SUBMODULE, remedy="`git submodule update --init` fills it"))
        else:
            yield from self._folder_or_itself(path, entry, rules, None if is_submodule else rule)

    def _folder_or_itself(
        self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: Rule | None
    ) -> Iterator[SelectedFile]:
        """Yield what is sent of a folder: itself if that is nothing, and only a `.gitignore` leaves things out.

        A folder whose own `.gitignore` leaves out all, as fetched results have one, is not meant for others.
        """
        is_empty, before = True, self._left_out_otherwise
        for found in self.folder(path, rules, ignored):
            is_empty = False
            yield found
        if is_empty and os.path.exists(os.path.join(entry.path, _IGNORE)):
            self._left_out_otherwise += 1
        if is_empty and ignored is None and self._left_out_otherwise == before:
            status = read_if_present(lambda: entry.stat(follow_symlinks=False), Path(entry.path))
            if status is not None:
                self._note(path)
                yield SelectedFile(path, status)

    def _leave_out(self, one: ExcludedPath) -> None:
        self._left_out_otherwise += not one.written_in.endswith(_IGNORE)
        self._tell(one)

    def _file(self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: Rule | None) -> Iterator[SelectedFile]:
        rule = self._rule(path, entry, rules, ignored)
        if rule is not None:
            status = (
                read_if_present(lambda: entry.stat(follow_symlinks=False), Path(entry.path))
                if rule.written_in
                else None
            )
            self._leave(path, rule, 0 if status is None else status.st_size)
        elif entry.is_symlink():
            yield from self._link(path, entry)
        else:
            status = read_if_present(lambda: entry.stat(follow_symlinks=False), Path(entry.path))
            if status is not None and stat.S_ISREG(status.st_mode):
                self._note(path)
                yield SelectedFile(path, status)
            elif status is not None:
                self._leave_out(ExcludedPath(path, "no file"))

    def _link(self, path: str, entry: os.DirEntry[str]) -> Iterator[SelectedFile]:
        real = os.path.realpath(entry.path)
        written = read_if_present(lambda: os.readlink(entry.path), Path(entry.path))
        status = read_if_present(lambda: entry.stat(follow_symlinks=False), Path(entry.path))
        if written is None or status is None:
            return
        if real != self._top and not real.startswith(self._top.rstrip("/") + "/"):
            remedy = "put a copy there, name its place on the nodes, or leave it out by `sync.exclude`"
            self._leave_out(ExcludedPath(path, _OUTSIDE, written, remedy))
        elif not os.path.exists(entry.path):
            self._leave_out(ExcludedPath(path, "a link that leads nowhere", written))
        elif os.path.exists(f"{real}/pyvenv.cfg"):
            self._leave_out(ExcludedPath(path, _VENV, written))
        else:
            self._note(path)
            self._links.append((path, written, os.path.relpath(real, self._top)))
            yield SelectedFile(path, status, self._as_written(path, written, real))

    def _leave(self, path: str, rule: Rule, size_bytes: int = 0) -> None:
        """Tell what a rule leaves out; once also that git was to say whether it does, and could not."""
        words, remedy = rule.words, ""
        if self._tracked.failures and not self._is_git_doubted and rule.written_in.endswith(_IGNORE):
            self._is_git_doubted = True
            words += f", and git cannot say whether it tracks this ({next(iter(self._tracked.failures.values()))})"
            remedy = "files that git tracks are sent only if it can say so"
        self._leave_out(ExcludedPath(path, words, remedy=remedy, written_in=rule.written_in, size_bytes=size_bytes))

    def _note(self, path: str) -> None:
        """Note that a path is sent, and the folders that it lies in."""
        while path and path not in self._sent:
            self._sent.add(path)
            path = path.rpartition("/")[0]

    def look_at_links(self) -> None:
        """Tell of links that are sent without what they lead to."""
        for path, written, target in self._links:
            if target not in self._sent:
                self._leave_out(
                    ExcludedPath(path, _WITHOUT_TARGET, written, "`sync.exclude` with `!` before it sends that")
                )

    def _as_written(self, path: str, written: str, real: str) -> str:
        """Return where a link leads as nodes can follow it, whose folder lies elsewhere."""
        parent = os.path.dirname(path)
        if not os.path.isabs(written) and not f"{os.path.normpath(os.path.join(parent, written))}/".startswith("../"):
            return written
        return os.path.relpath(real, os.path.join(self._top, parent))

    def _rule(self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: Rule | None) -> Rule | None:
        """Return what leaves an entry out; what git tracks is sent in spite of every rule but those of `exclude`."""
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{path}/" if is_folder else path
        found = _find_last_match(name, self._exclude)
        if found is not None:
            return Rule(f"`{found[1].pattern}` of `sync.exclude`", "sync.exclude") if found[1].include else None
        if not is_folder and path in self._tracked:
            return None
        if ignored is not None:
            return ignored
        if entry.name in _NO_CODE:
            return Rule(f"`{entry.name}` is no code")
        if is_folder and os.path.exists(f"{entry.path}/pyvenv.cfg"):
            return Rule(_VENV)
        found = _find_last_match(name, rules)
        if found is None or not found[1].include:
            return None
        file = _below(found[0], _IGNORE)
        return Rule(f"`{found[1].pattern}` of {file}", file)


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _parse_rules(lines: Iterable[str]) -> Any:
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)


def _find_last_match(path: str, rules: _Rules) -> tuple[str, Any] | None:
    """Return the last pattern that means an entry, with the folder of its file; paths of folders end with a slash."""
    for folder, spec in reversed(rules):
        inner = path[len(folder) + 1 :] if folder else path
        for pattern in reversed(spec.patterns):
            if _matches(pattern, inner):
                return folder, pattern
    return None


def _matches(pattern: Any, path: str) -> bool:
    """Return whether a pattern matches a path itself, not a folder above it, which was judged when we came there.

    `GitIgnoreSpec.check_file` makes no such difference: after `*`, `!*/` lets no folder in.
    """
    decided = pattern.match_file(path) if pattern.include is not None else None
    if decided is None:
        return False
    # The group in which pathspec (0.12 and later) keeps the slash of a folder that was matched.
    above = decided.match.groupdict().get("ps_d") is not None and decided.match.end("ps_d") < len(path)
    # For `a/**/` that folder is `a`, though every folder below it is meant.
    return not above or (path.endswith("/") and str(pattern.pattern).endswith("**/"))


def read_if_present(read: Callable[[], T], path: Path) -> T | None:
    """Return what `read` gives, or `None` where that is not there, or no longer: the folder goes on changing.

    Raises:
        RefusedError: It is there, and cannot be read.
    """
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        hint = "make it readable, or leave it out by `sync.exclude`"
        raise RefusedError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
