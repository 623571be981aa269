"""Who dies in a round of the random killer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab.locks import lock_holder
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from tests.lab.node import Node

KINDS: Final = ("controller", "supervisor", "waiter", "serve", "worker", "sshd")
FORKSERVER: Final = "forkserver"
"""Where ranks are forked there is one a node, until all of them are started."""
THERE_WITHIN: Final = 20.0


def kill(kind: str, dice: random.Random, made: Sequence[Node], run_dir: Path) -> tuple[str, Callable[[], None]] | None:
    """Kill one process of a kind as soon as there is one.

    Returns:
        Who it was, and what returns when all that has to be started again is there; None if nobody came.
    """

    def find() -> tuple[Node | None, int] | None:
        found = of_kind(kind, made, run_dir)
        return dice.choice(found) if found else None

    try:
        node, pid = wait_for(find, THERE_WITHIN, what=f"a {kind}")
    except TimeoutError:
        return None
    if node is None:
        with contextlib.suppress(ProcessLookupError):
            if kind == "sshd":
                os.killpg(os.getpgid(pid), signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
        return f"{pid} on the head", lambda: None
    listener = kind == "sshd" and pid == node.sshd_listener()
    node.signal(pid, signal.SIGKILL)
    if not listener:
        return f"{pid} on {node.name}", lambda: None
    restart = threading.Timer(dice.uniform(0.0, 1.5), node.restart_sshd)
    restart.start()
    return f"the listener on {node.name}", restart.join


def of_kind(kind: str, made: Sequence[Node], run_dir: Path) -> list[tuple[Node | None, int]]:
    """Return the living processes of a kind, by node; on the head, by None."""
    run = run_dir.name
    if kind == "controller":
        pid = lock_holder(run_dir / "lock")
        return [] if pid is None else [(None, pid)]
    if kind == "sshd":
        # Whoever carries the connection: where that is not sshd, an `srun` here.
        steps: list[tuple[Node | None, int]] = [(None, pid) for pid in _sruns(lock_holder(run_dir / "lock"))]
        return steps or [(n, pid) for n in made for pid in n.sshd_pids()]
    patterns = {
        "supervisor": "clusterctl-agent supervise {mark}",
        "waiter": "clusterctl-agent wait {mark} ",
        "serve": "agent serve",
    }
    if kind in patterns:
        return [(n, pid) for n in made for pid in n.pids_of(patterns[kind].format(mark=n.mark(run)))]
    found = [
        (n, pid) for n in made for pid in n.pids_of(r"count\.py$") if n.environ(pid).get("CLUSTERCTL_RUN_ID") == run
    ]
    # A forkserver has the command line of a rank, and a name of its own.
    return [(n, pid) for n, pid in found if (_name(pid) == "clusterctl-fork") == (kind == FORKSERVER)]


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _sruns(controller: int | None) -> list[int]:
    """Return the children of a controller that lead to nodes by steps of Slurm."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            before, _, after = (entry / "stat").read_text().rpartition(")")
            if before.endswith("(srun") and int(after.split()[1]) == controller:
                found.append(int(entry.name))
    return found
