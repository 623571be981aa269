"""Shows an active run on the terminal: the steps of its start, its output and its end."""

from __future__ import annotations

import math
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from clusterctl.cli.follow.event_backlog import EventBacklog, JournalPosition, list_current_problems
from clusterctl.cli.follow.event_messages import EventFormatter, StragglerMonitor
from clusterctl.cli.follow.exit_report import FollowEndReason, list_next_commands
from clusterctl.cli.follow.keyboard import catch_signals, open_keyboard, read_keys
from clusterctl.cli.follow.poller import RunAttendance, RunPoller, RunSnapshot
from clusterctl.formatting import plural
from clusterctl.logs.failure_tails import FailureTails
from clusterctl.logs.fold import FoldedLine, LineFolder, fold_history
from clusterctl.logs.follow import LogFollower
from clusterctl.logs.log_line import LogLine, LogQuery
from clusterctl.render import run_messages
from clusterctl.render.attempt_table import render_separator
from clusterctl.render.end_report import OutputTail, VisibleOutput
from clusterctl.render.live_footer import Footer
from clusterctl.render.log_output import LogWriter, Timestamps
from clusterctl.render.start_progress import ProgressMode, StartProgressView, make_phase_progress
from clusterctl.render.status_report import render_timings
from clusterctl.run.controller import control_socket
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.start_durations import read_start_times
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunPhase, RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_REDRAW_S = 0.1
_SILENCE_NOTICE_S = 5.0
_SAME_EXIT_WINDOW_S = 60.0
"""Seconds within which equal last lines of several failed ranks are shown once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScreenOptions:
    """Options of `RunScreen`.

    Attributes:
        ranks: The ranks whose whole output is shown; `None` means rank 0, and the last lines of failed ranks.
        all_ranks: Whether to show the whole output of all ranks.
        stops_on_interrupt: Whether Ctrl-C stops the run, as in `up`; otherwise Ctrl-C detaches.
        until_started: Whether the screen ends after every rank has started, or while the run waits in line (`up -d`).
        shows_timings: Whether to show, after the start, the time of each step of the start.
        shows_output: Whether to show output of workers.
        verbose: Whether to name every node for which the start waits, and to show the steps of each node.
        skip_events_until: The position (`event_backlog.read_journal_position`) up to which events are not shown. With
            `None`, the events of the first poll are shown with dates, among the output of the same time.
    """

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    all_ranks: bool = False
    timestamps: Timestamps = Timestamps.NONE
    progress: ProgressMode = ProgressMode.AUTO
    stops_on_interrupt: bool = False
    until_started: bool = False
    shows_timings: bool = False
    shows_output: bool = True
    tail: int | None = None
    shows_phases: bool = True
    verbose: bool = False
    skip_events_until: JournalPosition | None = None


class RunScreen:
    """Shows one run until the run ends or the user detaches."""

    def __init__(self, run: RunDir, console: Console, options: ScreenOptions) -> None:
        self._run, self._console, self._options = run, console, options
        self._poller = RunPoller(run)
        self._live_view = StartProgressView(console, mode=options.progress, name_all_nodes=options.verbose)
        self._log_writer = LogWriter(console.out, timestamps=options.timestamps)
        self._output_tail = OutputTail()
        self._follower: LogFollower | None = None
        self._folder = LineFolder()
        self._failure_tails = FailureTails(self._get_visible_ranks())
        self._interrupts = 0
        self._end_reason: FollowEndReason | None = None
        self._event_formatter = EventFormatter(run, console.err)
        self._stragglers = StragglerMonitor(run)
        self._may_report_silence = options.stops_on_interrupt and options.shows_output and not self._is_live_terminal
        self._is_stdin_closed = False
        self._is_first_poll = True
        self._backlog = EventBacklog()
        self._footer = Footer(run, self._live_view, console.out)
        self._are_timings_shown = not options.shows_timings
        self._pending_tails: list[LogLine] = []

    @property
    def state(self) -> RunState:
        """The state of the run at the last poll."""
        return self._poller.state

    @property
    def visible_output(self) -> VisibleOutput:
        """The output above the final report, if both are in one terminal or one file (`2>&1 | tee`)."""
        if not self._console.is_one_stream or not self._options.shows_output:
            return VisibleOutput()
        ranks = self._get_visible_ranks()
        return VisibleOutput(
            ranks=frozenset(self.state.workers) if ranks is None else ranks,
            lines=self._output_tail.lines_of_attempt(self.state.attempt),
        )

    @property
    def _is_live_terminal(self) -> bool:
        """Whether stdout and stderr are live terminals."""
        return self._console.out.live and self._console.err.live

    def follow(self) -> FollowEndReason:
        """Show the run until it ends or the user detaches; return the reason of the end."""
        try:
            with open_keyboard(enabled=sys.stdin.isatty() and sys.stderr.isatty()) as keyboard, catch_signals() as wake:
                self._follow_until_end(keyboard, wake)
        except Exception:
            # The run continues although this screen failed, so show the user how to follow the run again.
            self._narrate(*list_next_commands(self._run))
            raise
        self._console.out.clear()
        if self._end_reason is not FollowEndReason.ENDED or not self._is_live_terminal:
            self._show_failure_tails()
        self._live_view.close()
        self._poller.close()
        return self._end_reason or FollowEndReason.DETACHED

    def _follow_until_end(self, keyboard: int | None, wake: int) -> None:
        while self._end_reason is None:
            self._show_snapshot(self._poller.poll(), wake)
            if self._end_reason is None:
                self._narrate(*self._stragglers.describe_new_stragglers(self.state, time.monotonic()))
                self._report_silence()
                self._wait_for_change_or_input(keyboard, wake)
                self._live_view.tick(time.monotonic())
                self._draw_footer(has_keys=keyboard is not None and not self._is_stdin_closed)

    # --- snapshots

    def _show_snapshot(self, snapshot: RunSnapshot, wake: int) -> None:
        if self._is_first_poll:
            snapshot = self._skip_old_events(snapshot)
        self._pending_tails += (
            self._failure_tails.select_lines(snapshot.worker_exits) if self._options.shows_output else []
        )
        for moment, event in snapshot.new_controller_events:
            self._show_event(moment, event)
        if self._options.shows_output:
            self._show_output()
        for node, stamp, node_event in snapshot.new_node_events:
            if self._options.verbose and (step := run_messages.verbose_node_event_message(node_event)):
                self._narrate(f"{node}: {step}")
            self._narrate(*self._event_formatter.format_node_event(node, stamp, node_event, self.state))
        if snapshot.attendance is RunAttendance.OVER:
            self._show_remaining_output(wake)
        elif self._options.until_started and (self._all_started() or self.state.phase is RunPhase.WAITING):
            self._end_reason = FollowEndReason.STARTED
        elif self._options.shows_output and not self._console.out.has_reader():
            self._end_reason = FollowEndReason.DETACHED
        elif snapshot.attendance is RunAttendance.UNATTENDED:
            self._end_reason = FollowEndReason.UNATTENDED

    def _all_started(self) -> bool:
        state = self.state
        return state.attempt >= 0 and self._are_timings_shown and all(w.pid is not None for w in state.workers.values())

    def _show_remaining_output(self, wake: int) -> None:
        """Show the remaining output of an ended run; a signal skips this output."""
        self._end_reason = FollowEndReason.ENDED
        if not self._options.shows_output or (follower := self._open_follower()) is None:
            return
        for lines in follower.finish():
            self._write(self._folder.feed(lines, time.monotonic()))
            if select.select([wake], [], [], 0)[0]:
                self._narrate(f"the remaining output: `clusterctl logs {self._run.run}`")
                return
        self._write(self._folder.flush())

    def _skip_old_events(self, snapshot: RunSnapshot) -> RunSnapshot:
        """Return the first snapshot with its new events only; add its old events to the backlog."""
        self._is_first_poll = False
        if self._options.stops_on_interrupt:
            return snapshot
        state, old = self.state, self._options.skip_events_until
        self._event_formatter.mark_unreachable_as_reported(state)
        if old is not None:
            fresh = [news for news in snapshot.new_node_events if news[1].seq > old.last_seq_by_node.get(news[0], 0)]
            return replace(
                snapshot,
                new_controller_events=snapshot.new_controller_events[old.controller_event_count :],
                new_node_events=fresh,
            )
        for moment, event in snapshot.new_controller_events:
            for text in self._event_formatter.format_past_event(moment, event, state):
                self._backlog.add_event(moment, text)
        for node, stamp, node_event in snapshot.new_node_events:
            for text in self._event_formatter.format_node_event(node, stamp, node_event, state):
                self._backlog.add_event(stamp.wall - state.clock_ahead_s(node), text)
        ends = self._failure_tails.select_lines(snapshot.worker_exits) if self._options.shows_output else []
        self._backlog.add_failure_tails([line for line in ends if line.attempt < state.attempt])
        self._pending_tails += [line for line in ends if line.attempt >= state.attempt]
        if state.attempt < 0:
            self._show_history([])
        return replace(snapshot, new_controller_events=[], new_node_events=[])

    def _show_history(self, history: Sequence[LogLine]) -> None:
        """Show earlier output lines and events, then the current problems."""
        for piece in self._backlog.merge_with_output(history, self._options.tail or 0):
            if isinstance(piece, str):
                self._write(self._folder.flush())
                self._console.write_stderr(render_separator(piece, self._console.err))
            else:
                self._write(self._folder.feed(piece, time.monotonic()))
        self._narrate(*list_current_problems(self.state, time.time()))

    def _show_event(self, moment: float, event: controller_events.ControllerEvent) -> None:
        if isinstance(event, controller_events.StartStepProgress) and self._options.shows_phases:
            self._live_view.update(make_phase_progress(event), time.monotonic())
            self._show_timings(event)
        if isinstance(event, controller_events.RestartPlanned):
            self._show_failure_tails()
        self._narrate(*self._event_formatter.format_controller_event(moment, event, self.state))

    def _show_timings(self, event: controller_events.StartStepProgress) -> None:
        if not self._are_timings_shown and event.ended and (event.name == "start" or event.failed):
            self._are_timings_shown = True
            times = read_start_times(self._run)
            self._narrate(*(() if times is None else render_timings(times, self._console.err)))

    def _show_failure_tails(self) -> None:
        """Show the last output lines of failed ranks, because the final report may not contain them."""
        held, self._pending_tails = self._pending_tails, []
        if held:
            self._show_output()
            self._write([*self._folder.flush(), *fold_history(held, window=_SAME_EXIT_WINDOW_S)])

    def _narrate(self, *texts: str) -> None:
        if texts:
            self._live_view.note(*texts)

    # --- output

    def _get_visible_ranks(self) -> frozenset[int] | None:
        if self._options.all_ranks:
            return None
        firsts = frozenset({0, *self.state.first_ranks.values()})
        return firsts if self._options.ranks is None else self._options.ranks

    def _show_output(self) -> None:
        if (follower := self._open_follower()) is not None:
            self._write(self._folder.feed(follower.poll(), time.monotonic()))

    def _open_follower(self) -> LogFollower | None:
        """Return the reader of new output lines, or `None` before the first attempt.

        The first call of this method shows earlier output.
        """
        state = self.state
        if self._follower is None and state.attempt >= 0:
            ranks = self._get_visible_ranks()
            query = LogQuery(ranks=ranks, nodes=self._options.nodes, tail=self._options.tail)
            skew = lambda node: self.state.clock_ahead_s(node)  # noqa: E731, PLW0108 - reads the newest state
            follower = LogFollower(self._run.path, query, skew=skew)
            history = [] if self._options.tail is None else list(follower.history())
            self._follower = follower
            labels = {name: node.label for name, node in state.nodes.items()}
            self._log_writer.widen_prefix(list(state.nodes), state.workers.keys() if ranks is None else ranks, labels)
            self._folder = LineFolder(frozenset(state.workers) if ranks is None else ranks)
            self._failure_tails = FailureTails(ranks)
            self._show_history(history)
        return self._follower

    def _get_silence_s(self) -> float | None:
        """Return the seconds for which ranks have run without output; `None` if there is nothing to report."""
        since = self.state.running_since
        runs = self._may_report_silence and self.state.phase is RunPhase.RUNNING
        return time.time() - since if runs and since is not None else None

    def _report_silence(self) -> None:
        """Report once that ranks run without output, for example because importing torch may take 15 s."""
        silent = self._get_silence_s()
        if silent is not None and silent >= _SILENCE_NOTICE_S:
            self._may_report_silence = False
            self._narrate(f"no output yet: {plural(len(self.state.workers), 'rank')} running, probably importing")

    def _write(self, lines: Sequence[LogLine | FoldedLine]) -> None:
        if lines:
            self._may_report_silence = False
            self._live_view.close()
            self._log_writer.write(lines)
            self._output_tail.add(lines)
            self._footer.note_output(bar=lines[-1].partial)

    def _draw_footer(self, *, has_keys: bool) -> None:
        """Draw the footer, unless a step of the start uses the last line."""
        wanted = self._options.shows_output and self._options.progress in (ProgressMode.AUTO, ProgressMode.TTY)
        if wanted and self._end_reason is None and self._is_live_terminal and not self._live_view.has_phase:
            self._footer.draw(
                self.state, self._get_visible_ranks(), stops_run=self._options.stops_on_interrupt, accepts_keys=has_keys
            )

    # --- waiting

    def _wait_for_change_or_input(self, keyboard: int | None, wake: int) -> None:
        keyboard = None if self._is_stdin_closed else keyboard
        others = [wake] if keyboard is None else [keyboard, wake]
        ready = self._poller.wait_for_change(*others, until=self._get_next_poll_time())
        if wake in ready:
            for number in os.read(wake, 64):
                if number == signal.SIGHUP:
                    self._end_reason = FollowEndReason.DETACHED
                elif number in (signal.SIGINT, signal.SIGTERM):
                    self._stop_or_detach()
        if keyboard is not None and keyboard in ready:
            data = read_keys(keyboard)
            if data[:1] in (b"d", b"\x04"):
                self._end_reason = FollowEndReason.DETACHED
            self._is_stdin_closed = not data

    def _get_next_poll_time(self) -> float:
        """Return the latest time of the next poll, on the monotonic clock."""
        now = time.monotonic()
        if self._follower is not None and self._follower.more:
            return now
        waits_for_history = self._follower is None and self._options.tail is not None
        due = now + _REDRAW_S if waits_for_history or self.state.attempt < 0 else math.inf
        if (silent := self._get_silence_s()) is not None:
            due = min(due, now + max(0.0, _SILENCE_NOTICE_S - silent))
        held = self._folder.find_next_due_time()
        return due if held is None else min(due, held)

    def _stop_or_detach(self) -> None:
        if not self._options.stops_on_interrupt:
            self._end_reason = FollowEndReason.DETACHED
            return
        self._interrupts += 1
        kill = self._interrupts > 1
        try:
            answer = control_socket.send_request(self._run, "down", {"kill": kill}, timeout=5.0)
        except control_socket.NoControllerError:
            self._end_reason = FollowEndReason.UNATTENDED
            return
        if kill:
            self._narrate("killing now")
        else:
            self._narrate(
                f"stopping {self._run.run}: SIGTERM, {answer.get('grace', 0):g} s grace, SIGKILL · Ctrl-C again kills"
            )
