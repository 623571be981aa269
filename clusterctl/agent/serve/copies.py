"""Files that are copied to wherever a person says: nothing else there is touched, and no sync is made to forget."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol import request_errors
from clusterctl.agent.record import folders, rundir, workspace
from clusterctl.agent.serve.summary import summary

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from clusterctl.agent.protocol import command_types


def lacking(asked: command_types.CopyArguments, entries: list[list[Any]], root: str) -> command_types.CopyAnswer:
    """Return which files are not there already as they are to be; give modes to those that are.

    They go into a folder, or under another name where there is no such folder. Folders on the way are made.

    Raises:
        RequestError: A folder would be where a file is, code of a live run would change, or there is no space.
    """
    for path, *_ in entries:
        folders.check_path(path)
    folder, name = _place(asked)
    files = named(entries, name)
    if name is not None and os.path.exists(f"{folder}/{name}") and any("/" in path for path, *_ in files):
        raise request_errors.make_refused_error(
            f"{folder}/{name} is a file, and a folder is to be copied there", "choose another name"
        )
    need = _differing(folders.Tree(folder), files)
    _refuse_under_live_runs(root, {os.path.join(os.path.realpath(folder), files[number][0]) for number in need})
    folders.refuse_without_space(folder, [(files[number][0], files[number][1]) for number in need])
    return {"need": need, "folder": folder, "name": name}


def named(entries: list[list[Any]], name: str | None) -> list[list[Any]]:
    """Return entries with another name for the first part of their paths, where there is one."""
    if name is None:
        return entries
    return [["/".join([name, *path.split("/")[1:]]), *rest] for path, *rest in entries]


def _place(asked: command_types.CopyArguments) -> tuple[str, str | None]:
    """Return the folder that files go to, which is there then, and another name for them."""
    base, target = os.path.expanduser(str(asked["folder"])), os.path.expanduser(str(asked["target"]))
    place = os.path.abspath(os.path.join(base, target))
    if not os.path.isabs(target):
        folders.make_workdir(base)
    folder, name = (place, None) if asked["inside"] or os.path.isdir(place) else os.path.split(place)
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise request_errors.make_refused_error(
            f"cannot make the folder {folder}: {error.strerror or error}"
        ) from error
    return folder, name


def _differing(tree: folders.Tree, files: list[list[Any]]) -> list[int]:
    need = []
    for number, (path, size, mode, digest) in enumerate(files):
        entry = tree.entry(path, {}, {}, of_size=size)
        if entry is None or not folders.has_same_content(entry, (size, mode & 0o777, digest)):
            need.append(number)
        elif entry[1] != mode & 0o777:
            tree.chmod(path, mode)
    return need


def _refuse_under_live_runs(root: str, wanted: set[str]) -> None:
    for run in rundir.runs(root) if wanted else ():
        other_run = summary(run)
        if not other_run["live"] or not other_run["workdir"]:
            continue
        folder = os.path.realpath(other_run["workdir"])
        for path in workspace.Workspace(folder, root).brought():
            if os.path.join(folder, path) in wanted:
                hint = f"`clusterctl down {run.run}`, wait for it, or copy to another place"
                raise request_errors.make_refused_error(
                    f"{folder}/{path} is code that run {run.run} was started with", hint
                )


class Watch:
    """Sees whether a sync begins in a folder that a copy goes to, and refuses to change the code that it brings.

    Args:
        folder: Where the files go.
        paths: Relative to it.
        root: The state root.
    """

    def __init__(self, folder: str, paths: Iterable[str], root: str) -> None:
        self._folder, self._root = os.path.realpath(folder), root
        self._by_folder: dict[str, list[workspace.Workspace]] = {}
        self._stamps = {place.folder: place.stamp() for path in paths for place in self._places(path)}

    def check(self, path: str) -> None:
        """Refuse to put a file in place which a sync has brought since this began.

        Raises:
            RequestError: So it is.
        """
        for place in self._places(path):
            whole = os.path.join(self._folder, path)
            if place.stamp() != self._stamps[place.folder] and os.path.relpath(whole, place.folder) in place.brought():
                text = f"{whole} is code that a sync has brought while this copy went on"
                raise request_errors.make_refused_error(text, "copy it again once no run needs it, or to another place")

    def _places(self, path: str) -> list[workspace.Workspace]:
        """Return every folder in which a path lies, as that of a sync."""
        folder = os.path.dirname(os.path.join(self._folder, path))
        if folder not in self._by_folder:
            parts = folder.split("/")
            above = ["/".join(parts[: end + 1]) for end in range(1, len(parts))]
            self._by_folder[folder] = [workspace.Workspace(place, self._root) for place in above]
        return self._by_folder[folder]
