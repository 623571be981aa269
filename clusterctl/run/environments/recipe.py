"""What all kinds of environments have in common, and the program uv on the head."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from platformdirs import user_cache_path

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform

RECIPE_VERSION = 1
"""Part of each key. A change of how environments are made raises it, so that they are made again."""
_LAST_LINES = 6


def get_cache_folder(name: str) -> Path:
    """Return a folder of this name for files of the head that can be made again."""
    folder = user_cache_path("clusterctl") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_uv(*words: str, purpose: str, cwd: str | None = None) -> str:
    """Run uv on the head and return its standard output.

    Raises:
        EnvironmentFailed: uv is not installed, or fails.
    """
    return _run_program([find_uv(), *words], purpose, cwd)


def run_conda_pack(*words: str, purpose: str) -> None:
    """Run conda-pack on the head.

    Raises:
        EnvironmentFailed: conda-pack is not installed, or fails.
    """
    _run_program([_find_program("conda-pack", "environment.venv"), *words], purpose)


def _run_program(argv: list[str], purpose: str, cwd: str | None = None) -> str:
    done = subprocess.run(argv, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        says = f"{os.path.basename(argv[0])} says: {' '.join(lines[-_LAST_LINES:]) or 'nothing'}"
        raise EnvironmentFailed(f"{purpose}: {says}")
    return done.stdout


def find_uv() -> str:
    """Return the path of uv: beside the running Python, or on PATH.

    Raises:
        EnvironmentFailed: The head has no uv.
    """
    return _find_program("uv", "environment.uv")


def _find_program(name: str, key: str) -> str:
    beside = os.path.join(os.path.dirname(sys.executable), name)
    found = beside if os.access(beside, os.X_OK) else shutil.which(name)
    if found is None:
        hint = f"`pip install {name}` installs it on this head; nodes need none"
        raise EnvironmentFailed(f"`{key}` needs the program `{name}` on this head, and there is none", hint=hint)
    return found


def find_uv_for_nodes(platform: Platform) -> str:
    """Return the path of the program uv that is sent to nodes.

    Raises:
        EnvironmentFailed: The uv of the head does not run on the nodes.
    """
    if platform.machine != os.uname().machine or platform.glibc_minor is None:
        text = f"the uv of this head does not run on {platform.machine} with {platform.libc}"
        raise EnvironmentFailed(
            text, hint="start from a head like the nodes, or make the environment there by `job.setup`"
        )
    return find_uv()


@dataclass(frozen=True, slots=True)
class Parts:
    """What a node needs to make an environment.

    Attributes:
        paths: Files of the head to send.
        steps: A function that receives the folder of environments, the name of the environment and the base Python, and
            returns the steps that make the environment.
        has_python: Whether the files contain a Python, so that the node needs no base Python.
    """

    paths: list[Path]
    steps: Callable[[str, str, str], list[dict[str, Any]]]
    has_python: bool = False


class Recipe(Protocol):
    """An environment for one platform."""

    @property
    def platform(self) -> Platform:
        """The platform of the nodes."""

    @property
    def key(self) -> str:
        """The name of the environment on a node."""

    def find_url(self) -> str | None:
        """Return the URL of a file that nodes could download, or `None`."""

    def gather_parts(self, report: Callable[[str], None], *, by_nodes: bool) -> Parts:
        """Fetch everything that nodes need to this head.

        Args:
            report: A function that receives the present activity. Several threads call it.
            by_nodes: Whether the nodes download what they can.

        Raises:
            EnvironmentFailed: Something cannot be fetched or built, or does not fit the platform.
        """


def compute_key(*content: str) -> str:
    """Return the name of the environment with this content."""
    return "py" + hashlib.sha256(json.dumps([RECIPE_VERSION, *content]).encode()).hexdigest()[:24]
