"""How work moves between the controller's loop and other threads: one object, two verbs.

The loop owns the state of the run. Another thread may dial and ask; what comes of it goes back to the loop.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from clusterctl.errors import ClusterctlError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopCall:
    """An item of the loop's queue: a function that the loop calls."""

    call: Callable[[], Any]


def _ignore(_result: object) -> None:
    """Do nothing with what came of a thread."""


class LoopExecutor:
    """Starts threads for the loop, and brings calls of other threads to it.

    Thread: any.

    Args:
        enqueue: Puts an item into the queue of the loop.
    """

    def __init__(self, enqueue: Callable[[LoopCall], None]) -> None:
        self._enqueue = enqueue

    def call_soon(self, call: Callable[[], object]) -> None:
        """Have the loop call this after everything that is queued; do not wait. An exception ends the loop."""
        self._enqueue(LoopCall(call=call))

    def call_on_loop(self, call: Callable[[], T]) -> T:
        """Have the loop call this after everything that is queued; return what it returned or raise what it raised.

        Only for other threads. It never returns if the loop has ended; the thread then ends with the process.
        """
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(call())
            except Exception as error:
                done.set_exception(error)

        self.call_soon(run)
        return done.result()

    def in_thread(self, work: Callable[[], T]) -> ThreadTask[T]:
        """Prepare work for a thread of its own; `then_on_loop` starts it."""
        return ThreadTask(self, work)


class ThreadTask(Generic[T]):
    """Work for a thread, whose result the loop takes.

    Thread: `then_on_loop` may be called from any.
    """

    def __init__(self, executor: LoopExecutor, work: Callable[[], T]) -> None:
        self._executor, self._work = executor, work

    def then_on_loop(
        self, done: Callable[[T], object] = _ignore, failed: Callable[[Exception], object] = _ignore
    ) -> None:
        """Start the thread; the loop calls `done` with its result or `failed` with its exception.

        An exception that is not one of ours also puts a traceback into the controller's log.
        """

        def run() -> None:
            try:
                result = self._work()
            except Exception as error:
                if not isinstance(error, ClusterctlError):
                    traceback.print_exc()
                failure = error
                self._executor.call_soon(lambda: failed(failure))
            else:
                self._executor.call_soon(lambda: done(result))

        threading.Thread(target=run, daemon=True).start()
