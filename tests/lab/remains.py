"""What is left on a node once a run is over, beyond what may stay there: processes, connections, claims, files.

It is read as the kernel shows it and by nothing that the product says: what was not there before has come with the run.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab.locks import is_locked
from tests.lab.places import HOME, TEMPORARY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.inside import Process
    from tests.lab.node import Node

CLAIMS: Final = "/var/tmp/clusterctl-gpus-"
WORK: Final = ".local/share/clusterctl/work"
DECOYS: Final = ("count.py", "sleep 86400", "stray-of-a-rank", "clusterctl-agent wait", "clusterctl-agent supervise")


def folder(node: Node, place: str) -> Path:
    """Return a place of a node as a folder of this machine; of a home on a server, what the server has."""
    mounted = node.mounts.get(place)
    return node.path(node.where(place)) if mounted is None else mounted.folder


def state_root(node: Node) -> Path:
    """Return where a node keeps what it knows of runs (docs/design.md, "Directories")."""
    local = node.spec.all_places[HOME].network is None
    return node.path(".local/state/clusterctl" if local else f"/var/tmp/clusterctl-{node.spec.uid}")


STEP: Final = "/bin/sh -c trap '' TERM; /bin/sh; "


def _is_step(process: Process) -> bool:
    """Whether it is the task of a step of Slurm that leads to a node: it stays while others of the step are there."""
    return process.command.startswith(STEP)


class Watch:
    """A node, and how it was when nothing was there but a neighbour run and the decoys.

    Args:
        node: The node.
        neighbour: The id of the neighbour run, whose connection may come and go.
    """

    def __init__(self, node: Node, neighbour: str) -> None:
        self.node = node
        self._neighbour = neighbour
        self._decoys = {(p.pid, p.command) for p in node.leftovers() if any(word in p.command for word in DECOYS)}
        self._connected = self._connections()
        self._held = self._claims()
        self._may_stay = may_stay(node)
        self._opaque = re.compile(
            rf"{self._may_stay.pattern}|{node.spec.home}/{WORK}/[^/]+|/dev/shm/clusterctl-[0-9]+-[^/]+/[^/]+"
        )
        self._files = set(self._paths())
        self._told: set[str] = set()

    def left(self) -> list[str]:
        """Return what was not there at first, nor told by `settle`."""
        strangers = [f"process {pid}: {command}" for pid, command in self._strangers()]
        serving = len(self.node.pids_of("agent serve")) - 1
        connections = self._connections() - self._connected
        found = [
            *strangers,
            *([f"{serving} agents too many"] if serving > 0 else []),
            *([f"{connections} processes of sshd or steps of Slurm too many"] if connections > 0 else []),
            *(f"held: {name}" for name in sorted(self._claims() - self._held)),
            *(f"file: {path}" for path in sorted(set(self._paths()) - self._files)),
        ]
        return [what for what in found if what not in self._told]

    def touched(self) -> list[str]:
        """Return which decoys, and which claims of the neighbour, are gone."""
        there = {(p.pid, p.command) for p in self.node.leftovers()}
        gone = [f"process {pid}: {command}" for pid, command in sorted(self._decoys - there)]
        return [*gone, *(f"no longer held: {name}" for name in sorted(self._held - self._claims()))]

    def settle(self) -> None:
        """Take what is there now for granted, so that it is told of one round only."""
        self._told |= set(self.left())
        there = {(p.pid, p.command) for p in self.node.leftovers()}
        self._decoys &= there
        self._held &= self._claims()

    def _strangers(self) -> Iterator[tuple[int, str]]:
        """Yield who is neither a decoy nor of the neighbour's nor of a connection, of which there is a number."""
        there = {p.pid: p for p in self.node.processes()}
        for process in self.node.leftovers():
            line = [process]
            while (parent := there.get(line[-1].ppid)) is not None:
                line.append(parent)
            serves = any("agent serve" in p.command or p.comm.startswith("sshd") for p in line)
            serves = serves or any(_is_step(p) for p in line[:2])
            neighbours = any(self._is_neighbours(p) for p in line)
            if not serves and not neighbours and (process.pid, process.command) not in self._decoys:
                yield process.pid, process.command

    def _is_neighbours(self, process: Process) -> bool:
        run = self.node.environ(process.pid).get("CLUSTERCTL_RUN_ID")
        guards = f"clusterctl-agent (supervise|wait) {self.node.mark(self._neighbour)}"
        return re.match(guards, process.command) is not None or run == self._neighbour

    def _connections(self) -> int:
        return len(self.node.sshd_pids()) + sum(1 for _ in self._idle_steps())

    def _idle_steps(self) -> Iterator[Process]:
        """Yield the tasks of steps that stay for nobody: agents are counted elsewhere, and the neighbour may stay."""
        there = self.node.leftovers()
        for step in (p for p in there if _is_step(p)):
            group = self._group(step)
            members = [p for p in there if self._group(p) == group]
            if not any("agent serve" in p.command or self._is_neighbours(p) for p in members):
                yield step

    def _group(self, process: Process) -> str:
        try:
            return self.node.path(f"/proc/{process.pid}/cgroup").read_text()
        except OSError:
            return ""

    # --- claims

    def _claims(self) -> set[str]:
        """GPUs, workdirs, ports and runs that somebody holds here."""
        claims = self.node.path("/var/tmp").glob(f"{os.path.basename(CLAIMS)}*")
        files = [*claims, *state_root(self.node).glob("sync/*.lock")]
        sockets = Path(f"/proc/{self.node.init_pid}/net/unix").read_text().split()
        return {path.name for path in files if is_locked(path)} | {s for s in sockets if s.startswith("@clusterctl-")}

    # --- files

    def _paths(self) -> Iterator[str]:
        """Yield what is in the home and in the folders for temporary files, but for what may stay."""
        for place in (HOME, *TEMPORARY):
            top, where = folder(self.node, place), self.node.where(place)
            device = top.stat().st_dev
            for path, folders, files in os.walk(top):
                folders[:] = [name for name in folders if _lies_on(device, os.path.join(path, name))]
                inside = os.path.normpath(os.path.join(where, os.path.relpath(path, top)))
                for name in [*folders, *files]:
                    whole = f"{inside}/{name}"
                    if self._opaque.fullmatch(whole) and name in folders:
                        folders.remove(name)
                    if not self._may_stay.fullmatch(whole):
                        yield whole


def _lies_on(device: int, path: str) -> bool:
    """Whether a folder is there and not mounted: what the lab itself shows in a home, an interpreter for one, is."""
    try:
        return os.lstat(path).st_dev == device
    except FileNotFoundError:
        return False


def may_stay(node: Node) -> re.Pattern[str]:
    """Match what stays.

    Until `clean`: what happened in a run, the code that was brought for it, and the shim that all runs share, which goes
    with the last of them. Besides: the agent, and names of locks.
    """
    state = re.escape("/" + str(state_root(node).relative_to(node.path("/"))))
    home = re.escape(node.spec.home)
    return re.compile(
        rf"{home}/{WORK}/victim-[0-9a-f]+|{state}/nodes/[^/]+|{state}/inject/[0-9a-f]{{12}}|{state}/sync/[0-9a-f]+\.(json|lock)"
        rf"|{CLAIMS}[^/]+(/[^/]+)?|({home}/\.cache/clusterctl|/var/tmp/clusterctl-{node.spec.uid})/agents/[0-9a-f]{{64}}(\.pyz|/.*)?"
    )
