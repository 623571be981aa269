"""An event loop for one thread: descriptors, timers and children; frames over descriptors; changes of folders."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import math
import os
import select
import signal
import time

from clusterctl.agent.protocol import frames

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Callable

    Action = Callable[[], None]


_PAUSE_AFTER_ERROR_S = 1.0
_HANG_UP_EVENTS = select.EPOLLHUP | select.EPOLLERR


class Timer:
    """An action that will run; `cancel` prevents it."""

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Prevent the action."""
        self.action = None


class EventLoop:
    """Runs actions when their descriptor is ready or their time has come, until `stop`."""

    def __init__(self, failed: Callable[[], None] | None = None) -> None:
        """Make a loop.

        Args:
            failed: Called inside the exception handler of an action that failed; the loop then goes on. Without it the
                exception ends the loop.
        """
        self._failed = failed
        # `selectors` would add many imports and no function.
        self._poll = select.epoll()
        self._interest: dict[int, tuple[Action | None, Action | None]] = {}
        self._paused: dict[int, tuple[Action | None, Action | None]] = {}
        self._registered: set[int] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._running = True
        self._idle: list[Action] = []

    # --- descriptors

    def on_readable(self, fd: int, action: Action | None) -> None:
        """Call `action` whenever `fd` can be read; `None` removes the action."""
        self._set(fd, action, self._find_actions(fd)[1])

    def on_writable(self, fd: int, action: Action | None) -> None:
        """Call `action` whenever `fd` can be written; `None` removes the action."""
        self._set(fd, self._find_actions(fd)[0], action)

    def forget(self, fd: int) -> None:
        """Remove all actions of `fd`; call it before `fd` is closed."""
        self._set(fd, None, None)

    def _find_actions(self, fd: int) -> tuple[Action | None, Action | None]:
        return self._interest.get(fd) or self._paused.get(fd, (None, None))

    def _set(self, fd: int, read: Action | None, write: Action | None) -> None:
        events = (select.EPOLLIN if read else 0) | (select.EPOLLOUT if write else 0)
        registered = fd in self._interest
        self._paused.pop(fd, None)
        if not events:
            if registered:
                del self._interest[fd]
                self._poll.unregister(fd)
            return
        self._interest[fd] = (read, write)
        if registered:
            self._poll.modify(fd, events)
        else:
            self._poll.register(fd, events)
            self._registered.add(fd)

    # --- time

    def after(self, seconds: float, action: Action) -> Timer:
        """Call `action` once, `seconds` from now by the monotonic clock."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def every(self, seconds: float, action: Action) -> None:
        """Call `action` repeatedly, `seconds` between the end of one call and the next."""

        def again() -> None:
            try:
                action()
            finally:
                self.after(seconds, again)

        self.after(seconds, again)

    def before_waiting(self, action: Action) -> None:
        """Call `action` each time before the loop waits."""
        self._idle.append(action)

    def _wait(self) -> float | None:
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _run_due_timers(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heapq.heappop(self._timers)[2].action
            if action is not None:
                self._run_action(action)

    # --- children

    def on_children(self, action: Action) -> None:
        """Call `action` after a child of this process has ended."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def drain() -> None:
            with contextlib.suppress(BlockingIOError):
                while os.read(read, 4096):
                    pass
            action()

        self.on_readable(read, drain)

    # --- running

    def stop(self) -> None:
        """Return from `run` after the present action."""
        self._running = False

    def run(self) -> None:
        """Run actions until `stop`."""
        while self._running:
            for action in self._idle:
                action()
            wait = self._wait()
            # Rounded up, because a timer in its last millisecond must not make the loop spin.
            events = self._poll.poll(-1 if wait is None else math.ceil(wait * 1e3) / 1e3)
            self._registered.clear()
            for fd, mask in events:
                # If an action of this round registered the number, the event belongs to the closed descriptor before
                # it.
                if fd not in self._registered:
                    self._dispatch(fd, mask)
            self._run_due_timers()

    def _dispatch(self, fd: int, mask: int) -> None:
        # An earlier action of the same round may have removed the action or closed the descriptor. A hang-up wakes
        # readers and writers alike; their next read or write shows the reason.
        for bit, side in ((select.EPOLLIN, 0), (select.EPOLLOUT, 1)):
            action = self._interest.get(fd, (None, None))[side]
            if mask & (bit | _HANG_UP_EVENTS) and action is not None and not self._run_action(action):
                self._pause_descriptor(fd)

    def _run_action(self, action: Action) -> bool:
        """Run an action; return false if it failed and the loop goes on."""
        try:
            action()
        except Exception:
            if self._failed is None:
                raise
            self._failed()
            return False
        return True

    def _pause_descriptor(self, fd: int) -> None:
        """Ignore a descriptor for a second because its action failed: the cause may still be there."""
        sides = self._find_actions(fd)
        if sides == (None, None):
            return
        self._set(fd, None, None)
        self._paused[fd] = sides

        def again() -> None:
            if fd in self._paused:
                self._set(fd, *self._paused[fd])

        self.after(_PAUSE_AFTER_ERROR_S, again)


_MAX_READ_BYTES = 256 * 1024


class FrameChannel:
    """Reads frames from one descriptor and writes frames to another (or the same); closes both at the end.

    Attributes:
        queued_bytes: The bytes that wait to be written.
    """

    def __init__(
        self,
        loop: EventLoop,
        read: int,
        write: int,
        on_frame: Callable[[frames.Frame], None],
        on_close: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._read, self._write = read, write
        self._on_frame, self._on_close = on_frame, on_close
        self._decoder = frames.FrameDecoder()
        self._out: list[bytes] = []
        self.queued_bytes = 0
        self._open = True
        for fd in {read, write}:
            os.set_blocking(fd, False)
        loop.on_readable(read, self._readable)

    def send(self, message: Mapping[str, object]) -> None:
        """Send a message without blocking."""
        self._enqueue(frames.encode_message(message))

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Send bytes of a stream without blocking."""
        self._enqueue(frames.encode_data(stream, offset, payload))

    def _enqueue(self, frame: bytes) -> None:
        if not self._open:
            return
        self._out.append(frame)
        self.queued_bytes += len(frame)
        if len(self._out) == 1:
            self._writable()

    def _writable(self) -> None:
        try:
            while self._out:
                sent = os.write(self._write, self._out[0])
                self.queued_bytes -= sent
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.pop(0)
        except BlockingIOError:
            pass
        except OSError as error:
            self.close(str(error))
            return
        self._loop.on_writable(self._write, self._writable if self._out else None)

    def _readable(self) -> None:
        try:
            data = os.read(self._read, _MAX_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not data:
            self.close("")
            return
        try:
            for frame in self._decoder.feed(data):
                self._on_frame(frame)
                if not self._open:
                    return
        except frames.FrameError as error:
            self.close(str(error))

    def flush(self) -> None:
        """Write all queued frames and block until the peer takes them; for the last frames before the end."""
        with contextlib.suppress(OSError):
            os.set_blocking(self._write, True)
            while self._out:
                frame = self._out.pop(0)
                while frame:
                    frame = frame[os.write(self._write, frame) :]

    def close(self, why: str) -> None:
        """Close both descriptors and report the reason, once."""
        if not self._open:
            return
        self._open = False
        self._out.clear()
        for fd in {self._read, self._write}:
            self._loop.forget(fd)
            os.close(fd)
        self._on_close(why)


_LIBC = ctypes.CDLL(None, use_errno=True)
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_POLL_INTERVAL_S = 0.1
_PAUSE_AFTER_CHANGE_S = 0.02
"""Seconds without further reports after a change, so that many changes do not cost more than reading the files."""


class FolderWatcher:
    """Calls `changed` soon after a file in a watched folder has changed. Without inotify it calls it every 100 ms."""

    def __init__(self, loop: EventLoop, changed: Callable[[], None]) -> None:
        self._loop, self._changed = loop, changed
        self._watched: dict[str, int] = {}
        self._fd = int(_LIBC.inotify_init1(_NONBLOCK | _CLOEXEC))
        self._polling = False
        if self._fd >= 0:
            loop.on_readable(self._fd, self._receive_changes)
        else:
            self._poll()

    def watch(self, folder: str) -> None:
        """Watch the files of a folder."""
        if folder in self._watched:
            return
        mask = _MODIFY | _MOVED_TO | _CREATE
        number = _LIBC.inotify_add_watch(self._fd, os.fsencode(folder), mask) if self._fd >= 0 else -1
        self._watched[folder] = number
        if number < 0:
            self._poll()

    def forget(self, folder: str) -> None:
        """Stop watching a folder."""
        number = self._watched.pop(folder, -1)
        if number >= 0:
            _LIBC.inotify_rm_watch(self._fd, number)

    def _poll(self) -> None:
        if not self._polling:
            self._polling = True
            self._loop.every(_POLL_INTERVAL_S, self._changed)

    def _receive_changes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 65536)) > 32768:
                pass
        self._loop.on_readable(self._fd, None)
        self._changed()
        self._loop.after(_PAUSE_AFTER_CHANGE_S, lambda: self._loop.on_readable(self._fd, self._receive_changes))
