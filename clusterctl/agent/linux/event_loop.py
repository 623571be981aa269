"""An event loop for one thread: it runs actions for descriptors, timers, ended children, frames and changed folders."""

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
    """An action that the loop will run at a set time, unless `cancel` is called before."""

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Do not run the action any more."""
        self.action = None


class EventLoop:
    """Runs actions when their descriptor is ready or their time has come, until `stop`."""

    def __init__(self, on_exception: Callable[[], None] | None = None) -> None:
        """Make a loop.

        Args:
            on_exception: Called inside the exception handler when an action raises an exception. After the call, the
                loop goes on. If `None`, the exception ends the loop.
        """
        self._on_exception = on_exception
        # The module `selectors` would need many imports.
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
        self._set_actions(fd, action, self._find_actions(fd)[1])

    def on_writable(self, fd: int, action: Action | None) -> None:
        """Call `action` whenever `fd` can be written; `None` removes the action."""
        self._set_actions(fd, self._find_actions(fd)[0], action)

    def remove_descriptor(self, fd: int) -> None:
        """Remove all actions of `fd`. Call this function before you close `fd`."""
        self._set_actions(fd, None, None)

    def _find_actions(self, fd: int) -> tuple[Action | None, Action | None]:
        return self._interest.get(fd) or self._paused.get(fd, (None, None))

    def _set_actions(self, fd: int, read: Action | None, write: Action | None) -> None:
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

    def call_later(self, seconds: float, action: Action) -> Timer:
        """Call `action` once, after `seconds` of the monotonic clock."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def call_repeatedly(self, seconds: float, action: Action) -> None:
        """Call `action` repeatedly, each time `seconds` after the end of the last call."""

        def again() -> None:
            try:
                action()
            finally:
                self.call_later(seconds, again)

        self.call_later(seconds, again)

    def call_before_each_wait(self, action: Action) -> None:
        """Call `action` each time before the loop waits."""
        self._idle.append(action)

    def _compute_wait_s(self) -> float | None:
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

    def on_child_exit(self, action: Action) -> None:
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
            wait = self._compute_wait_s()
            # epoll counts milliseconds. Round up, or the loop would spin during the last millisecond of a timer.
            events = self._poll.poll(-1 if wait is None else math.ceil(wait * 1e3) / 1e3)
            self._registered.clear()
            for fd, mask in events:
                # If an action of this round closed the descriptor and registered a new descriptor with the same number,
                # the event belongs to the closed descriptor.
                if fd not in self._registered:
                    self._dispatch(fd, mask)
            self._run_due_timers()

    def _dispatch(self, fd: int, mask: int) -> None:
        # An earlier action of this round may have removed the action. At a hang-up, call both actions: the next read or
        # write raises the error.
        for bit, side in ((select.EPOLLIN, 0), (select.EPOLLOUT, 1)):
            action = self._interest.get(fd, (None, None))[side]
            if mask & (bit | _HANG_UP_EVENTS) and action is not None and not self._run_action(action):
                self._pause_descriptor(fd)

    def _run_action(self, action: Action) -> bool:
        """Run an action; return false if it raised an exception and the loop goes on."""
        try:
            action()
        except Exception:
            if self._on_exception is None:
                raise
            self._on_exception()
            return False
        return True

    def _pause_descriptor(self, fd: int) -> None:
        """Ignore a descriptor for a second, because its action has failed and would probably fail again."""
        sides = self._find_actions(fd)
        if sides == (None, None):
            return
        self._set_actions(fd, None, None)
        self._paused[fd] = sides

        def again() -> None:
            if fd in self._paused:
                self._set_actions(fd, *self._paused[fd])

        self.call_later(_PAUSE_AFTER_ERROR_S, again)


_MAX_READ_BYTES = 256 * 1024


class FrameChannel:
    """Reads frames from one descriptor, and writes frames to another or the same descriptor; closes both at the end.

    Attributes:
        queued_bytes: Number of bytes that are not yet written.
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
        """Queue a message, without blocking."""
        self._enqueue(frames.encode_message(message))

    def send_data(self, stream: int, offset: int, payload: bytes) -> None:
        """Queue bytes of a stream, without blocking."""
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
        """Write all queued frames, and block until they are written. Call this function before the process exits."""
        with contextlib.suppress(OSError):
            os.set_blocking(self._write, True)
            while self._out:
                frame = self._out.pop(0)
                while frame:
                    frame = frame[os.write(self._write, frame) :]

    def close(self, why: str) -> None:
        """Close both descriptors and call `on_close` with the reason; further calls do nothing."""
        if not self._open:
            return
        self._open = False
        self._out.clear()
        for fd in {self._read, self._write}:
            self._loop.remove_descriptor(fd)
            os.close(fd)
        self._on_close(why)


_LIBC = ctypes.CDLL(None, use_errno=True)
_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_POLL_INTERVAL_S = 0.1
_PAUSE_AFTER_CHANGE_S = 0.02
"""After a change, the watcher ignores further changes for this many seconds, which limits the number of calls."""


class FolderWatcher:
    """Calls `on_change` soon after a file in a watched folder has changed, or every 100 ms without inotify."""

    def __init__(self, loop: EventLoop, on_change: Callable[[], None]) -> None:
        self._loop, self._on_change = loop, on_change
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

    def unwatch(self, folder: str) -> None:
        """Stop watching a folder."""
        number = self._watched.pop(folder, -1)
        if number >= 0:
            _LIBC.inotify_rm_watch(self._fd, number)

    def _poll(self) -> None:
        if not self._polling:
            self._polling = True
            self._loop.call_repeatedly(_POLL_INTERVAL_S, self._on_change)

    def _receive_changes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._fd, 65536)) > 32768:
                pass
        self._loop.on_readable(self._fd, None)
        self._on_change()
        self._loop.call_later(_PAUSE_AFTER_CHANGE_S, lambda: self._loop.on_readable(self._fd, self._receive_changes))
