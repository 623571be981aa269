"""`logs -f`: what was, then what comes, until the run ends or the person leaves."""

from __future__ import annotations

import select
import time
from typing import TYPE_CHECKING, Protocol

from clusterctl.agent.protocol.events import Exited
from clusterctl.errors import ExitCode
from clusterctl.logs.follow import Follower
from clusterctl.logs.merge import matching
from clusterctl.logs.select import FailingEnds
from clusterctl.run.controller.control import Bell
from clusterctl.run.controller.live_tail import ControllerSource, NotYetError
from clusterctl.run.record.reader import StateReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.logs.line import LogLine, LogQuery
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir

_LOOK = 1.0
_SOON = 0.05
_PATIENCE = 5.0


class Output(Protocol):
    """Where lines go."""

    def history(self, lines: Iterable[LogLine]) -> None:
        """Write lines that lie in the past."""

    def live(self, lines: list[LogLine], *, last: bool = False) -> None:
        """Write lines as they come."""

    def next_due(self) -> float | None:
        """Return when a held line is due, on the monotonic clock."""


def follow(run: RunDir, query: LogQuery, shown: Output, console: Console, *, default: bool) -> int:
    """Follow a run's output; return the exit code of the command."""
    reader, bell = StateReader(run), Bell(run)
    ends = FailingEnds(query.ranks if default else None)
    try:
        follower, history = _begin(run, query, reader)
        shown.history(history)
        while True:
            rung = bell.clear()
            attended = rung or run.attended
            _, news = reader.refresh()
            over = reader.state.over
            for lines in follower.finish() if over else [follower.poll()]:
                shown.live(lines)
            if over:
                shown.live([], last=True)
            exits = [(n, s.wall - reader.state.ahead(n), e) for n, s, e in news if isinstance(e, Exited)]
            shown.live(matching(ends.lines(exits), query), last=over)
            if over or not console.out.has_reader():
                return int(ExitCode.OK)
            if not attended:
                console.narrate(
                    f"error: {run.run} goes on without a controller", "", "hint: `clusterctl attach --adopt` takes over"
                )
                return int(ExitCode.UNATTENDED)
            _wait(bell, follower, shown)
    except KeyboardInterrupt:
        return int(ExitCode.OK)


def _begin(run: RunDir, query: LogQuery, reader: StateReader) -> tuple[Follower, Iterator[LogLine]]:
    """Return a follower and what it shows first; a controller that is about to connect is waited for."""
    end = time.monotonic() + _PATIENCE
    reader.refresh()

    def ahead(node: str) -> float:
        return reader.state.ahead(node)

    follower = Follower(run.path, query, skew=ahead, source=ControllerSource(run, reader.state, query))
    while True:
        try:
            return follower, follower.history()
        except NotYetError:
            if time.monotonic() > end:
                follower = Follower(run.path, query, skew=ahead)
            time.sleep(_SOON)


def _wait(bell: Bell, follower: Follower, shown: Output) -> None:
    timeout = 0.0 if follower.more else _LOOK
    due = shown.next_due()
    if due is not None:
        timeout = min(timeout, max(0.0, due - time.monotonic()))
    fd = bell.fileno()
    select.select([] if fd is None else [fd], [], [], timeout)
