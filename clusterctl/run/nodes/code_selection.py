"""Selects the files of a folder that are sent to the nodes, and names the rule that excludes each other file."""

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
# `nohup clusterctl up` writes to `nohup.out`, which would grow while it is sent.
_NO_CODE = frozenset({"__pycache__", "nohup.out"})
_GIT_SECONDS = 60.0


class SelectedFile(NamedTuple):
    """A file or link to send, or a folder without files to send.

    Attributes:
        path: Relative to the source folder.
        status: Status of the file, or of the link itself.
        target: Target of the link on the nodes; `None` for a file.
    """

    path: str
    status: os.stat_result
    target: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether this object is a folder."""
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def size_bytes(self) -> int:
        """The size of the content, 0 for a folder."""
        return 0 if self.is_folder else self.status.st_size


@dataclass(frozen=True, slots=True)
class ExcludedPath:
    """A path that the nodes do not get.

    Attributes:
        path: Relative to the source folder; the path of a folder ends with a slash.
        rule: The rule that excludes the path, in words.
        target: Target of an excluded link; "" for other paths.
        remedy: Advice for a user who wants to send the path; empty for a rule of the user.
        rule_source: Source of a rule of the user: `sync.exclude`, or the path of a `.gitignore`; else empty.
        size_bytes: Size of a file that a rule of the user excludes; 0 for a folder.
    """

    path: str
    rule: str
    target: str = ""
    remedy: str = ""
    rule_source: str = ""
    size_bytes: int = 0

    @property
    def label(self) -> str:
        """The path, with the target of a link."""
        return f"{self.path} -> {self.target}" if self.target else self.path

    @property
    def include_setting(self) -> str:
        """The setting that sends the path in spite of a `.gitignore`; empty if no `.gitignore` excludes it."""
        return f"`sync: {{exclude: ['!{self.path}']}}`" if self.rule_source.endswith(_IGNORE) else ""


class ExclusionRule(NamedTuple):
    """A rule that excludes paths: the rule in words, and the source of the rule (see `ExcludedPath.rule_source`)."""

    description: str
    rule_source: str = ""


_IGNORE = ".gitignore"
_OUTSIDE = "a link out of the folder"
_WITHOUT_TARGET = "a link whose target is not sent"
EMPTY_SUBMODULE = "an empty submodule"
_VENV = "a virtual environment"


def select_files(
    source: Path, exclude: tuple[str, ...], on_excluded: Callable[[ExcludedPath], None]
) -> Iterator[SelectedFile]:
    """Yield the files of a folder to send, in order.

    `exclude` decides first. Otherwise all files are sent that git tracks or that no `.gitignore` excludes. Links inside
    the folder stay links; `.git`, `.ssh` and links out of the folder are never sent. A folder without files to send is
    sent as an empty folder.

    Args:
        source: The folder.
        exclude: Patterns as in .gitignore.
        on_excluded: Takes each excluded path.

    Raises:
        RefusedError: A folder, or a `.gitignore`, cannot be read.
    """
    walk = _FolderWalk(source, exclude, on_excluded)
    yield from walk.folder("", [], None)
    for path, written, target in walk.links:
        if target not in walk.sent:
            on_excluded(ExcludedPath(path, _WITHOUT_TARGET, written, "`!TARGET` in `sync.exclude` sends the target"))


class _GitIndex:
    """The paths that git tracks, relative to the source folder."""

    def __init__(self) -> None:
        self._paths: set[str] = set()
        self.submodules: set[str] = set()
        self.failures: dict[str, str] = {}

    def __contains__(self, path: str) -> bool:
        return path in self._paths

    def add(self, folder: Path, relative: str) -> None:
        """Add the paths that git tracks in a folder."""
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
    def __init__(self, source: Path, exclude: tuple[str, ...], on_excluded: Callable[[ExcludedPath], None]) -> None:
        self._source, self._top, self._tell = source, os.path.realpath(source), on_excluded
        self._other_exclusions = 0
        self._exclude: _Rules = [("", _parse_rules(exclude))]
        self._tracked = _GitIndex()
        self._is_git_doubted = False
        self.sent: set[str] = {"."}
        self.links: list[tuple[str, str, str]] = []
        if any(
            os.path.lexists(os.path.join(above, ".git")) for above in (self._top, *map(str, Path(self._top).parents))
        ):
            self._tracked.add(source, "")

    def folder(self, folder: str, rules: _Rules, ignored: ExclusionRule | None) -> Iterator[SelectedFile]:
        """Yield the files of one folder to send.

        Args:
            folder: Relative to the source folder.
            rules: The rules of the `.gitignore` files in parent folders, each file with its folder.
            ignored: The rule that excludes the folder. Files that git tracks in the folder are still sent.
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
                self._report(ExcludedPath(path, f"`{entry.name}` is never sent"))
            elif entry.is_dir(follow_symlinks=False):
                yield from self._inner(path, entry, rules, ignored)
            else:
                yield from self._file(path, entry, rules, ignored)

    def _inner(
        self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: ExclusionRule | None
    ) -> Iterator[SelectedFile]:
        rule = self._rule(path, entry, rules, ignored)
        is_submodule = path in self._tracked.submodules
        if rule is not None and (path not in self._tracked or _find_last_match(f"{path}/", self._exclude) is not None):
            self._leave(f"{path}/", rule)
        elif is_submodule and not any(name != ".git" for name in os.listdir(entry.path)):
            self._report(ExcludedPath(f"{path}/", EMPTY_SUBMODULE, remedy="`git submodule update --init` fills it"))
        else:
            yield from self._folder_or_itself(path, entry, rules, None if is_submodule else rule)

    def _folder_or_itself(
        self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: ExclusionRule | None
    ) -> Iterator[SelectedFile]:
        """Yield the files of a folder to send, or the folder itself if there are no such files.

        If a rule excludes a file in the folder, the folder itself is not sent. A `.gitignore` above the folder is no
        such rule.
        """
        is_empty, before = True, self._other_exclusions
        for found in self.folder(path, rules, ignored):
            is_empty = False
            yield found
        if is_empty and os.path.exists(os.path.join(entry.path, _IGNORE)):
            self._other_exclusions += 1
        if is_empty and ignored is None and self._other_exclusions == before:
            status = _read_status(entry)
            if status is not None:
                self._note(path)
                yield SelectedFile(path, status)

    def _report(self, one: ExcludedPath) -> None:
        self._other_exclusions += not one.rule_source.endswith(_IGNORE)
        self._tell(one)

    def _file(
        self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: ExclusionRule | None
    ) -> Iterator[SelectedFile]:
        rule = self._rule(path, entry, rules, ignored)
        if rule is not None:
            status = _read_status(entry) if rule.rule_source else None
            self._leave(path, rule, 0 if status is None else status.st_size)
        elif entry.is_symlink():
            yield from self._link(path, entry)
        else:
            status = _read_status(entry)
            if status is not None and stat.S_ISREG(status.st_mode):
                self._note(path)
                yield SelectedFile(path, status)
            elif status is not None:
                self._report(ExcludedPath(path, "no file"))

    def _link(self, path: str, entry: os.DirEntry[str]) -> Iterator[SelectedFile]:
        real = os.path.realpath(entry.path)
        written = read_if_present(lambda: os.readlink(entry.path), Path(entry.path))
        status = _read_status(entry)
        if written is None or status is None:
            return
        if real != self._top and not real.startswith(self._top.rstrip("/") + "/"):
            remedy = "put a copy there, name its place on the nodes, or leave it out by `sync.exclude`"
            self._report(ExcludedPath(path, _OUTSIDE, written, remedy))
        elif not os.path.exists(entry.path):
            self._report(ExcludedPath(path, "a link that leads nowhere", written))
        elif os.path.exists(f"{real}/pyvenv.cfg"):
            self._report(ExcludedPath(path, _VENV, written))
        else:
            self._note(path)
            self.links.append((path, written, os.path.relpath(real, self._top)))
            yield SelectedFile(path, status, self._as_written(path, written, real))

    def _leave(self, path: str, rule: ExclusionRule, size_bytes: int = 0) -> None:
        """Report a path that a rule excludes. If git failed, the first report for a `.gitignore` says so."""
        words, remedy = rule.description, ""
        if self._tracked.failures and not self._is_git_doubted and rule.rule_source.endswith(_IGNORE):
            self._is_git_doubted = True
            words += f", and git cannot say whether it tracks this ({next(iter(self._tracked.failures.values()))})"
            remedy = "files that git tracks are sent only if git works"
        self._report(ExcludedPath(path, words, remedy=remedy, rule_source=rule.rule_source, size_bytes=size_bytes))

    def _note(self, path: str) -> None:
        """Record that a path and its parent folders are sent."""
        while path and path not in self.sent:
            self.sent.add(path)
            path = path.rpartition("/")[0]

    def _as_written(self, path: str, written: str, real: str) -> str:
        """Return the target of a link in a form that is valid on the nodes."""
        parent = os.path.dirname(path)
        if not os.path.isabs(written) and not f"{os.path.normpath(os.path.join(parent, written))}/".startswith("../"):
            return written
        return os.path.relpath(real, os.path.join(self._top, parent))

    def _rule(
        self, path: str, entry: os.DirEntry[str], rules: _Rules, ignored: ExclusionRule | None
    ) -> ExclusionRule | None:
        """Return the rule that excludes an entry. For a file that git tracks, only `exclude` counts."""
        is_folder = entry.is_dir(follow_symlinks=False)
        name = f"{path}/" if is_folder else path
        found = _find_last_match(name, self._exclude)
        if found is not None:
            return (
                ExclusionRule(f"`{found[1].pattern}` of `sync.exclude`", "sync.exclude") if found[1].include else None
            )
        if not is_folder and path in self._tracked:
            return None
        if ignored is not None:
            return ignored
        if entry.name in _NO_CODE:
            return ExclusionRule(f"`{entry.name}` is no code")
        if is_folder and os.path.exists(f"{entry.path}/pyvenv.cfg"):
            return ExclusionRule(_VENV)
        found = _find_last_match(name, rules)
        if found is None or not found[1].include:
            return None
        file = _below(found[0], _IGNORE)
        return ExclusionRule(f"`{found[1].pattern}` of {file}", file)


def _read_status(entry: os.DirEntry[str]) -> os.stat_result | None:
    return read_if_present(lambda: entry.stat(follow_symlinks=False), Path(entry.path))


def _below(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _parse_rules(lines: Iterable[str]) -> Any:
    import pathspec

    return pathspec.GitIgnoreSpec.from_lines(lines)


def _find_last_match(path: str, rules: _Rules) -> tuple[str, Any] | None:
    """Return the last pattern that matches a path, and the folder of the pattern's `.gitignore`.

    The path of a folder ends with a slash.
    """
    for folder, spec in reversed(rules):
        inner = path[len(folder) + 1 :] if folder else path
        for pattern in reversed(spec.patterns):
            if _matches(pattern, inner):
                return folder, pattern
    return None


def _matches(pattern: Any, path: str) -> bool:
    """Return whether a pattern matches the path itself, and not only a folder above the path.

    `GitIgnoreSpec.check_file` does not distinguish these cases: after `*`, the pattern `!*/` would include no folder.
    """
    decided = pattern.match_file(path) if pattern.include is not None else None
    if decided is None:
        return False
    # In pathspec 0.12 and later, the group `ps_d` contains the slash after a matched folder.
    above = decided.match.groupdict().get("ps_d") is not None and decided.match.end("ps_d") < len(path)
    # For the pattern `a/**/` the matched folder is `a`, although the pattern means every folder below `a`.
    return not above or (path.endswith("/") and str(pattern.pattern).endswith("**/"))


def read_if_present(read: Callable[[], T], path: Path) -> T | None:
    """Return the result of `read`, or `None` if the path does not exist (any more): the folder may change meanwhile.

    Raises:
        RefusedError: The path exists and cannot be read.
    """
    try:
        return read()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        hint = "make it readable, or leave it out by `sync.exclude`"
        raise RefusedError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
