"""The context in which a spec is built: options, access to files, and the list of problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from typing_extensions import NotRequired, TypedDict

from clusterctl.config import file_trust
from clusterctl.config.spec import HealthSpec
from clusterctl.config.text.interpolation import Interpolator
from clusterctl.config.text.tree import Problems
from clusterctl.config.text.yaml_parser import MAX_BYTES


class DiskFiles:
    """Access to the files that a cluster file names: `env_file`, secrets, the script and the synced folder."""

    def read(self, path: str) -> bytes:
        """Read at most 1 MiB and one byte of a file. The extra byte shows that the file is longer than 1 MiB.

        Raises:
            OSError: The file cannot be read.
        """
        with open(path, "rb") as file:
            return file.read(MAX_BYTES + 1)

    def read_trusted(self, path: str) -> bytes:
        """Read a file that contains commands, with the size limit of `read`.

        Raises:
            UnsafePermissionsError: Another user owns the file or can write to it.
            OSError: The file cannot be read.
        """
        with open(path, "rb") as file:
            file_trust.check_only_user_can_write(path, os.fstat(file.fileno()))
            return file.read(MAX_BYTES + 1)

    def is_file(self, path: str) -> bool:
        """Return whether the file exists."""
        return os.path.isfile(path)

    def is_dir(self, path: str) -> bool:
        """Return whether the folder exists."""
        return os.path.isdir(path)

    def resolve_links(self, path: str) -> str:
        """Return the path with all links resolved."""
        return os.path.realpath(path)

    def find_upload_obstacle(self, path: str) -> str | None:
        """Return why a folder must not be sent to nodes, such as "is a home directory", or `None`."""
        return file_trust.find_upload_obstacle(path)

    def list_names(self, path: str) -> Sequence[str]:
        """Return the names in a folder for suggestions, or an empty list if the folder cannot be read."""
        try:
            return sorted(os.listdir(path))
        except OSError:
            return []


HealthNameCheck = Callable[[HealthSpec], "Sequence[tuple[str, str, str | None]]"]
"""A function that finds unknown names in a `health` section; it returns (key, name, similar known name) for each.

The caller of the loader passes this function, because `clusterctl.config` must not import the health checks."""


HostCommandRunner = Callable[[tuple[str, ...]], str]
"""A function that runs the command of `hosts: {from: {command: ...}}` and returns its output.

The function raises `RefusedError` if the user has not accepted the command.
"""


class BuildOptions(TypedDict):
    """Options of the loader for cluster files.

    Attributes:
        environ: Environment variables for `${env:NAME}`, `secrets` and `~`.
        require_job: Whether a file without a complete job is an error, as in `up`.
        with_secrets: Whether to read the values of secrets, as in `up`; without it the values are empty.
        find_health_mistakes: A function that finds unknown names in `health`; `None` accepts all names.
        run_host_command: A function that runs the command of `hosts: {from: {command: ...}}`; with `None` such a file
            is an error.
    """

    environ: Mapping[str, str]
    require_job: NotRequired[bool]
    with_secrets: NotRequired[bool]
    find_health_mistakes: NotRequired[HealthNameCheck | None]
    run_host_command: NotRequired[HostCommandRunner | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The inputs of the spec builder in addition to the tree; `BuildOptions` explains the options."""

    path: str
    environ: Mapping[str, str]
    interpolation: Interpolator
    files: DiskFiles
    report: Problems
    require_job: bool = False
    with_secrets: bool = False
    find_health_mistakes: HealthNameCheck | None = None
    run_host_command: HostCommandRunner | None = None

    @property
    def folder(self) -> str:
        """The folder of the cluster file, at which relative paths start."""
        return os.path.dirname(self.path)

    def resolve(self, path: str) -> str:
        """Return a path of the cluster file as an absolute path."""
        if path == "~" or path.startswith("~/"):
            path = self.environ.get("HOME", "~") + path[1:]
        return os.path.normpath(os.path.join(self.folder, path))

    def resolve_for_ssh(self, path: str) -> str:
        """Return a relative path as an absolute path, but leave `~`, `%d` and `none`, which ssh itself expands."""
        return path if path[:1] in ("/", "~", "%") or path.lower() == "none" else self.resolve(path)
