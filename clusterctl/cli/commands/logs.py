"""`clusterctl logs`."""

from __future__ import annotations

import contextlib
import math
import re
import sys
import time
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.events import Exited
from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.follow.poller import RunAttendance, RunPoller
from clusterctl.cli.option_values import parse_rank_set, parse_time_option
from clusterctl.cli.run_views import predict_unattended_run, warn_of_unreadable_lines
from clusterctl.config.host_ranges import select_hosts
from clusterctl.errors import ExitCode, NotFoundError
from clusterctl.formatting import fold_ranks, plural
from clusterctl.logs.failure_tails import FailureTails, merge_failure_lines, read_failure_tails, read_folded_lines
from clusterctl.logs.fold import FoldedLine, LineFolder, fold_history
from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogLine, LogQuery
from clusterctl.logs.merge import read_lines
from clusterctl.logs.safe_text import clean_block
from clusterctl.render.attempt_table import AttemptSeparators
from clusterctl.render.error_messages import error_line, hint_lines
from clusterctl.render.log_output import LogWriter, Timestamps, encode_raw_line, format_json_line
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StampedNodeEvent, StateReader, find_run_to_read, list_runs
from clusterctl.run.rules.state import RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console


@click.command("logs", cls=CliCommand)
@options.run_argument
@click.option("--follow", "-f", is_flag=True, help="Keep showing new lines until Ctrl-C.")
@click.option(
    "--tail", "-n", type=click.IntRange(0), metavar="N", help="Show only the last N lines that match the other options."
)
@click.option(
    "--since", metavar="TIME", help="Only lines after this time: `10m` (ago), `22:43:12` (time of day), or RFC 3339."
)
@click.option("--until", metavar="TIME", help="Only lines before this time.")
@options.rank_set_option
@options.nodes_option
@click.option("--role", metavar="NAME", help="Only the ranks of this role of `job.roles`.")
@click.option("--grep", metavar="REGEX", help="Only lines that match this regular expression.")
@click.option("--attempt", type=click.IntRange(0), metavar="N", help="Only this attempt; all attempts by default.")
@click.option("--all-ranks", is_flag=True, help="Show all ranks in full.")
@click.option("--timestamps", "-t", is_flag=True, help="Show a time before each line.")
@click.option("--no-prefix", is_flag=True, help="Leave out the rank before each line.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["text", "json", "raw"]),
    default="text",
    show_default=True,
    help="`json`: one object for each line. `raw`: the bytes as written. Both include all ranks.",
)
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    reference: str | None,
    follow: bool,
    tail: int | None,
    since: str | None,
    until: str | None,
    ranks: str | None,
    nodes: str | None,
    role: str | None,
    grep: str | None,
    attempt: int | None,
    all_ranks: bool,
    timestamps: bool,
    no_prefix: bool,
    output_format: str,
) -> int:
    """Show or follow the output of all ranks, merged by time.

    By default `logs` shows the output of rank 0 of each role, and the last lines of each rank that failed. Equal lines
    of several ranks are shown once. If there were several attempts, a line before each attempt says why the previous
    attempt ended. Times are on the clock of this head: `logs` subtracts the measured clock offset of each node.
    """
    if output_format != "text":
        whole = (("--timestamps", timestamps), ("--no-prefix", no_prefix))
        options.refuse_options_with(f"--format {output_format}", *whole)
    options.refuse_combination(("--all-ranks", all_ranks), ("--rank", ranks))
    run = find_run_to_read(reference)
    reader, worker_exits = StateReader(run), _WorkerExits()
    reader.apply_new_events(on_node_event=worker_exits.add_if_exit)
    state = reader.state
    options.refuse_combination(("--role", role), ("--nodes", nodes))
    if role is not None:
        nodes = _list_role_nodes(state, role)
    default = ranks is None and nodes is None and not all_ranks and output_format == "text"
    query = LogQuery(
        ranks=frozenset({0, *state.first_ranks.values()}) if default else parse_existing_ranks(state, ranks),
        nodes=None if nodes is None else frozenset(select_hosts(list(state.nodes), nodes)),
        attempt=validate_attempt(state, attempt),
        since=_parse_time(since, "--since", state),
        until=_parse_time(until, "--until", state),
        grep=_compile_regex(grep),
        tail=tail,
        raw=output_format == "raw",
    )
    console = common.console()
    if reference is None and output_format == "text" and len(list_runs()) > 1:
        console.write_stderr(f"{run.run}, {state.phase.value}:")
    warn_of_unreadable_lines(state, console)
    log_output = _LogOutput(
        console, state, query, output_format=output_format, timestamps=timestamps, prefix=not no_prefix
    )
    if follow and not state.is_over:
        return _follow_run(run, query, log_output, console, default=default)
    if output_format == "text":
        exits = worker_exits.list_on_head_clock(state) if default else []
        ends = read_failure_tails(run.path, query, exits, FailureTails(query.ranks), skew=state.clock_ahead_s)
        log_output.write(read_folded_lines(run.path, query, ends, skew=state.clock_ahead_s))
    else:
        log_output.write(read_lines(run.path, query, skew=state.clock_ahead_s))
    log_output.write_last_separators()
    if not log_output.lines and output_format == "text":
        console.write_stderr(explain_missing_output(run, state, query))
    return 0


def _list_role_nodes(state: RunState, role: str) -> str:
    """Return the nodes of a role, separated by commas.

    Raises:
        NotFoundError: The run has no such role.
    """
    found = [node.node for node in state.nodes.values() if node.role == role]
    if not found:
        names = ", ".join(dict.fromkeys(node.role for node in state.nodes.values() if node.role))
        raise NotFoundError(
            f"no role {role} in {state.run}", hint=f"its roles are {names}" if names else "its job has no roles"
        )
    return ",".join(found)


def _compile_regex(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        raise click.BadParameter(f"`{text}` is not a regular expression: {error}", param_hint="--grep") from error


def _parse_time(text: str | None, option: str, state: RunState) -> float | None:
    """Return the time of `--since` or `--until` (wall clock); a time of day is on the last day of the run."""
    now = time.time()
    of_day = text is not None and ":" in text and state.ended is not None
    return parse_time_option(text, option, now=state.ended if of_day and state.ended else now, run_start=state.created)


class _LogOutput:
    """Writes lines in the requested format."""

    def __init__(
        self, console: Console, state: RunState, query: LogQuery, *, output_format: str, timestamps: bool, prefix: bool
    ) -> None:
        times = Timestamps.SHORT if timestamps else Timestamps.NONE
        ranks = state.workers.keys() if query.ranks is None else query.ranks
        self.state = state
        self.lines = 0
        self._format = output_format
        self._out = console.out
        labels = {name: node.label for name, node in state.nodes.items()}
        self._writer = LogWriter(console.out, list(state.nodes), ranks, timestamps=times, prefix=prefix, labels=labels)
        self._folder = LineFolder(frozenset(ranks))
        marked = self._format == "text" and query.grep is None and prefix
        whole = query.tail is None and query.since is None
        self._separators = AttemptSeparators(console.out, attempt=query.attempt, first=whole) if marked else None

    def write_history(self, lines: Iterable[LogLine]) -> None:
        """Write earlier lines; equal lines of several ranks are folded."""
        self.write(fold_history(lines) if self._format == "text" else lines)

    def write(self, lines: Iterable[LogLine | FoldedLine]) -> None:
        """Write lines without folding them."""
        stream = iter(lines)
        while self._out.has_reader() and (batch := list(islice(stream, 1000))):
            self._write_batch(batch)

    def write_last_separators(self) -> None:
        """Write the separators of attempts that began after the last line."""
        if self._separators is not None:
            self._out.write_lines(self._separators.list_remaining_separators(self.state))

    def write_new(self, lines: list[LogLine], *, last: bool = False) -> None:
        """Write new lines. Some lines wait for a moment, because other ranks may write equal lines."""
        if self._format != "text":
            self._write_batch(lines)
            return
        shown = self._folder.feed(lines, time.monotonic())
        self._write_batch([*shown, *self._folder.flush()] if last else shown)

    def find_next_due_time(self) -> float | None:
        """Return the monotonic time at which the next waiting line must be written; `None` if no line waits."""
        return self._folder.find_next_due_time()

    def _write_batch(self, lines: list[Any]) -> None:
        self.lines += len(lines)
        if self._format == "text" and self._separators is not None:
            for piece in self._separators.insert_separators(lines, self.state):
                if isinstance(piece, str):
                    self._out.write_lines([piece])
                else:
                    self._writer.write(piece)
        elif self._format == "text":
            self._writer.write(lines)
        elif self._format == "json":
            self._out.write_lines(map(format_json_line, lines))
        elif sys.stdout.isatty():
            cleaned = clean_block(b"".join(encode_raw_line(line) for line in lines))
            self._out.write_lines(map(self._out.filter_colours, cleaned))
        else:
            sys.stdout.buffer.write(b"".join(encode_raw_line(line) for line in lines))
            sys.stdout.buffer.flush()


def _follow_run(run: RunDir, query: LogQuery, log_output: _LogOutput, console: Console, *, default: bool) -> int:
    """Follow a run's output; return the exit code of the command."""
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(RunPoller(run)) as poller:
        return _follow_lines(poller, query, log_output, console, default=default)
    return int(ExitCode.OK)


def _follow_lines(
    poller: RunPoller, query: LogQuery, log_output: _LogOutput, console: Console, *, default: bool
) -> int:
    failure_tails = FailureTails(query.ranks if default else None)
    first = poller.poll()

    def offset_s(node: str) -> float:
        return poller.state.clock_ahead_s(node)

    follower = LogFollower(poller.run.path, query, skew=offset_s)
    ends = read_failure_tails(
        poller.run.path, query, first.worker_exits, failure_tails, skew=poller.state.clock_ahead_s
    )
    past = merge_failure_lines(follower.history(), ends)
    log_output.state = poller.state
    log_output.write_history(past if query.tail is None else deque(past, maxlen=query.tail))
    for snapshot in poller.watch(lambda: _get_next_output_time(follower, log_output)):
        log_output.state = snapshot.state
        over = snapshot.attendance is RunAttendance.OVER
        for lines in follower.finish() if over else [follower.poll()]:
            log_output.write_new(lines)
        if over:
            log_output.write_new([], last=True)
        log_output.write_new(query.filter_lines(failure_tails.select_lines(snapshot.worker_exits)), last=over)
        if over:
            log_output.write_last_separators()
        if over or not console.out.has_reader():
            return int(ExitCode.OK)
    console.write_stderr(
        error_line(predict_unattended_run(poller.run, poller.state).describe_error(poller.run.run), console.err),
        *hint_lines(f"`clusterctl attach --adopt {poller.run.run}` starts a new controller", console.err),
    )
    return int(ExitCode.UNATTENDED)


def _get_next_output_time(follower: LogFollower, log_output: _LogOutput) -> float:
    """Return the latest time of the next poll, on the monotonic clock."""
    held = log_output.find_next_due_time()
    if follower.more:
        return time.monotonic()
    return math.inf if held is None else held


class _WorkerExits:
    """The exits of workers, from the journals of their nodes."""

    def __init__(self) -> None:
        self._exits: list[tuple[str, float, Exited]] = []

    def add_if_exit(self, news: StampedNodeEvent) -> None:
        """Record an event if the event is the exit of a worker."""
        node, stamp, event = news
        if isinstance(event, Exited):
            self._exits.append((node, stamp.wall, event))

    def list_on_head_clock(self, state: RunState) -> list[tuple[str, float, Exited]]:
        """Return node, time and event of each exit; times are on the clock of the head."""
        return [(node, wall - state.clock_ahead_s(node), event) for node, wall, event in self._exits]


def parse_existing_ranks(state: RunState, text: str | None) -> frozenset[int] | None:
    """Return the ranks of `--rank`, or `None` without the option.

    Raises:
        NotFoundError: The run has no such rank.
        click.BadParameter: The text is no set of ranks.
    """
    asked = parse_rank_set(text)
    there = {rank for _, _, ranks in state.placements for rank in ranks}
    if asked is None or not there or asked <= there:
        return asked
    strange = sorted(asked - there)
    raise NotFoundError(
        f"no rank {fold_ranks(strange)} in {state.run}", hint=f"its ranks are {fold_ranks(sorted(there))}"
    )


def validate_attempt(state: RunState, attempt: int | None) -> int | None:
    """Return the attempt of `--attempt`, or `None` for all attempts.

    Raises:
        NotFoundError: The run has no such attempt.
    """
    if attempt is not None and 0 <= state.attempt < attempt:
        there = f"its attempts are 0-{state.attempt}" if state.attempt else "its only attempt is 0"
        raise NotFoundError(f"no attempt {attempt} in {state.run}", hint=there)
    return attempt


def explain_missing_output(run: RunDir, state: RunState, query: LogQuery) -> str:
    """Return a text that says why `logs` has no lines to show."""
    if state.attempt < 0:
        return f"{run.run} has started no worker, so it has no output"
    wrote = sorted({rank for rank, size in _list_output_sizes(run, state) if size})
    if not wrote:
        return f"no rank of {run.run} has written anything"
    told = f"{plural(len(wrote), 'rank')} of {run.run} wrote something ({fold_ranks(wrote)})"
    if query.ranks is not None and not query.ranks & set(wrote):
        return f"rank {fold_ranks(sorted(query.ranks))} wrote nothing; {told}: `clusterctl logs {run.run} --all-ranks`"
    return f"no line matches the options; {told}"


def _list_output_sizes(run: RunDir, state: RunState) -> list[tuple[int, int]]:
    """Return the rank and the size of each output file of all attempts."""
    found = []
    for attempt, node, ranks in state.placements:
        for rank in ranks:
            path = run.node(node) / format_output_path(attempt, rank)
            found.append((rank, path.stat().st_size if path.exists() else 0))
    return found
