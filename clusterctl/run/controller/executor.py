"""Passes calls and results between the controller's loop and other threads.

The loop owns the state of the run. Other threads open connections and send requests; the loop takes their results.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from clusterctl.errors import ClusterctlError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCall:
    """An item of the loop's queue: a function that the loop calls."""

    call: Callable[[], Any]


def _ignore(_result: object) -> None:
    """Ignore the result of a thread."""


class LoopExecutor:
    """Starts threads for the loop, and passes calls of other threads to the loop.

    Thread: any.

    Args:
        enqueue: A function that puts an item into the queue of the loop.
    """

    def __init__(self, enqueue: Callable[[LoopCall], None]) -> None:
        self._enqueue = enqueue

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have the loop call this function after all queued items; do not wait. An exception ends the loop."""
        self._enqueue(LoopCall(call=call))

    def call_on_loop(self, call: Callable[[], T]) -> T:
        """Have the loop call this function after all queued items; return its result or raise its exception.

        The loop itself must not call this method. If the loop has ended, this method never returns, and the calling
        thread ends with the process.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self.call_soon(run)
        return done.result()

    def run_in_thread(
        self,
        work: Callable[[], T],
        on_done: Callable[[T], object] = _ignore,
        on_failed: Callable[[Exception], object] = _ignore,
    ) -> None:
        """Call `work` in a new thread. The loop then calls `on_done` or `on_failed` with the result or exception.

        An unexpected exception also writes a traceback to the controller's log.
        """

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                if not isinstance(error, ClusterctlError):
                    traceback.print_exc()
                failure = error
                self.call_soon(lambda: on_failed(failure))
            else:
                self.call_soon(lambda: on_done(result))

        threading.Thread(target=run, daemon=True).start()
