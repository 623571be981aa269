"""The end of a run that is decided: what is still on its way is taken in, the nodes are told, the journal is closed."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from clusterctl.agent import protocol as wire
from clusterctl.agent.protocol import Command
from clusterctl.errors import NotFoundError
from clusterctl.run import events
from clusterctl.run.controller.controlled import CALL_SECONDS
from clusterctl.run.links import each

if TYPE_CHECKING:
    from clusterctl.run import policy
    from clusterctl.run.controller.controlled import ControlledRun
    from clusterctl.run.controller.replication import Replication
    from clusterctl.session import Session

_DRAIN_WITHOUT_PROGRESS = 15.0

_Sizes = dict[tuple[str, str], int]


class Finishing:
    """Brings a run to its end. It is at work once `begin` was called."""

    def __init__(self, run: ControlledRun, replication: Replication) -> None:
        self._run, self._replication = run, replication
        self._finish: policy.Finish | None = None
        self._targets: _Sizes | None = None
        self._since = 0.0

    @property
    def begun(self) -> bool:
        """The run is decided."""
        return self._finish is not None

    @property
    def measuring(self) -> bool:
        """The nodes have not said yet how large their files are."""
        return self.begun and self._targets is None

    def begin(self, finish: policy.Finish) -> None:
        """Ask the nodes how large their files are, now that nobody writes to them any more."""
        run = self._run
        if finish.why_no_restart:
            run.note(f"no restart: {finish.why_no_restart}")
        self._finish, self._since = finish, time.monotonic()
        sessions = {n: s for n, s in run.links.sessions.items() if n in run.all_nodes()}
        files = self._files()

        def measure() -> _Sizes:
            found, _ = each(sessions, lambda n, s: self._sizes_on(n, s, files.get(n, [])))
            return {(n, f): size for n, sizes in found.items() for f, size in sizes.items()}

        run.aside(measure, self._measured)

    def _measured(self, targets: _Sizes) -> None:
        self._targets = targets

    def _sizes_on(self, node: str, session: Session, files: list[str]) -> dict[str, int]:
        sizes = {}
        for file in files:
            asked = {"run": self._run.folder.run, "node": node, "file": file, "offset": 0, "length": 0}
            with contextlib.suppress(NotFoundError):
                sizes[file] = int(session.call(Command.READ, asked, timeout=CALL_SECONDS)["size"])
        return sizes

    def _files(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for attempt, node, ranks in self._run.state.placed:
            for rank in ranks:
                found.setdefault(node, []).extend([wire.output_file(attempt, rank), wire.index_file(attempt, rank)])
        return found

    def go_on(self) -> None:
        """Close the run once all output is here, or no more of it comes."""
        run, finish = self._run, self._finish
        if finish is None or self._targets is None:
            return
        missing = [
            key
            for key, size in self._targets.items()
            if self._replica_size(*key) < size and key[0] in run.links.sessions
        ]
        waited = time.monotonic() - max(self._since, self._replication.moved)
        if missing and (waited < _DRAIN_WITHOUT_PROGRESS or (self._replication.paused and not run.kill)):
            return
        if missing:
            files = ", ".join(f"{n}: {f}" for n, f in missing[:3])
            run.note(f"output was not replicated whole ({files}); the nodes still have it")
        self._replication.tell_what_is_safe()
        run.finish_nodes(run.all_nodes(), finish.phase.value, finish.exit_code)
        run.record(events.Ended(state=finish.phase.value, exit_code=finish.exit_code, remaining=list(finish.remaining)))
        run.control.wake()

    def _replica_size(self, node: str, file: str) -> int:
        path = self._run.folder.node(node) / file
        return path.stat().st_size if path.exists() else 0
