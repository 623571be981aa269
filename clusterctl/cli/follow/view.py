"""Shows a live run: steps, output and end. It reads files, and wakes up for changes and pressed keys."""

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

from clusterctl.cli.follow.backlog import Backlog, JournalPosition, list_current_problems
from clusterctl.cli.follow.event_messages import EventFormatter, StragglerNotice
from clusterctl.cli.follow.exit_report import ExitReason, list_next_commands
from clusterctl.cli.follow.keyboard import catch_signals, open_keyboard, read_keys
from clusterctl.cli.follow.poller import RunPoller, RunStatus, Snapshot
from clusterctl.formatting import plural
from clusterctl.logs.failure_tails import FailureTails, choose_default_ranks
from clusterctl.logs.fold import FoldedLine, LineFolder, fold_history
from clusterctl.logs.follow import Follower
from clusterctl.logs.line import LogLine, LogQuery
from clusterctl.render import run_messages
from clusterctl.render.attempts import render_separator
from clusterctl.render.end_report import OutputTail, VisibleOutput
from clusterctl.render.footer import Footer
from clusterctl.render.live_view import LiveView, ProgressMode, phase_view
from clusterctl.render.log_output import LogWriter, Timestamps
from clusterctl.render.status import render_timings
from clusterctl.run.controller import control_socket
from clusterctl.run.record.run_facts import read_start_times
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.state import RunPhase, RunState

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_REDRAW = 0.1
_SILENT = 5.0
_ALIKE = 60.0
"""Ranks that end alike within so many seconds are shown as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewOptions:
    """The choices for the view of a run.

    Attributes:
        ranks: Show these in full; `None` for the default view (rank 0, and the last lines of failed ranks).
        all_ranks: Show all ranks in full.
        stops_on_interrupt: This is the `up` that started the run: Ctrl-C stops it.
        until_started: Leave once every rank has started (`up -d`).
        timings: Show the times of the start's steps, once it is over.
        output: Show output of workers.
        verbose: Name every node that the start waits for, and show each report of a node.
        position: Events up to this position are old and are not shown (`backlog.read_journal_position`). If `None`,
            all events of the first poll are old; they are shown with their dates, among the output of the same time.
    """

    ranks: frozenset[int] | None = None
    nodes: frozenset[str] | None = None
    all_ranks: bool = False
    timestamps: Timestamps = Timestamps.NONE
    progress: ProgressMode = ProgressMode.AUTO
    stops_on_interrupt: bool = False
    until_started: bool = False
    timings: bool = False
    output: bool = True
    tail: int | None = None
    phases: bool = True
    verbose: bool = False
    position: JournalPosition | None = None


class RunScreen:
    """The view of one run, until the run ends or the user detaches."""

    def __init__(self, run: RunDir, console: Console, options: ViewOptions) -> None:
        self._run, self._console, self._options = run, console, options
        self._poller = RunPoller(run)
        self._live = LiveView(console, mode=options.progress, every=options.verbose)
        self._log = LogWriter(console.out, timestamps=options.timestamps)
        self._last = OutputTail()
        self._follower: Follower | None = None
        self._folder = LineFolder()
        self._ends = FailureTails(self._shown_ranks())
        self._interrupts = 0
        self._exit_reason: ExitReason | None = None
        self._events = EventFormatter(run, console.err)
        self._stragglers = StragglerNotice(run)
        self._may_be_silent = options.stops_on_interrupt and options.output and not self._is_watched
        self._is_stdin_closed = False
        self._is_first_poll = True
        self._backlog = Backlog()
        self._footer = Footer(run, self._live, console.out)
        self._timed = not options.timings
        self._held_tails: list[LogLine] = []

    @property
    def state(self) -> RunState:
        """The state of the run, as of the last poll."""
        return self._poller.state

    @property
    def visible_output(self) -> VisibleOutput:
        """The output above the final report, if both go to one terminal or one file (`2>&1 | tee`)."""
        if not self._console.in_one_place or not self._options.output:
            return VisibleOutput()
        ranks = self._shown_ranks()
        return VisibleOutput(
            ranks=frozenset(self.state.workers) if ranks is None else ranks, lines=self._last.of(self.state.attempt)
        )

    @property
    def _is_watched(self) -> bool:
        """Whether stdout and stderr are live terminals."""
        return self._console.out.live and self._console.err.live

    def follow(self) -> ExitReason:
        """Show the run; return why the view ended."""
        try:
            with open_keyboard(enabled=sys.stdin.isatty() and sys.stderr.isatty()) as keyboard, catch_signals() as wake:
                self._follow(keyboard, wake)
        except Exception:
            # The run goes on although its view failed: tell the user how to reach it.
            self._narrate(*list_next_commands(self._run))
            raise
        self._console.out.clear()
        if self._exit_reason is not ExitReason.ENDED or not self._is_watched:
            self._show_ends()
        self._live.close()
        self._poller.close()
        return self._exit_reason or ExitReason.DETACHED

    def _follow(self, keyboard: int | None, wake: int) -> None:
        while self._exit_reason is None:
            self._show(self._poller.poll(), wake)
            if self._exit_reason is None:
                self._narrate(*self._stragglers.format_notice(self.state, time.monotonic()))
                self._note_silence()
                self._wait(keyboard, wake)
                self._live.tick(time.monotonic())
                self._draw_footer(has_keys=keyboard is not None and not self._is_stdin_closed)

    # --- snapshots

    def _show(self, snapshot: Snapshot, wake: int) -> None:
        if self._is_first_poll:
            snapshot = self._join(snapshot)
        self._held_tails += self._ends.select_lines(snapshot.exits) if self._options.output else []
        for moment, event in snapshot.heads:
            self._show_event(moment, event)
        if self._options.output:
            self._show_output()
        for node, stamp, told in snapshot.nodes:
            if self._options.verbose and (step := run_messages.node_step_message(told)):
                self._narrate(f"{node}: {step}")
            self._narrate(*self._events.format_node_event(node, stamp, told, self.state))
        if snapshot.status is RunStatus.OVER:
            self._finish(wake)
        elif self._options.until_started and self._all_started():
            self._exit_reason = ExitReason.STARTED
        elif self._options.output and not self._console.out.has_reader():
            self._exit_reason = ExitReason.DETACHED
        elif snapshot.status is RunStatus.UNATTENDED:
            self._exit_reason = ExitReason.UNATTENDED

    def _all_started(self) -> bool:
        state = self.state
        return state.attempt >= 0 and self._timed and all(w.pid is not None for w in state.workers.values())

    def _finish(self, wake: int) -> None:
        """Show the rest of the output of an ended run; a signal skips it."""
        self._exit_reason = ExitReason.ENDED
        if not self._options.output or (follower := self._open_follower()) is None:
            return
        for lines in follower.finish():
            self._write(self._folder.feed(lines, time.monotonic()))
            if select.select([wake], [], [], 0)[0]:
                self._narrate(f"the rest of the output: `clusterctl logs {self._run.run}`")
                return
        self._write(self._folder.flush())

    def _join(self, snapshot: Snapshot) -> Snapshot:
        """Return the new part of the first snapshot; put the old part into the backlog."""
        self._is_first_poll = False
        if self._options.stops_on_interrupt:
            return snapshot
        state, old = self.state, self._options.position
        self._events.mark_unreachable_nodes(state)
        if old is not None:
            fresh = [news for news in snapshot.nodes if news[1].seq > old.nodes.get(news[0], 0)]
            return replace(snapshot, heads=snapshot.heads[old.heads :], nodes=fresh)
        for moment, event in snapshot.heads:
            for text in self._events.format_old_event(moment, event, state):
                self._backlog.add(moment, text)
        for node, stamp, told in snapshot.nodes:
            for text in self._events.format_node_event(node, stamp, told, state):
                self._backlog.add(stamp.wall - state.ahead(node), text)
        ends = self._ends.select_lines(snapshot.exits) if self._options.output else []
        self._backlog.add_failure_tails([line for line in ends if line.attempt < state.attempt])
        self._held_tails += [line for line in ends if line.attempt >= state.attempt]
        if state.attempt < 0:
            self._show_past([])
        return replace(snapshot, heads=[], nodes=[])

    def _show_past(self, history: Sequence[LogLine]) -> None:
        """Show earlier lines with the events between them, then the current problems."""
        for piece in self._backlog.merge_with_lines(history, self._options.tail or 0):
            if isinstance(piece, str):
                self._write(self._folder.flush())
                self._console.narrate(render_separator(piece, self._console.err))
            else:
                self._write(self._folder.feed(piece, time.monotonic()))
        self._narrate(*list_current_problems(self.state, time.time()))

    def _show_event(self, moment: float, event: controller_events.ControllerEvent) -> None:
        if isinstance(event, controller_events.Phase) and self._options.phases:
            self._live.update(phase_view(event), time.monotonic())
            self._show_timings(event)
        if isinstance(event, controller_events.Restarting):
            self._show_ends()
        self._narrate(*self._events.format(moment, event, self.state))

    def _show_timings(self, event: controller_events.Phase) -> None:
        if not self._timed and event.ended and (event.name == "start" or event.failed):
            self._timed = True
            times = read_start_times(self._run)
            self._narrate(*(() if times is None else render_timings(times, self._console.err)))

    def _show_ends(self) -> None:
        """Show the last lines of failed ranks, which the final report may not show."""
        held, self._held_tails = self._held_tails, []
        if held:
            self._show_output()
            self._write([*self._folder.flush(), *fold_history(held, window=_ALIKE)])

    def _narrate(self, *texts: str) -> None:
        if texts:
            self._live.note(*texts)

    # --- output

    def _shown_ranks(self) -> frozenset[int] | None:
        if self._options.all_ranks:
            return None
        return self._options.ranks if self._options.ranks is not None else choose_default_ranks(1)

    def _show_output(self) -> None:
        if (follower := self._open_follower()) is not None:
            self._write(self._folder.feed(follower.poll(), time.monotonic()))

    def _open_follower(self) -> Follower | None:
        """Return the follower of the output, or `None` before the first attempt. The first call shows the history."""
        state = self.state
        if self._follower is None and state.attempt >= 0:
            ranks = self._shown_ranks()
            query = LogQuery(ranks=ranks, nodes=self._options.nodes, tail=self._options.tail)
            skew = lambda node: self.state.ahead(node)  # noqa: E731, PLW0108 - of the newest state
            follower = Follower(self._run.path, query, skew=skew)
            history = [] if self._options.tail is None else list(follower.history())
            self._follower = follower
            self._log.expect(list(state.nodes), state.workers.keys() if ranks is None else ranks)
            self._folder = LineFolder(frozenset(state.workers) if ranks is None else ranks)
            self._show_past(history)
        return self._follower

    def _silent_for(self) -> float | None:
        """Return the seconds of ranks without output so far; `None` after the notice or if the footer shows it."""
        since = self.state.running_since
        runs = self._may_be_silent and self.state.phase is RunPhase.RUNNING
        return time.time() - since if runs and since is not None else None

    def _note_silence(self) -> None:
        """Report once that ranks run without output, unless the footer shows it: importing torch may take 15 s."""
        silent = self._silent_for()
        if silent is not None and silent >= _SILENT:
            self._may_be_silent = False
            self._narrate(f"no output yet: {plural(len(self.state.workers), 'rank')} up, probably importing")

    def _write(self, lines: Sequence[LogLine | FoldedLine]) -> None:
        if lines:
            self._may_be_silent = False
            self._live.close()
            self._log.write(lines)
            self._last.add(lines)
            self._footer.wrote(bar=lines[-1].partial)

    def _draw_footer(self, *, has_keys: bool) -> None:
        """Draw the footer, unless a step of the start uses the last line."""
        wanted = self._options.output and self._options.progress in (ProgressMode.AUTO, ProgressMode.TTY)
        if wanted and self._exit_reason is None and self._is_watched and not self._live.has_phase:
            self._footer.draw(self.state, self._shown_ranks(), owns=self._options.stops_on_interrupt, keys=has_keys)

    # --- waiting

    def _wait(self, keyboard: int | None, wake: int) -> None:
        keyboard = None if self._is_stdin_closed else keyboard
        others = [wake] if keyboard is None else [keyboard, wake]
        ready = self._poller.wait_for_change(*others, until=self._due())
        if wake in ready:
            for number in os.read(wake, 64):
                if number == signal.SIGHUP:
                    self._exit_reason = ExitReason.DETACHED
                elif number in (signal.SIGINT, signal.SIGTERM):
                    self._interrupted()
        if keyboard is not None and keyboard in ready:
            data = read_keys(keyboard)
            if data[:1] in (b"d", b"\x04"):
                self._exit_reason = ExitReason.DETACHED
            self._is_stdin_closed = not data

    def _due(self) -> float:
        """Return the latest time of the next poll, on the monotonic clock."""
        now = time.monotonic()
        if self._follower is not None and self._follower.more:
            return now
        waits_for_history = self._follower is None and self._options.tail is not None
        due = now + _REDRAW if waits_for_history or self.state.attempt < 0 else math.inf
        if (silent := self._silent_for()) is not None:
            due = min(due, now + max(0.0, _SILENT - silent))
        held = self._folder.find_next_due_time()
        return due if held is None else min(due, held)

    def _interrupted(self) -> None:
        if not self._options.stops_on_interrupt:
            self._exit_reason = ExitReason.DETACHED
            return
        self._interrupts += 1
        kill = self._interrupts > 1
        try:
            answer = control_socket.send_request(self._run, "down", {"kill": kill}, timeout=5.0)
        except control_socket.NoControllerError:
            self._exit_reason = ExitReason.UNATTENDED
            return
        if kill:
            self._narrate("killing now")
        else:
            self._narrate(
                f"stopping {self._run.run}: SIGTERM, {answer.get('grace', 0):g} s grace, SIGKILL · again to kill now"
            )
