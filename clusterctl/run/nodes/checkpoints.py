"""From which checkpoint an attempt goes on: one that all its nodes see whole, and that belongs to the run.

What was there when the run began belongs to others. It is known again by its time and size, whatever its path is by
then; clocks are compared with nothing.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.commands import Command
from clusterctl.config.kinds import Resume
from clusterctl.config.spec import CheckpointSpec, TransportKind
from clusterctl.plan.layout import workdir_of
from clusterctl.run.nodes.fan_out import each, names, raise_first, sessions_of
from clusterctl.run.record.disk import write_atomically
from clusterctl.run.rules import events

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from clusterctl.agent.protocol.types import arguments
    from clusterctl.agent.protocol.types.answers import Checkpoints
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.session.session import Session

Version = tuple[float, int]
"""Time (seconds, by the file system) and size (bytes) of the newest file of a checkpoint."""
Seen = dict[str, dict[str, Version]]
"""By node: the complete checkpoints there, by path."""

_FILE = "checkpoints.json"
_SHOWN_LATE = 5.0
_LOOK_AGAIN = 0.5


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that all nodes see; `version` as the node of rank 0 gives it."""

    path: str
    version: Version

    @property
    def label(self) -> str:
        """Text that another checkpoint does not have, nor one that had this path before."""
        return f"{self.path} {self.version[0]!r} {self.version[1]}"


# --- deciding


def of_this_run(seen: Mapping[str, Mapping[str, Version]], before: Mapping[str, Collection[Version]]) -> Seen:
    """Return what has appeared, or was written anew, since the run began.

    Args:
        seen: What each node shows now.
        before: The versions of all files that each node showed then. A node that was not asked, such as a spare that
            was reached later, counts only where it shows the very file that another node vouches for.
    """
    old = {version for versions in before.values() for version in versions}
    fresh = {node: {p: v for p, v in checkpoints.items() if v not in old} for node, checkpoints in seen.items()}
    vouched = {item for node, checkpoints in fresh.items() if node in before for item in checkpoints.items()}
    return {
        node: checkpoints if node in before else dict(item for item in checkpoints.items() if item in vouched)
        for node, checkpoints in fresh.items()
    }


def newest_of(first: str, seen: Mapping[str, Mapping[str, Version]]) -> Checkpoint | None:
    """Return the newest of what all nodes see, by the times of the node `first`."""
    common = [path for path in seen[first] if all(path in checkpoints for checkpoints in seen.values())]
    best = max(common, key=lambda path: (seen[first][path][0], path), default=None)
    return None if best is None else Checkpoint(best, seen[first][best])


def newest_somewhere(nodes: Sequence[str], seen: Mapping[str, Mapping[str, Version]]) -> Checkpoint | None:
    """Return the newest of what the first node sees that sees any: times of several nodes are not compared."""
    first = next((node for node in nodes if seen[node]), None)
    return None if first is None else newest_of(first, {first: seen[first]})


def sentence(
    number: int, checkpoint: CheckpointSpec, chosen: Checkpoint | None, newest: Checkpoint | None = None
) -> str:
    """Return what a person should know of an attempt: which checkpoint it takes, or why none.

    Args:
        number: The attempt.
        checkpoint: What the file says of them.
        chosen: What it takes.
        newest: What some of its nodes see.
    """
    if chosen is not None:
        return f"attempt {number} goes on from `{chosen.path}`"
    whose = "" if checkpoint.resume is Resume.ANY else " of this run"
    why = f"matches `{checkpoint.pattern}`" if newest is None else "is whole on all its nodes"
    return f"attempt {number} begins anew: no checkpoint{whose} {why}"


def sentence_of_lacking(newest: Checkpoint, seen: Mapping[str, Mapping[str, Version]], *, shared: bool) -> str:
    """Return on which nodes a checkpoint is and on which it is not, with what to do."""
    lacking = [node for node, shown in seen.items() if newest.path not in shown]
    there = names(node for node in seen if node not in lacking)
    advice = (
        "`job.checkpoint.shared` says that all nodes see the same files"
        if shared
        else "write to a folder that all nodes share (`job.checkpoint.shared`)"
    )
    return f"checkpoint `{newest.path}` is whole on {there}, not on {names(lacking)}: {advice}"


def sentence_of_older(count: int, pattern: str) -> str:
    """Return what a person should know of checkpoints that were there before a run that does not go on from them."""
    what, it = ("checkpoint", "it") if count == 1 else ("checkpoints", "them")
    return (
        f"{count} {what} of earlier runs match{'es' if count == 1 else ''} `{pattern}`: "
        f"this run does not go on from {it} (`job.checkpoint.resume: any` would)"
    )


def sentence_of_disks(pattern: str, *, shared: bool) -> str:
    """Return what a person should know where each node keeps checkpoints for itself."""
    if shared:
        return (
            f"`job.checkpoint.shared` says that all nodes see the same files, but `{pattern}` is on disks of their own"
        )
    return f"`{pattern}` is on disks of the nodes' own: a restart goes on from a checkpoint that every node has written"


# --- doing


class Resuming:
    """Chooses the checkpoint of each attempt of a run.

    Args:
        run: Where the run lies; what was there when it began is kept with it, for a controller that adopts it.
        spec: What to run.
        sessions: Gives the sessions as they are now, by node name.
        post: Takes controller events, in order.
        cancelled: Set when a person has ended the run.
    """

    def __init__(
        self,
        run: RunDir,
        spec: ClusterSpec,
        sessions: Callable[[], Mapping[str, Session]],
        post: Callable[[events.ControllerEvent], None],
        cancelled: threading.Event,
    ) -> None:
        self._file, self._sessions, self._post, self._cancelled = run.path / _FILE, sessions, post, cancelled
        self._name = spec.name
        self._here = {host.name for host in spec.hosts if host.transport is TransportKind.LOCAL}
        self._workdirs = {host.name: workdir_of(spec, host.name) for host in spec.hosts}
        self._checkpoint = spec.job.checkpoint if spec.job is not None else CheckpointSpec()
        self._restarts = spec.restart.max_restarts > 0

    def choose(self, number: int, nodes: Sequence[str]) -> tuple[str | None, Checkpoint | None]:
        """Return the path from which an attempt goes on, and the newest checkpoint that there is; say which it takes.

        Args:
            number: The attempt.
            nodes: Who takes part, in order of node rank.

        Raises:
            NodeError: A node cannot be asked.
        """
        pattern, mode = self._checkpoint.pattern, self._checkpoint.resume
        if pattern is None or (number == 0 and mode is not Resume.ANY):
            self._take_note(nodes)
            return None, None
        chosen, seen = self._look(nodes)
        newest = newest_somewhere(nodes, seen)
        if newest is not None and newest != chosen:
            text = sentence_of_lacking(newest, seen, shared=self._checkpoint.shared)
            self._post(events.Note(text=text, level="warn"))
        if mode is Resume.NEVER:
            return None, chosen
        self._post(events.Note(text=sentence(number, self._checkpoint, chosen, newest)))
        return chosen.path if chosen is not None else None, chosen

    def _take_note(self, nodes: Sequence[str]) -> None:
        """Keep with the run what is there before it has written anything, on its spares too."""
        pattern = self._checkpoint.pattern
        if pattern is None or not self._restarts:
            return
        answers, errors = each(self._sessions(), lambda node, session: self._ask(node, session, versions=True))
        raise_first({node: errors[node] for node in nodes if node in errors})
        before = {node: answer["versions"] for node, answer in answers.items()}
        write_atomically(self._file, json.dumps(before).encode())
        if self._checkpoint.resume is Resume.NEVER:
            return
        # Who has read it once at a start of this job knows it; what each restart takes is told anyway.
        earlier = list(self._of_earlier_runs())
        older = {entry["path"] for answer in answers.values() for entry in answer["found"]}
        if older and self._checkpoint.resume is Resume.THIS_RUN and not any(map(_shows_any, earlier)):
            self._post(events.Note(text=sentence_of_older(len(older), pattern)))
        if _on_disks_of_their_own({node: answers[node] for node in nodes}, self._here):
            shared = self._checkpoint.shared
            if shared or not earlier:
                text = sentence_of_disks(pattern, shared=shared)
                self._post(events.Note(text=text, level="warn" if shared else "info"))

    def _of_earlier_runs(self) -> Iterator[Path]:
        """Yield what was noted at earlier starts of the job, as far as their runs are still there."""
        for path in self._file.parent.parent.glob(f"*/{_FILE}"):
            if path != self._file and path.parent.name.rpartition("-")[0] == self._name:
                yield path

    def newest(self, nodes: Sequence[str]) -> Checkpoint | None:
        """Return the newest checkpoint that counts for the run and that all nodes see complete.

        Raises:
            NodeError: A node cannot be asked.
        """
        return None if self._checkpoint.pattern is None else self._look(nodes)[0]

    def _look(self, nodes: Sequence[str]) -> tuple[Checkpoint | None, Seen]:
        """Return the newest checkpoint that all nodes see complete, and what counts of each node's."""
        before = self._before() if self._checkpoint.resume is not Resume.ANY else None
        first, until = nodes[0], time.monotonic() + (_SHOWN_LATE if self._checkpoint.shared else 0.0)
        while True:
            answers, errors = each(sessions_of(self._sessions(), nodes), self._ask)
            raise_first(errors)
            seen = {node: _versions(answer) for node, answer in answers.items()}
            seen = seen if before is None else of_this_run(seen, before)
            chosen = newest_of(first, seen)
            # A shared file system shows new files on other machines only after a while.
            if chosen == newest_somewhere(nodes, seen) or time.monotonic() > until:
                return chosen, seen
            self._cancelled.wait(_LOOK_AGAIN)

    def _ask(self, node: str, session: Session, *, versions: bool = False) -> Checkpoints:
        request: arguments.Checkpoints = {
            "workdir": self._workdirs[node],
            "pattern": self._checkpoint.pattern,
            "versions": versions,
        }
        return session.call(Command.CHECKPOINTS, request)

    def _before(self) -> dict[str, set[Version]]:
        """Return what each node showed when the run began; nothing where that was never written down."""
        try:
            kept = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return {}
        return {node: {(mtime, size) for mtime, size in versions} for node, versions in kept.items()}


def _shows_any(noted: Path) -> bool:
    """Return whether some node had a file of a checkpoint when this was noted."""
    try:
        return any(json.loads(noted.read_text()).values())
    except (OSError, ValueError, AttributeError):
        return False


def _on_disks_of_their_own(answers: Mapping[str, Checkpoints], here: Collection[str]) -> bool:
    """Return whether no node sees what another writes. Local nodes (`here`) are one machine."""
    machines = len(answers) - max(0, sum(node in here for node in answers) - 1)
    return machines > 1 and not any(answer.get("network", True) for answer in answers.values())


def _versions(answer: Checkpoints) -> dict[str, Version]:
    return {entry["path"]: (entry["mtime"], entry["size"]) for entry in answer["found"]}
