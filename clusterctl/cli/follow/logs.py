"""`logs -f`: what was, then what comes, until the run ends or the person leaves."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from clusterctl.cli.follow.poller import RunPoller, RunStatus
from clusterctl.cli.run_views import predict_outlook
from clusterctl.errors import ExitCode
from clusterctl.logs.failure_tails import FailureTails, merge_lines, read_failure_tails
from clusterctl.logs.follow import Follower
from clusterctl.logs.line import LogLine, LogQuery
from clusterctl.logs.merge import filter_lines
from clusterctl.render.errors import error_line, hint_lines
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console


class Output(Protocol):
    """Where lines go."""

    def history(self, lines: Iterable[LogLine]) -> None:
        """Write lines that lie in the past."""

    def live(self, lines: list[LogLine], *, last: bool = False) -> None:
        """Write lines as they come."""

    state: RunState

    def end(self) -> None:
        """Say how attempts ended of which no later line told."""

    def next_due(self) -> float | None:
        """Return when a held line is due, on the monotonic clock."""


def follow(run: RunDir, query: LogQuery, shown: Output, console: Console, *, default: bool) -> int:
    """Follow a run's output; return the exit code of the command."""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(RunPoller(run)) as poller:
        return _follow(poller, query, shown, console, default=default)
    return int(ExitCode.OK)


def _follow(poller: RunPoller, query: LogQuery, shown: Output, console: Console, *, default: bool) -> int:
    failing = FailureTails(query.ranks if default else None)
    first = poller.poll()

    def offset_s(node: str) -> float:
        return poller.state.ahead(node)

    follower = Follower(poller.run.path, query, skew=offset_s)
    ends = read_failure_tails(poller.run.path, query, first.exits, failing, skew=poller.state.ahead)
    past = merge_lines(follower.history(), ends)
    shown.state = poller.state
    shown.history(past if query.tail is None else deque(past, maxlen=query.tail))
    for snapshot in poller.snapshots(lambda: _due(follower, shown)):
        shown.state = snapshot.state
        over = snapshot.status is RunStatus.OVER
        for lines in follower.finish() if over else [follower.poll()]:
            shown.live(lines)
        if over:
            shown.live([], last=True)
        shown.live(filter_lines(failing.lines(snapshot.exits), query), last=over)
        if over:
            shown.end()
        if over or not console.out.has_reader():
            return int(ExitCode.OK)
    console.narrate(
        error_line(predict_outlook(poller.run, poller.state).error(poller.run.run), console.err),
        *hint_lines(f"`clusterctl attach --adopt {poller.run.run}` takes over", console.err),
    )
    return int(ExitCode.UNATTENDED)


def _due(follower: Follower, shown: Output) -> float:
    """Return when there is more to show at the latest, on the monotonic clock."""
    held = shown.next_due()
    if follower.more:
        return time.monotonic()
    return math.inf if held is None else held
