"""`clusterctl logs`."""

from __future__ import annotations

import re
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options

if TYPE_CHECKING:
    from collections.abc import Iterable

    from clusterctl.logs.line import LogLine, LogQuery
    from clusterctl.render.terminal.console import Console
    from clusterctl.run.record.rundir import RunDir
    from clusterctl.run.rules.state import RunState


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
def command(
    reference: str | None,
    follow: bool,
    tail: int | None,
    since: str | None,
    until: str | None,
    ranks: str | None,
    nodes: str | None,
    grep: str | None,
    attempt: int | None,
    everything: bool,
    timestamps: bool,
    no_prefix: bool,
    output: str,
    color: str,
    quiet: bool,
) -> int:
    """Show or follow the output of all ranks, merged by time.

    By default rank 0 in full and the ends of ranks that failed; equal lines of several ranks are folded to one. Times
    are those of this head: what the clock of a node was last measured to be ahead or behind is taken off.
    """
    from clusterctl.cli.lookup.runs import tell_unread
    from clusterctl.cli.words import parse_ranks
    from clusterctl.logs.line import LogQuery
    from clusterctl.run.record.find import find
    from clusterctl.run.record.reader import load_state

    run = find(reference)
    state = load_state(run)
    chosen = parse_ranks(ranks)
    default = chosen is None and nodes is None and not everything and output == "text"
    query = LogQuery(
        ranks=frozenset({0}) if default else chosen,
        nodes=_nodes(state, nodes),
        attempt=attempt,
        since=_moment(since, "--since"),
        until=_moment(until, "--until"),
        grep=_pattern(grep),
        tail=tail,
        raw=output == "raw",
    )
    console = options.console_of(color)
    tell_unread(state, console)
    shown = _Output(console, state, query, output, timestamps=timestamps, prefix=not no_prefix)
    if follow and not state.over:
        return _follow(run, query, shown, console, default=default)
    _history(run, query, shown, state, default=default)
    return 0


def _nodes(state: RunState, nodes: str | None) -> frozenset[str] | None:
    if nodes is None:
        return None
    from clusterctl.config.hosts import select

    return frozenset(select(list(state.nodes), nodes))


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
    from datetime import datetime

    from clusterctl.cli.words import parse_duration

    try:
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    except ValueError:
        return time.time() - (parse_duration(text, option) or 0.0)


class _Output:
    """Writes lines in the form that was asked for."""

    def __init__(
        self, console: Console, state: RunState, query: LogQuery, form: str, *, timestamps: bool, prefix: bool
    ) -> None:
        from clusterctl.logs.fold import Folder
        from clusterctl.render.log import LogWriter, Timestamps

        kind = Timestamps.SHORT if timestamps else Timestamps.NONE
        ranks = state.workers.keys() if query.ranks is None else query.ranks
        self._form = form
        self._out = console.out
        self._writer = LogWriter(console.out, list(state.nodes), ranks, timestamps=kind, prefix=prefix)
        self._folder = Folder(frozenset(ranks))

    def history(self, lines: Iterable[LogLine]) -> None:
        """Write lines that lie in the past."""
        from itertools import islice

        from clusterctl.logs.fold import fold_history

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
        from clusterctl.logs.clean import clean_block
        from clusterctl.render.log import json_line, raw_bytes

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


def _history(run: RunDir, query: LogQuery, shown: _Output, state: RunState, *, default: bool) -> None:
    from clusterctl.logs.merge import read_lines

    shown.history(read_lines(run.path, query, skew=state.ahead))
    if default:
        shown.history(_failing_ends(run, query, state))


def _failing_ends(run: RunDir, query: LogQuery, state: RunState) -> list[LogLine]:
    from clusterctl.agent.protocol.events import Exited
    from clusterctl.logs.merge import matching
    from clusterctl.logs.select import FailingEnds
    from clusterctl.run.record.reader import StateReader

    _, news = StateReader(run).refresh()
    exits = [
        (node, stamp.wall - state.ahead(node), event)
        for node, stamp, event in news
        if isinstance(event, Exited) and query.attempt in (None, event.attempt)
    ]
    return matching(FailingEnds(query.ranks).lines(exits), query)


def _follow(run: RunDir, query: LogQuery, shown: _Output, console: Console, *, default: bool) -> int:
    from clusterctl.cli.follow.logs import follow

    return follow(run, query, shown, console, default=default)
