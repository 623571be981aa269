"""Why a node lacks a module or a file that a rank did not find: whether the head has it, and which rule excludes it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl.config.spec import SyncSpec
from clusterctl.errors import ClusterctlError
from clusterctl.run.nodes.code_selection import EMPTY_SUBMODULE, ExcludedPath, select_files

_MAX_NAMES_OF_A_FOLDER = 10_000
_MODULE = re.compile(r"No module named '?([A-Za-z_][\w.]*)")
_FILE = re.compile(r"(?:No such file or directory:|can't open file) '([^']+)'")


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFolder:
    """The code folder of the head, and the part of it that a run got.

    Attributes:
        source: The folder.
        sent: The files that were sent; without sync, the files of the folder.
        left_out: The excluded paths.
        pythonpath: `PYTHONPATH` of the cluster file.
    """

    source: str
    sent: Collection[str]
    left_out: Sequence[ExcludedPath]
    pythonpath: str = ""

    def has(self, path: str) -> bool:
        """Return whether the folder has a path now."""
        return os.path.lexists(os.path.join(self.source, path))

    def list_names(self, path: str) -> list[str]:
        """Return names in a folder below it, at most 10,000."""
        try:
            with os.scandir(os.path.join(self.source, path)) as entries:
                return [entry.name for entry in itertools.islice(entries, _MAX_NAMES_OF_A_FOLDER)]
        except OSError:
            return []


def find_on_pythonpath(message: str, pythonpath: str) -> str | None:
    """Return a sentence if a missing module is on the `PYTHONPATH` of this shell, which remote nodes do not get."""
    module = _MODULE.search(message)
    top = module[1].strip(".").partition(".")[0] if module else None
    for entry in filter(None, pythonpath.split(":") if top else ()):
        name = next(
            (name for name in (f"{entry}/{top}/__init__.py", f"{entry}/{top}.py") if os.path.isfile(name)), None
        )
        if name is not None:
            way = "install the package on the nodes, or copy it into the code folder"
            return f"`{name}` is on the PYTHONPATH of this shell, which does not go to remote nodes: {way}"
    return None


def scan_code_folder(sync: SyncSpec, sent: Collection[str] | None, pythonpath: str = "") -> CodeFolder | None:
    """Return the code folder as it is now; `None` if it cannot be read.

    Args:
        sync: The sync settings of the cluster file.
        sent: The files that the run got; `None` if nothing was copied.
        pythonpath: `PYTHONPATH` of the cluster file.
    """
    left_out: list[ExcludedPath] = []
    try:
        present = [found.path for found in select_files(Path(sync.source), sync.exclude, left_out.append)]
    except (ClusterctlError, OSError):
        return None
    if sent is None:
        return CodeFolder(source=sync.source, sent=present, left_out=(), pythonpath=pythonpath)
    return CodeFolder(source=sync.source, sent=sent, left_out=left_out, pythonpath=pythonpath)


def explain_missing_file(message: str, folder: CodeFolder, workdirs: Iterable[str]) -> str | None:
    """Return where the code folder has a module or file that a rank did not find, and why its node lacks it.

    Args:
        message: The error message of the rank.
        folder: The code folder.
        workdirs: The workdirs of the nodes; `~` is the home there.
    """
    module, file = _MODULE.search(message), _FILE.search(message)
    if module is not None:
        return _explain_module(module[1].strip("."), folder)
    if file is None:
        return None
    path = os.path.normpath(file[1])
    for workdir in workdirs:
        _, found, below = path.partition(workdir.removeprefix("~").rstrip("/") + "/")
        path = below if found else path
    return None if path.startswith(("/", "..")) else _explain_file(path, folder)


def _explain_module(name: str, folder: CodeFolder) -> str | None:
    path = name.replace(".", "/")
    forms = (f"{path}.py", f"{path}/__init__.py", path)
    top = name.partition(".")[0]
    found = _explain_exclusion(forms, folder) or _explain_excluded_package(top, folder)
    if found is not None:
        return found
    for one in folder.left_out:
        if one.rule == EMPTY_SUBMODULE and top in re.split(r"[/-]|\.git$", one.path):
            return f"`{one.path}` is {EMPTY_SUBMODULE}: {one.remedy}"
    place = next((found for found in folder.sent for end in forms[:2] if f"/{found}".endswith(f"/{end}")), None)
    if place is not None:
        above = place[: -len(next(end for end in forms[:2] if place.endswith(end)))].rstrip("/") or "."
        text = f"`{place}` is in the code folder, where Python does not look"
        if above in (entry.rstrip("/") or "." for entry in folder.pythonpath.split(":") if folder.pythonpath):
            way = f"`export PYTHONPATH=$PWD/{above}` at its beginning does"
            return (
                f"{text}: `PYTHONPATH: {above}` means the folder that Python starts in, and holds behind no `cd` of "
                f"the job; {way}"
            )
        return f"{text}: `env: {{PYTHONPATH: {above}}}` has it look there, or install the package on the nodes"
    return _explain_new_file(forms, folder)


def _explain_file(path: str, folder: CodeFolder) -> str | None:
    found = _explain_exclusion((path,), folder)
    if found is not None or path in folder.sent:
        return found
    elsewhere = next((sent for sent in folder.sent if sent.endswith(f"/{path}")), None)
    if elsewhere is not None:
        return f"`{elsewhere}` is in the code folder: ranks begin there, and so does a relative path"
    return _explain_new_file((path,), folder)


def _explain_exclusion(paths: Sequence[str], folder: CodeFolder) -> str | None:
    """Name the rule that excludes a path, or one that ends with it."""
    for path in paths:
        for one in folder.left_out:
            place = one.path.rstrip("/")
            names = (
                place if f"/{place}".endswith(f"/{path}") else None,
                path if path.startswith(f"{place}/") else None,
                f"{place}/{path}",
            )
            name = next((name for name in names if name is not None and folder.has(name)), None)
            if name is not None and one.rule != EMPTY_SUBMODULE:
                return _describe_rule(name, one)
    return None


def _explain_excluded_package(module: str, folder: CodeFolder) -> str | None:
    """Name the rule that excludes a wheel or archive of a package with the name of a module."""
    package = re.compile(rf"{re.escape(module).replace('_', '[-_.]')}(?:-\d.*)?\.(?:whl|egg|zip|tar\.gz)", re.I)
    for one in folder.left_out:
        names = [one.path]
        if one.path.endswith("/"):
            inner = sorted(folder.list_names(one.path), key=lambda name: not name.endswith(".whl"))
            names = [f"{one.path}{name}" for name in inner]
        name = next((name for name in names if package.fullmatch(name.rpartition("/")[2])), None)
        if name is not None:
            return _describe_rule(name, one)
    return None


def _describe_rule(name: str, one: ExcludedPath) -> str:
    way = f": {one.way_to_send} sends it" if one.way_to_send else ""
    return f"`{name}` is in the code folder, and left out by {one.rule}{way}"


def _explain_new_file(paths: Sequence[str], folder: CodeFolder) -> str | None:
    """Name the first of these paths that was added after the run began."""
    name = next((path for path in paths if path not in folder.sent and folder.has(path)), None)
    if name is None or any(sent.startswith(f"{name}/") for sent in folder.sent):
        return None
    return f"`{name}` is in the code folder now, and was not when the run began"
