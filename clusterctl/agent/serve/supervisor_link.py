"""The agent's link to the supervisor of a run. The link starts a supervisor if none runs.

If a supervisor does not answer in time, the link kills it and starts another one. If the supervisor hangs in the
kernel, the controller gets an answer that says so.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.linux.event_loop import FrameChannel
from clusterctl.agent.node_state import supervisor_lock
from clusterctl.agent.processes import run_processes
from clusterctl.agent.protocol import command_messages, frames
from clusterctl.agent.supervisor import supervisor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.linux.proc import ProcessIdentity
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.frames import Message

    Answer = Callable[[Message], None]


_QUICK_COMMANDS = (command_messages.Command.STOP, command_messages.Command.FINISH)
_ANSWER_TIMEOUT_S = 10.0
"""Timeout in seconds for the answer to a request that the supervisor handles at once."""
_KILL_TIMEOUT_S = 3.0
_MAX_TRIES = 4
_FIRST_DELAY_S, _MAX_DELAY_S = 0.05, 5.0


@dataclass
class _Pending:
    command: command_messages.Command
    arguments: Any
    epoch: int | None
    on_answer: Answer
    tries: int = 0
    is_answered: bool = False

    def answer_once(self, message: Message) -> None:
        """Call `on_answer`, except if the request was answered before."""
        if not self.is_answered:
            self.is_answered = True
            self.on_answer(message)


class SupervisorLink:
    """Sends requests to the supervisor of a run. Starts a supervisor if none runs, and repeats unanswered requests."""

    def __init__(self, loop: EventLoop, run: RunDir, is_needed: Callable[[], bool]) -> None:
        """Make a link without a connection.

        Args:
            loop: The event loop of the session.
            run: The run.
            is_needed: Returns whether the run needs a supervisor even without an open request.
        """
        self._loop, self._run, self._is_needed = loop, run, is_needed
        self._channel: FrameChannel | None = None
        self._starting = False
        self._closed = False
        self._number = 0
        self._sent: dict[int, _Pending] = {}
        self._queue: list[_Pending] = []
        self._delay_s = _FIRST_DELAY_S
        self._failed_starts = 0

    def send_request(
        self, command: command_messages.Command, arguments: Mapping[str, object], epoch: int | None, on_answer: Answer
    ) -> None:
        """Send a command; `on_answer` gets the supervisor's answer, whose id this link has chosen."""
        pending = _Pending(command, arguments, epoch, on_answer)
        self._queue.append(pending)
        if command in _QUICK_COMMANDS:
            self._loop.call_later(_ANSWER_TIMEOUT_S, lambda: self._kill_overdue(pending))
        self.ensure_supervisor()
        self._send_queue()

    def send_without_answer(
        self, command: command_messages.Command, arguments: Mapping[str, object], epoch: int | None
    ) -> None:
        """Send a command that has no answer; do nothing if no supervisor is connected."""
        if self._channel is not None:
            self._channel.send(command_messages.make_request(0, command, arguments, epoch))

    def ensure_supervisor(self) -> None:
        """Connect to the supervisor, or start one if none runs."""
        if self._channel is None and not self._starting and not self._closed and not self._connect():
            self._start()

    def close(self) -> None:
        """Close the connection; the supervisor continues."""
        self._closed = True
        if self._channel is not None:
            self._channel.close("")

    def _connect(self) -> bool:
        """Connect to the supervisor, or try again later if it is busy; return whether a supervisor exists."""
        try:
            sock = supervisor_lock.connect_to_supervisor(self._run)
        except BlockingIOError:
            self._retry_later()
            return True
        if sock is None:
            return False
        uid = syscalls.read_peer_credentials(sock)[1]
        if uid != os.getuid():
            sock.close()
            self._answer_queue_with_error(f"uid {uid} listens on the supervisor's socket of run {self._run.run}")
            return True
        fd = sock.detach()
        self._channel = FrameChannel(self._loop, fd, fd, self._receive_answer, self._handle_disconnect)
        self._failed_starts = 0
        self._send_queue()
        return True

    def _send_queue(self) -> None:
        while self._channel is not None and self._queue:
            pending = self._queue.pop(0)
            pending.tries += 1
            self._number += 1
            self._sent[self._number] = pending
            self._channel.send(
                command_messages.make_request(self._number, pending.command, pending.arguments, pending.epoch)
            )

    def _receive_answer(self, frame: frames.Frame) -> None:
        if isinstance(frame, dict):
            self._delay_s = _FIRST_DELAY_S
            pending = self._sent.pop(frame.get("id", 0), None)
            if pending is not None:
                pending.answer_once(frame)

    def _handle_disconnect(self, _why: str) -> None:
        """Queue the open requests for the next supervisor, because this supervisor has ended."""
        self._channel = None
        resent = [self._sent[number] for number in sorted(self._sent)]
        self._sent.clear()
        for pending in resent:
            if pending.tries >= _MAX_TRIES:
                pending.answer_once(
                    command_messages.make_failed_error(
                        f"the supervisor ended {_MAX_TRIES} times{self._read_last_log_line()}"
                    ).make_answer(0)
                )
        self._queue[:0] = [pending for pending in resent if not pending.is_answered]
        if not self._closed and (self._queue or self._is_needed()):
            self._retry_later()

    def _retry_later(self) -> None:
        def retry() -> None:
            self._starting = False
            if self._queue or self._is_needed():
                self.ensure_supervisor()

        if not self._starting:
            self._starting = True
            self._loop.call_later(self._delay_s, retry)
            self._delay_s = min(self._delay_s * 2, _MAX_DELAY_S)

    # --- a supervisor that does not answer

    def _kill_overdue(self, pending: _Pending) -> None:
        """Kill the supervisor if it has not answered in time; the next supervisor adopts the run."""
        if pending.is_answered or self._closed:
            return
        supervisor = run_processes.find_supervisor(self._run)
        if supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(supervisor.pid, signal.SIGKILL)
        self._loop.call_later(_KILL_TIMEOUT_S, lambda: self._report_stuck(pending, supervisor))

    def _report_stuck(self, pending: _Pending, supervisor: ProcessIdentity | None) -> None:
        """Answer with an error if the supervisor has survived SIGKILL; if not, wait for the next supervisor."""
        if pending.is_answered or self._closed:
            return
        if supervisor is None or not proc.is_alive(supervisor):
            self._loop.call_later(_ANSWER_TIMEOUT_S, lambda: self._kill_overdue(pending))
            return
        kernel_function = proc.read_wait_channel(supervisor.pid)
        stuck = f"the supervisor of run {self._run.run} is stuck in the kernel" + (
            f" in {kernel_function}" if kernel_function else ""
        )
        if pending.command is command_messages.Command.STOP:
            pending.answer_once(command_messages.make_answer(0, {"why": stuck}))
        else:
            pending.answer_once(
                command_messages.make_failed_error(
                    stuck,
                    "repair the file server or device for which it waits, or restart the machine",
                ).make_answer(0)
            )

    # --- the start of a supervisor

    def _start(self) -> None:
        self._starting = True
        try:
            _, fd = supervisor.fork_supervisor(self._run)
        except OSError as error:
            self._starting = False
            self._answer_queue_with_error(f"cannot start a supervisor: {error.strerror}")
            return
        self._loop.on_readable(fd, lambda: self._read_start_report(fd))

    def _read_start_report(self, fd: int) -> None:
        report = os.read(fd, 64)
        self._loop.remove_descriptor(fd)
        os.close(fd)
        self._starting = False
        if not report:
            self._failed_starts += 1
            if self._failed_starts >= _MAX_TRIES:
                self._answer_queue_with_error(
                    f"the supervisor ended at its start {_MAX_TRIES} times{self._read_last_log_line()}"
                )
                self._failed_starts = 0
            if self._queue or self._is_needed():
                self._retry_later()
        elif not self._connect():
            # Another supervisor had the lock and has just ended.
            self._retry_later()

    def _read_last_log_line(self) -> str:
        lines = syscalls.read_or_empty(self._run.log_file).decode("utf-8", "replace").strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def _answer_queue_with_error(self, message: str) -> None:
        queue, self._queue = self._queue, []
        for pending in queue:
            with contextlib.suppress(OSError):
                pending.answer_once(command_messages.make_failed_error(message).make_answer(0))
