"""Sends the messages of a run, in a thread for each target that reads the journal of the controller.

The thread shares nothing with the loop, so a target that hangs delays no decision. Each target has a journal in the run
directory: `sending` is on the disk before the message leaves, and the result follows. Another controller of the run
reads the same events and these journals. It sends what was not sent, and repeats what has no result.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from clusterctl.agent.protocol.frames import FrameError
from clusterctl.config.spec import ClusterSpec
from clusterctl.run.controller.message_delivery import DeliveryError, deliver, list_targets, read_url
from clusterctl.run.record.disk_files import LineFile
from clusterctl.run.record.head_clock import read_head_time
from clusterctl.run.record.rundir import VERDICT_TEXT, RunDir
from clusterctl.run.record.state_reader import LineTail
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.notification import NEVER_LEFT_OUT, Message, MessageEvent, MessageFold

_POLL_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0
_GIVE_UP_AFTER_S = 600.0
"""Seconds of failed tries after which a message is given up, while the run lasts."""
_AFTER_END_S = 60.0
"""Seconds for which the controller stays after the end of its run, for messages that are not delivered yet."""
_VERDICT_WAIT_S = 8.0
"""Seconds that the message about a stall waits for the verdict."""
_CLOCK_ERROR_S = 1.0
"""The largest difference between the clock of events and the times of files."""
_MINUTE_S = 60.0
_RESERVE_BYTES = 16 * 1024


class Notifier:
    """The messages of a run, to all targets.

    Args:
        run: The run directory.
        spec: The spec of the run.
        note: Records a warning about a message that was given up. It does not wait.
    """

    def __init__(self, run: RunDir, spec: ClusterSpec, note: Callable[[str], object]) -> None:
        self._threads: list[threading.Thread] = []
        self._end = _RunEnd()
        for target in list_targets(spec.notify):
            work = _TargetMessages(run, spec, target, note, self._end).send_all
            self._threads.append(threading.Thread(target=work, name=f"notify-{target}", daemon=True))

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait for the last messages after the end of the run, for a limited time."""
        self._end.give_up_at = time.monotonic() + _AFTER_END_S
        self._end.reached.set()
        for thread in self._threads:
            thread.join(max(0.0, self._end.give_up_at - time.monotonic()))


class _RunEnd:
    """The end of the run, as all threads see it. `give_up_at` is on the monotonic clock."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.give_up_at = float("inf")


class _TargetMessages:
    """The messages to one target, in order. All methods run in the thread of the target."""

    def __init__(
        self, run: RunDir, spec: ClusterSpec, target: str, note: Callable[[str], object], end: _RunEnd
    ) -> None:
        self._run, self._spec, self._target, self._url = run, spec, target, ""
        self._note, self._end = note, end
        path = run.path / f"notify-{target}.jsonl"
        self._results = _read_results(LineTail(path).read_new_lines())
        self._journal = LineFile(path, _RESERVE_BYTES)
        self._sent_at: deque[float] = deque(maxlen=spec.notify.max_per_minute)
        self._left_out = 0
        self._has_noted = False

    def send_all(self) -> None:
        """Send the messages until the run has ended. An unexpected error ends only the messages to this target."""
        try:
            if self._target != "command":
                # The file of the URL may lie on a mount that hangs.
                self._url = read_url(self._spec.notify.addresses[self._target], os.environ)
            events, fold = LineTail(self._run.events), MessageFold(self._run.run)
            is_over = False
            while not is_over:
                # If the end was reached before the journal is read, the journal is complete.
                is_over = self._end.reached.wait(_POLL_S)
                for line in events.read_new_lines():
                    self._send_message_about(line, fold)
        except DeliveryError as error:
            self._note(f"notify.{self._target}: {error}, so no message is sent")
        except Exception as error:
            # A traceback could contain the URL.
            self._warn(f"stopped by {type(error).__name__}")
        finally:
            self._journal.close()

    def _send_message_about(self, line: bytes, fold: MessageFold) -> None:
        decoded = None
        with contextlib.suppress(FrameError):
            decoded = controller_events.decode(line)
        message = fold.add(*decoded[1:]) if decoded is not None else None
        if message is None or message.event.value not in self._spec.notify.on:
            return
        result = self._results.get(message.id)
        if result not in (None, "sending"):
            return
        is_repeat = result is not None
        if not is_repeat and self._is_over_limit(message):
            self._left_out += 1
            self._record(message, "left out")
            return
        if message.needs_verdict:
            message = message.add_line(self._read_verdict(message))
        if self._left_out:
            message = message.add_line(f"{self._left_out} messages before were left out (notify.max_per_minute)")
            self._left_out = 0
        self._send(message.finish((*self._spec.secrets.values(), self._url), repeat=is_repeat))

    def _is_over_limit(self, message: Message) -> bool:
        is_full = len(self._sent_at) == self._sent_at.maxlen and time.monotonic() - self._sent_at[0] < _MINUTE_S
        return is_full and message.event not in NEVER_LEFT_OUT

    def _read_verdict(self, message: Message) -> str:
        """Return the verdict that the controller saves after the event; "" if it saves none."""
        if message.event is MessageEvent.FAILURE:
            self._end.reached.wait()
        path, until = self._run.path / VERDICT_TEXT, time.monotonic() + _VERDICT_WAIT_S
        while True:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime >= message.time - _CLOCK_ERROR_S:
                    return path.read_text(encoding="utf-8", errors="replace")
            if self._end.reached.is_set() or time.monotonic() >= until:
                return ""
            self._end.reached.wait(_POLL_S)

    def _send(self, message: Message) -> None:
        """Send a message until the target takes it, refuses it, or the time for it is over."""
        self._record(message, "sending")
        self._sent_at.append(time.monotonic())
        give_up_at, pause = time.monotonic() + _GIVE_UP_AFTER_S, _FIRST_PAUSE_S
        # After the end of the run, only the message about the end has time for another try.
        is_last = message.event in (MessageEvent.FAILURE, MessageEvent.END)
        while True:
            try:
                deliver(self._spec, self._target, self._url, message)
            except DeliveryError as error:
                is_too_late = self._end.reached.is_set() and not is_last
                until = min(give_up_at, self._end.give_up_at)
                if error.is_final or is_too_late or time.monotonic() + pause >= until:
                    self._record(message, "failed", str(error))
                    self._warn(str(error))
                    return
            else:
                self._record(message, "sent")
                return
            # The target may have received the message, although it reported an error.
            message = replace(message, repeat=True)
            if is_last:
                time.sleep(pause)
            else:
                self._end.reached.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _record(self, message: Message, result: str, reason: str = "") -> None:
        record = {"id": message.id, "time": read_head_time(), "result": result, "reason": reason}
        self._journal.append((json.dumps(record) + "\n").encode())
        self._journal.sync()

    def _warn(self, reason: str) -> None:
        """Record one warning about this target; the journal of the target has all reasons."""
        if not self._has_noted:
            self._has_noted = True
            self._note(f"notify.{self._target}: a message was not sent: {reason}")


def _read_results(lines: Iterable[bytes]) -> dict[str, str]:
    """Return the last result of each message in a journal of messages."""
    results = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            results[str(record["id"])] = str(record["result"])
    return results
