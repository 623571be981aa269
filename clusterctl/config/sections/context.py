"""Context of a build: everything that the builder of a spec needs besides the tree."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from clusterctl.config.spec import (
    HealthSpec,
)
from clusterctl.config.text.interpolation import Interpolation
from clusterctl.config.text.tree import Report


class FileAccess(Protocol):
    """What parsing may ask about other files: `env_file`, secrets, the script and the synced folder."""

    def read(self, path: str) -> bytes:
        """Read a file, at most 1 MiB and one byte of it.

        Raises:
            OSError: It cannot be read.
        """

    def read_own(self, path: str) -> bytes:
        """Read a file that decides over what is run (see `read`).

        Raises:
            ForeignFileError: Somebody else owns it, or can write it.
            OSError: It cannot be read.
        """

    def is_file(self, path: str) -> bool:
        """Whether there is a file."""

    def is_dir(self, path: str) -> bool:
        """Whether there is a folder."""

    def real(self, path: str) -> str:
        """The one name of a folder that links lead to."""

    def find_upload_obstacle(self, path: str) -> str | None:
        """Why a folder must not go to nodes, as a home must not, in words that follow its name."""

    def names(self, path: str) -> Sequence[str]:
        """Names in a folder, for suggestions; empty where it cannot be listed."""


HealthNameCheck = Callable[[HealthSpec], "Sequence[tuple[str, str, str | None]]"]
"""Tells names of a `health:` section that mean nothing: (key, name, the name that was probably meant). The checks are
known further up, so whoever loads a cluster file brings it along."""


HostCommandRunner = Callable[[tuple[str, ...]], str]
"""Runs a command of a cluster file that lists hosts, and returns what it says; or refuses to (`RefusedError`). Whoever
loads the file brings along what its user has agreed to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What building needs besides the tree; see `clusterctl.config.loader.load`."""

    path: str
    environ: Mapping[str, str]
    filling: Interpolation
    files: FileAccess
    report: Report
    require_job: bool
    with_secrets: bool
    health_mistakes: HealthNameCheck | None = None
    run_listing: HostCommandRunner | None = None

    @property
    def folder(self) -> str:
        """Where relative paths begin."""
        return os.path.dirname(self.path)

    def resolve(self, path: str) -> str:
        """Make a path of the cluster file absolute."""
        if path == "~" or path.startswith("~/"):
            path = self.environ.get("HOME", "~") + path[1:]
        return os.path.normpath(os.path.join(self.folder, path))

    def resolve_for_ssh(self, path: str) -> str:
        """Make a relative path of the cluster file absolute; leave what ssh itself expands (`~`, `%d`, `none`)."""
        return path if path[:1] in ("/", "~", "%") or path.lower() == "none" else self.resolve(path)
