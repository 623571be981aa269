"""The zygote of a run on this node: started with the first attempt, kept for the next, and never left behind."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent import inject
from clusterctl.agent.protocol import encoding, events, refusals, requests
from clusterctl.agent.supervisor import workers
from clusterctl.agent.supervisor.forking import starts
from clusterctl.agent.supervisor.forking.zygote import Stage, Zygote
from clusterctl.agent.supervisor.listening import Later

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.agent.linux import spawn
    from clusterctl.agent.linux.loop import Loop
    from clusterctl.agent.members.marks import Marks
    from clusterctl.agent.record.rundir import RunDir
    from clusterctl.agent.supervisor.attempt import Attempt
    from clusterctl.agent.supervisor.workers import Worker

    Answer = dict[str, Any]
    Action = Callable[[], None]


_EARLY_SECONDS = 300.0
"""How long what was imported early waits for an attempt: a node may be left out, and become a spare."""


class Forking:
    """Has a zygote where the head asks for one, and lets starts wait until it is ready.

    Attributes:
        early: Imports are all that this node was asked for so far: there is nothing to write down of their end.
    """

    def __init__(
        self,
        loop: Loop,
        run: RunDir,
        marks: Marks,
        record: Callable[[events.Event], object],
    ) -> None:
        """Begin with none."""
        self._loop, self._run, self._marks, self._record = loop, run, marks, record
        self.early = False
        self._zygote: Zygote | None = None
        self._attempt: Attempt | None = None
        self._asked: requests.Forked | None = None
        self._waiting: list[tuple[Action, Action, Later]] = []
        self._said: set[str] = set()

    # --- the zygote

    def begin_early(self, prepare: requests.Prepare) -> None:
        """Begin with the imports of an attempt that is still to be prepared; what does not come of it is no news."""
        if prepare.forked is None or self._zygote is not None:
            return
        self.early = True
        with contextlib.suppress(refusals.RequestError):
            python = workers.look_for_python(prepare)
            if python is not None:
                asked = encoding.from_wire(requests.Forked, prepare.forked)
                self._start(asked, self._program(prepare, python, asked))
                self._loop.after(_EARLY_SECONDS, self._forget)

    def _forget(self) -> None:
        """End what was begun early, and never asked for."""
        if self._attempt is None:
            self.close()

    def prepare(self, attempt: Attempt) -> None:
        """Have a zygote for an attempt, if it wants one: that of the attempt before, if it is still good."""
        wanted, self.early = attempt.prepare.forked, False
        self._attempt, self._said = attempt, set()
        self._asked = None if wanted is None else encoding.from_wire(requests.Forked, wanted)
        if self._asked is None:
            self.close()
            return
        attempt.begin_all = self._begin_all
        program, old = self._program(attempt.prepare, attempt.python, self._asked), self._zygote
        if old is not None and old.stage is not Stage.OVER and old.serves(self._asked, program):
            attempt.ledger.ours.add(old.identity)
            old.check(self._asked, program, self._run.short)
        else:
            self.close()
            self._start(self._asked, program)

    def _program(self, prepare: requests.Prepare, python: str, asked: requests.Forked) -> spawn.Program:
        one = requests.WorkerStart(rank=0, local_rank=0, argv=asked.argv, env=asked.env)
        # Of the first attempt, whichever it is: what is of one attempt alone is left out all the same.
        start = requests.Start(self._run.run, self._run.node, 0, [], inject=asked.inject)
        return workers.program(self._run, self._marks, prepare, start, one, python)

    def _start(self, asked: requests.Forked, program: spawn.Program) -> None:
        try:
            if not workers.install_shim(self._run):
                raise OSError(0, "its modules cannot be written")
            zygote = Zygote(self._loop, asked, program, inject.folder(self._run.root), self._run.short, self._settled)
        except OSError as error:
            self._say(f"no process can be had to fork them: {error.strerror}")
            return
        if self._attempt is not None:
            self._attempt.ledger.ours.add(zygote.identity)
        self._zygote = zygote

    def _settled(self) -> None:
        """It is ready, or over."""
        zygote = self._zygote
        if zygote is not None and zygote.stage is Stage.OVER:
            self._zygote = None
            if zygote.stale and self._attempt is not None and self._asked is not None:
                again = self._program(self._attempt.prepare, self._attempt.python, self._asked)
                self._start(self._asked, again)
                return
            self._say(zygote.why)
        self.let_go()

    def close(self) -> None:
        """End it; nobody is told."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.close("")

    # --- starts

    def when_ready(self, start: Action, started: Action) -> Answer | Later:
        """Do a start now, or once the zygote has imported what it shall; `started` is called after it in any case."""
        if self._zygote is None or self._zygote.stage is not Stage.BUSY:
            return self._begin(start, started)
        later = Later()
        self._waiting.append((start, started, later))
        return later

    def let_go(self) -> None:
        """Let the starts go on that wait: the zygote is ready, or the attempt ends."""
        waiting, self._waiting = self._waiting, []
        for start, started, later in waiting:
            later.give(lambda start=start, started=started: self._begin(start, started))  # type: ignore[misc]

    def _begin(self, start: Action, started: Action) -> Answer:
        try:
            start()
        finally:
            started()
            if self._zygote is not None and self._zygote.stage is Stage.READY and not self._zygote.asked.keep:
                self.close()
        return {}

    def _begin_all(self, wanted: Sequence[starts.Wanted]) -> Iterator[Worker]:
        zygote, anew = self._zygote, len(self._said)
        yield from starts.begin_all(zygote, wanted, self._say)
        if zygote is not None and len(self._said) == anew and wanted and self._attempt is not None:
            self._tell(events.FORKED, _gain(zygote.told, len(wanted)))

    def _tell(self, code: str, text: str) -> None:
        if self._attempt is not None:
            self._record(events.Alarm(self._attempt.number, code, text, "info"))

    def _say(self, why: str) -> None:
        """Say once in an attempt why ranks are not forked."""
        if self._attempt is None or self._asked is None or why in self._said:
            return
        self._said.add(why)
        severity = "warn" if self._asked.demanded else "info"
        text = f"not forked, but started anew: {why}"
        self._record(events.Alarm(self._attempt.number, events.NOT_FORKED, text, severity))


def _gain(told: dict[str, Any], ranks: int) -> str:
    """Say what it is worth."""
    names = told["modules"]
    what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    memory = f"{told['kilobytes'] / 1024:.0f} MiB once instead of {ranks} times"
    return f"{ranks} forked from one process that took {told['seconds']:.1f} s to import {what}: {memory}"
