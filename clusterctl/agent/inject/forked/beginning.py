"""What is imported for all ranks: what the user named, else what the script begins with."""

from __future__ import annotations

import importlib
import os
import time

from . import cannot, imports, origins
from .cannot import CannotForkError
from .target import Target

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any


class Beginning:
    """What was found to be wanted, and whether it still is.

    Attributes:
        wanted: Modules, each with the names taken from it.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        """Become what begins with the script.

        Raises:
            CannotForkError: A fresh interpreter alone knows what that means.
        """
        self._began = time.time_ns()
        self._names = spec["preload"]
        self._variables = frozenset(os.environ)
        self._target = Target(spec["argv"])
        self._folder = self._target.folder()
        self._target.enter()
        self._target.enter_path()
        self.wanted: list[imports.Wanted] = []
        self._files: dict[str, tuple[int, int]] = {}
        self._origins: dict[str, origins.Origin] = {}
        self._folders: dict[str, int] = {}

    def look(self) -> list[imports.Wanted]:
        """Return what is to be imported, as things lie now.

        Raises:
            CannotForkError: There is nothing, or something that may not be.
        """
        if self._names is None and self._target.script is None:
            raise CannotForkError("what a module imports is not looked for: name it in `job.preload`")
        if self._names is None:
            self.wanted = imports.Reader(self._variables).script(self._target.script or "")
        else:
            self.wanted = list(imports.named(self._names))
        if not self.wanted:
            raise CannotForkError("the script begins with nothing that could be imported once for all ranks")
        return self.wanted

    def bring(self) -> set[str]:
        """Import it; return the names of modules that were looked for in vain.

        Raises:
            CannotForkError: One cannot be imported.
        """
        return imports.bring(self.wanted)

    def remember(self, missed: Iterable[str]) -> None:
        """Take note of what was imported, and of the modules that were looked for and `missed`.

        A file that was written meanwhile may have been read before, or have come too late.
        """
        self._origins = origins.now(missed, since=self._began)
        self._folders = origins.folders()
        now = time.time_ns()
        for file, (time_ns, size) in cannot.imported_files().items():
            self._files[file] = (-1 if self._began <= time_ns <= now else time_ns, size)

    def changed(self) -> str | None:
        """Return what is not as it was."""
        importlib.invalidate_caches()
        before = self.wanted
        try:
            if self._target.folder() != self._folder or self.look() != before:
                return self._target.script or self._folder
        except (OSError, CannotForkError):
            # Another zygote will say so.
            return self._target.script or self._folder
        now = cannot.imported_files()
        changed = next((file for file, known in self._files.items() if now.get(file) != known), None)
        return changed or origins.changed(self._origins) or self._folder_changed()

    def _folder_changed(self) -> str | None:
        """Return a folder in which something was installed or removed: its metadata, too, may have been asked for."""
        now = origins.folders()
        return next((folder for folder, known in self._folders.items() if now.get(folder) != known), None)
