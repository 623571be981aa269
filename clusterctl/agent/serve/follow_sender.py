"""Sends events and output of the runs that a controller follows, as fast as its credit and the connection allow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from clusterctl.agent.linux.event_loop import FolderWatcher
from clusterctl.agent.protocol import command_messages
from clusterctl.agent.serve.run_follower import RunFollower

if TYPE_CHECKING:
    from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel, Timer
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.protocol.run_requests import FollowArguments

_MAX_QUEUED_BYTES = 256 * 1024
"""The sender adds no more frames while the connection has this many unsent bytes."""
_RETRY_DELAY_S = 1.0
_SMALL_BYTES = 16 * 1024
"""If a pass sends fewer bytes of output than this, the next pass starts after the pace interval and not at once."""


class FollowSender:
    """Sends new events and output of all runs that a session follows, each time before the event loop waits."""

    def __init__(self, loop: EventLoop, channel: FrameChannel) -> None:
        self._loop, self._channel = loop, channel
        self._followers: dict[tuple[str, str], RunFollower] = {}
        self._notifier = FolderWatcher(loop, self.schedule_send)
        self._credit = 0
        self._stream = command_messages.FIRST_AGENT_STREAM
        self._is_send_scheduled = False
        self._pace_s = self._next_send_at = 0.0
        self._timer: Timer | None = None
        loop.call_before_each_wait(self._send_pending)

    def __contains__(self, key: tuple[str, str]) -> bool:
        """Return whether the controller follows a run."""
        return key in self._followers

    def follow(self, run: RunDir, follow: FollowArguments) -> None:
        """Start to send the events and output that follow the cursors; replace an earlier request for the same run."""
        key = (run.run, run.node)
        self.unfollow(key)
        send, send_data = self._channel.send, self._channel.send_data
        self._followers[key] = RunFollower(run, follow, send, send_data, self._allocate_stream, self._notifier)
        self._credit, self._pace_s = follow.credit, follow.pace
        self._send_now()

    def unfollow(self, key: tuple[str, str]) -> None:
        """Stop sending events and output of a run."""
        follower = self._followers.pop(key, None)
        if follower is not None:
            follower.close()

    def add_credit(self, count: int) -> None:
        """Allow `count` more bytes of output."""
        self._credit += count
        self.schedule_send()

    def schedule_send(self) -> None:
        """Send new events and output before the event loop waits again."""
        self._is_send_scheduled = True

    def _allocate_stream(self) -> int:
        self._stream += 1
        return self._stream

    def _has_room(self) -> bool:
        return self._channel.queued_bytes < _MAX_QUEUED_BYTES

    def _send_pending(self) -> None:
        """Send all new events, then new output as far as credit and connection allow."""
        if not self._is_send_scheduled:
            return
        # Events of a long journal stay in the file until the connection has room.
        if not all(follower.send_events(self._has_room) for follower in self._followers.values()):
            return
        if self._is_rate_limited():
            return
        before = self._credit
        while self._credit > 0 and self._has_room():
            sent = 0
            for follower in list(self._followers.values()):
                try:
                    sent += follower.send_next_data(self._credit - sent)
                except OSError:
                    # Try again later: for example, this machine has too many open files at the moment.
                    self._loop.call_later(_RETRY_DELAY_S, self.schedule_send)
                if sent >= self._credit:
                    break
            if not sent:
                self._is_send_scheduled = False
                if 0 < before - self._credit < _SMALL_BYTES:
                    self._next_send_at = time.monotonic() + self._pace_s
                return
            self._credit -= sent
        # Without credit, `add_credit` schedules the next send. If the connection is full, its progress wakes the loop.
        self._is_send_scheduled = self._credit > 0

    def _is_rate_limited(self) -> bool:
        """Return whether new output has to wait until the pace interval is over; if so, a timer sends the output."""
        remaining_s = self._next_send_at - time.monotonic()
        if remaining_s <= 0.0:
            return False
        self._is_send_scheduled = False
        if self._timer is None:
            self._timer = self._loop.call_later(remaining_s, self._send_now)
        return True

    def _send_now(self) -> None:
        """Send new output before the event loop waits again, even if the pace interval is not over."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._next_send_at = None, 0.0
        self.schedule_send()
