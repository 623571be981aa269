"""`clusterctl logs`."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.events import Exited
from clusterctl.cli import options
from clusterctl.cli.choices import Choices, together
from clusterctl.cli.lookup.runs import tell_unread
from clusterctl.cli.words import parse_duration, parse_ranks
from clusterctl.config.hosts import select
from clusterctl.logs.clean import clean_block
from clusterctl.logs.fold import Folder, fold_history
from clusterctl.logs.line import LogQuery
from clusterctl.logs.merge import matching, read_lines
from clusterctl.logs.select import FailingEnds
from clusterctl.render.log import LogWriter, Timestamps, json_line, raw_bytes
from clusterctl.run.record.find import find
from clusterctl.run.record.reader import StateReader, load_state

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.logs.line import LogLine
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class LogsChoices(Choices):
    """What a person chose of `logs`."""

    reference: str | None
    follow: bool
    tail: int | None
    since: str | None
    until: str | None
    ranks: str | None
    nodes: str | None
    grep: str | None
    attempt: int | None
    everything: bool
    timestamps: bool
    no_prefix: bool
    output: str

    @property
    def default(self) -> bool:
        """Nothing was chosen: rank 0, and the ends of ranks that failed."""
        return self.ranks is None and self.nodes is None and not self.everything and self.output == "text"


@click.command("logs")
@options.run_argument
@click.option("--follow", "-f", is_flag=True, help="Go on as lines come; Ctrl-C leaves.")
@click.option("--tail", "-n", type=click.IntRange(0), metavar="N", help="Only the last so many lines.")
@click.option("--since", metavar="TIME", help="Only lines after this: 10m ago as `10m`, or RFC 3339.")
@click.option("--until", metavar="TIME", help="Only lines before this.")
@click.option(
    "--rank", "ranks", metavar="SET", help="Only these ranks, e.g. 0-3,7.", shell_complete=options.offer("ranks")
)
@options.nodes_option
@click.option("--grep", metavar="REGEX", help="Only lines that match.")
@click.option(
    "--attempt", type=click.IntRange(0), metavar="N", help="Only this attempt; all of them in one view by default."
)
@click.option("--all", "everything", is_flag=True, help="All ranks in full, not only rank 0 and failing ends.")
@click.option("--timestamps", "-t", is_flag=True, help="Show times before lines.")
@click.option("--no-prefix", is_flag=True, help="Do not show whose line it is.")
@click.option(
    "--output", "-o", type=click.Choice(["text", "json", "raw"]), default="text", show_default=True, help="Form."
)
@options.output_options
@together(LogsChoices)
def command(choices: LogsChoices) -> int:
    """Show or follow the output of all ranks, merged by time.

    By default rank 0 in full and the ends of ranks that failed; equal lines of several ranks are folded to one. Times
    are those of this head: what the clock of a node was last measured to be ahead or behind is taken off.
    """
    run = find(choices.reference)
    state = load_state(run)
    query = _query(choices, state)
    console = choices.console()
    tell_unread(state, console)
    shown = _Output(console, state, query, choices)
    if choices.follow and not state.over:
        from clusterctl.cli.follow.logs import follow

        return follow(run, query, shown, console, default=choices.default)
    shown.history(read_lines(run.path, query, skew=state.ahead))
    if choices.default:
        shown.history(_failing_ends(run, query, state))
    return 0


def _query(choices: LogsChoices, state: RunState) -> LogQuery:
    return LogQuery(
        ranks=frozenset({0}) if choices.default else parse_ranks(choices.ranks),
        nodes=_nodes(state, choices.nodes),
        attempt=choices.attempt,
        since=_moment(choices.since, "--since"),
        until=_moment(choices.until, "--until"),
        grep=_pattern(choices.grep),
        tail=choices.tail,
        raw=choices.output == "raw",
    )


def _nodes(state: RunState, nodes: str | None) -> frozenset[str] | None:
    return None if nodes is None else frozenset(select(list(state.nodes), nodes))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"`{text}` is no regular expression: {error}", param_hint="--grep") from error


def _moment(text: str | None, option: str) -> float | None:
    """Return a wall clock time: a duration is that long ago."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return time.time() - (parse_duration(text, option) or 0.0)


class _Output:
    """Writes lines in the form that was asked for."""

    def __init__(self, console: Console, state: RunState, query: LogQuery, choices: LogsChoices) -> None:
        times = Timestamps.SHORT if choices.timestamps else Timestamps.NONE
        ranks = state.workers.keys() if query.ranks is None else query.ranks
        self._form = choices.output
        self._out = console.out
        self._writer = LogWriter(console.out, list(state.nodes), ranks, timestamps=times, prefix=not choices.no_prefix)
        self._folder = Folder(frozenset(ranks))

    def history(self, lines: Iterable[LogLine]) -> None:
        """Write lines that lie in the past."""
        stream = iter(fold_history(lines) if self._form == "text" else lines)
        while self._out.has_reader() and (batch := list(islice(stream, 1000))):
            self._put(batch)

    def live(self, lines: list[LogLine], *, last: bool = False) -> None:
        """Write lines as they come."""
        if self._form != "text":
            self._put(lines)
            return
        shown = self._folder.feed(lines, time.monotonic())
        self._put([*shown, *self._folder.flush()] if last else shown)

    def next_due(self) -> float | None:
        """Return when a held line is due, on the monotonic clock."""
        return self._folder.next_due()

    def _put(self, lines: list[Any]) -> None:
        if self._form == "text":
            self._writer.write(lines)
        elif self._form == "json":
            self._out.lines(map(json_line, lines))
        elif sys.stdout.isatty():
            cleaned = clean_block(b"".join(raw_bytes(line) for line in lines))
            self._out.lines(map(self._out.coloured, cleaned))
        else:
            sys.stdout.buffer.write(b"".join(raw_bytes(line) for line in lines))
            sys.stdout.buffer.flush()


def _failing_ends(run: RunDir, query: LogQuery, state: RunState) -> list[LogLine]:
    _, news = StateReader(run).refresh()
    exits = [
        (node, stamp.wall - state.ahead(node), event)
        for node, stamp, event in news
        if isinstance(event, Exited) and query.attempt in (None, event.attempt)
    ]
    return matching(FailingEnds(query.ranks).lines(exits), query)
