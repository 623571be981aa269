"""A small event loop: descriptors, timers and children, in one thread."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import selectors
import signal
import time
from typing import Callable

Action = Callable[[], None]


class Timer:
    """Something that is to happen; `cancel` makes it not happen."""

    def __init__(self, action: Action) -> None:
        self.action: Action | None = action

    def cancel(self) -> None:
        """Forget it."""
        self.action = None


class Loop:
    """Runs actions when their descriptor is ready or their time has come, until `stop`."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._interest: dict[int, tuple[Action | None, Action | None]] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._running = True
        self._idle: list[Action] = []

    # --- descriptors

    def on_readable(self, fd: int, action: Action | None) -> None:
        """Call `action` whenever `fd` can be read; `None` ends that."""
        self._set(fd, action, self._interest.get(fd, (None, None))[1])

    def on_writable(self, fd: int, action: Action | None) -> None:
        """Call `action` whenever `fd` can be written; `None` ends that."""
        self._set(fd, self._interest.get(fd, (None, None))[0], action)

    def forget(self, fd: int) -> None:
        """End all interest in `fd`; to be called before it is closed."""
        self._set(fd, None, None)

    def _set(self, fd: int, read: Action | None, write: Action | None) -> None:
        events = (selectors.EVENT_READ if read else 0) | (selectors.EVENT_WRITE if write else 0)
        known = fd in self._interest
        if not events:
            if known:
                del self._interest[fd]
                self._selector.unregister(fd)
            return
        self._interest[fd] = (read, write)
        if known:
            self._selector.modify(fd, events)
        else:
            self._selector.register(fd, events)

    # --- time

    def after(self, seconds: float, action: Action) -> Timer:
        """Call `action` once, `seconds` from now by the monotonic clock."""
        timer = Timer(action)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), timer))
        return timer

    def every(self, seconds: float, action: Action) -> None:
        """Call `action` again and again, `seconds` between the end of one call and the next."""

        def again() -> None:
            action()
            self.after(seconds, again)

        self.after(seconds, again)

    def before_waiting(self, action: Action) -> None:
        """Call `action` each time before the loop waits."""
        self._idle.append(action)

    def _wait(self) -> float | None:
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _due(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            action = heapq.heappop(self._timers)[2].action
            if action is not None:
                action()

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
        """Work until `stop`."""
        while self._running:
            for action in self._idle:
                action()
            for key, mask in self._selector.select(self._wait()):
                self._dispatch(key.fd, mask)
            self._due()

    def _dispatch(self, fd: int, mask: int) -> None:
        # An earlier action of the same round may have ended the interest, or closed the descriptor.
        for bit, side in ((selectors.EVENT_READ, 0), (selectors.EVENT_WRITE, 1)):
            action = self._interest.get(fd, (None, None))[side]
            if mask & bit and action is not None:
                action()
