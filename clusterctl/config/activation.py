"""Which Python environment a text of a shell activates. Pure."""

from __future__ import annotations

import itertools
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from clusterctl.config.launchers import shell_words

if TYPE_CHECKING:
    from collections.abc import Sequence


class Activation(NamedTuple):
    """A command that puts a Python first on PATH.

    Attributes:
        command: As it is written.
        environment: The folder or the name of the environment; empty where the command does not tell.
    """

    command: str
    environment: str


_CONDA = ("conda", "mamba", "micromamba")
_KEYWORDS = ("then", "do", "else", "{", "!", "export", "eval", "declare", "-x")
_PYTHON_MODULE = re.compile(
    r"(?i)(?:.*[-_/])?(?:c?python|(?:ana|mini)?conda|miniforge|mambaforge|mamba|(?:py)?torch|tensorflow)[\d.]*(?:[-_/].*)?"
)
_OF_OTHER_TOOLS = re.compile(
    r"(?i)[/_.-](?:cuda|rocm|nccl|rccl|(?:open)?mpi|mpich|hpcx|ucx|nsight|nvidia|libfabric|efa|slurm|gcc|llvm|sbin)"
)
"""In a folder of PATH: there is no Python in it."""


def last_activation(text: str) -> Activation | None:
    """Return the last command of a text that activates an environment, which is the one that holds; or `None`."""
    found = None
    for line in shell_words(text):
        words = [*itertools.dropwhile(_KEYWORDS.__contains__, line)]
        environment = _environment(words)
        if environment is not None:
            found = Activation(" ".join(words), environment)
    return found


def _environment(words: Sequence[str]) -> str | None:
    match words:
        case ["source" | ".", script, *names] if os.path.basename(script) == "activate":
            return names[0] if names else os.path.dirname(os.path.dirname(script))
        case [program, "activate", *names] if os.path.basename(program) in _CONDA:
            return next((name for name in names if not name.startswith("-")), "base")
        case ["pyenv", "shell" | "activate", *names] | ["workon", *names]:
            return names[0] if names else ""
        case [("module" | "ml"), *names] if any(map(_PYTHON_MODULE.fullmatch, names)) and "unload" not in names:
            return ""
        case [first, *_] if first.startswith("PATH="):
            folder = first.removeprefix("PATH=").partition(":")[0]
            is_python = (
                folder.strip("/") and not folder.startswith(("$PATH", "${PATH")) and not _OF_OTHER_TOOLS.search(folder)
            )
            return os.path.dirname(folder) if is_python else None
    return None


def is_of(python: str, environment: str) -> bool:
    """Return whether the path of a Python lies in an environment, as far as texts can tell."""
    own = os.path.dirname(os.path.dirname(_of_home(python)))
    other = _of_home(environment).rstrip("/")
    if own.startswith("/") and other.startswith("/"):
        return os.path.normpath(own) == os.path.normpath(other)
    name = os.path.basename(os.path.normpath(other)) if other else ""
    if name == "base" and "/" not in other:
        return "/envs/" not in own
    return name == os.path.basename(os.path.normpath(own))


def _of_home(path: str) -> str:
    return re.sub(r"^(?:\$HOME|\$\{HOME\})(?=/)", "~", path)
