"""Finds out whether the command of a worker starts a Python with clusterctl's shim."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_SCRIPT_BYTES = 1 << 17

_WANTS_PYTHON = re.compile(r"(?:^|[\s;&|(`\"'/])(?:python[\d.]*|torchrun|accelerate|deepspeed)(?=[\s\"']|$)")
_WITHOUT_SHIM = re.compile(
    r"\b(?:docker|podman|nerdctl|singularity|apptainer|enroot|kubectl|srun|sbatch|mpirun|mpiexec|ssh|sudo|tmux|screen"
    r"|systemd-run|chroot|bwrap|nix)\b|\benv -[iu]\b|\bunset\b|\bpython[\d.]* -[A-Za-z]*[IES]|PYTHONPATH=|--cleanenv"
)
"""Commands and options that start a Python without clusterctl's shim."""
_REPLACES_PATH = re.compile(r"\bPYTHONPATH=(?!\S*\$\{?PYTHONPATH\b)")
_SCRIPT = re.compile(r"[\w./~+@-]+")


def classify_shim_access(argv: Sequence[str], workdir: str) -> str:
    """Return whether the shim runs in the Python that a command starts, directly or from a shell script.

    Call this function in a child process: the folder may lie on a mount that hangs.

    Args:
        argv: The command of a worker.
        workdir: The working directory of the worker.

    Returns:
        "wants-python" if the command starts a Python with the shim. "hides-python" if the command starts a Python
        without the shim, for example with another PYTHONPATH. "" if no start of a Python was recognised.
    """
    text = " ".join(argv)
    texts = [text]
    for word in _SCRIPT.findall(text):
        path = os.path.join(workdir, os.path.expanduser(word))
        if (word.endswith(".sh") or "/" in word) and os.path.isfile(path):
            with open(path, "rb") as file:
                content = file.read(_MAX_SCRIPT_BYTES)
            if word.endswith(".sh") or re.match(rb"#!.*sh\b", content):
                texts.append(content.decode("utf-8", "replace"))
    script = "\n".join(line for each in texts for line in each.splitlines() if not line.lstrip().startswith("#"))
    if not _WANTS_PYTHON.search(script):
        return ""
    if _WITHOUT_SHIM.search(script):
        return "hides-python" if _REPLACES_PATH.search(script) else ""
    return "wants-python"
