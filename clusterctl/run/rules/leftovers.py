"""What a rank left at work when it ended: was that the job? Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clusterctl.formatting import duration_text
from clusterctl.run.rules.blame import Cause

if TYPE_CHECKING:
    from clusterctl.agent.protocol.process_types import LeftoverProcess

SOON_S = 30.0
"""A rank that ends with 0 in this time and leaves something at work has put its job into the background."""
_IDLE = ("bash", "sh", "dash", "zsh", "sleep", "tail", "tee", "cat", "watch", "ssh", "sshd")
"""Programs that only wait for others."""


def is_idle(leftover: LeftoverProcess) -> bool:
    """Return whether a process does no work of its own."""
    return leftover["command"].strip("[]").split(" ")[0].rpartition("/")[2] in _IDLE


def left_work(node: str, leftover: LeftoverProcess) -> Cause:
    """Return as what a run counts whose ranks ended within seconds and left this at work."""
    message = f"{describe(leftover)} was still at work, and was ended"
    return Cause(kind="left_work", node=node, rank=leftover["rank"], exit_code=0, message=message, certain=True)


def describe(leftover: LeftoverProcess) -> str:
    """Return its command, pid and age."""
    return f"`{leftover['command']}` (pid {leftover['pid']}, {duration_text(leftover['age_s'])} old)"
