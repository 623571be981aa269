"""Waiting for what can be observed, with a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

DEADLINE: Final = 60.0
"""Seconds after which what is waited for is not coming: it takes moments, on a machine with too much to do ten times that."""


def wait_for(predicate: Callable[[], T | None], deadline: float = DEADLINE, what: str = "", every: float = 0.01) -> T:
    """Ask again and again until the answer is truthy, and return it.

    Args:
        predicate: Observes; must not block for long.
        deadline: Seconds until it is a failure.
        what: Said in the failure, as in "waited 15 s for <what>".
        every: Seconds between two looks.

    Raises:
        TimeoutError: naming `what` and the last answer.
    """
    end = time.monotonic() + deadline
    while True:
        answer = predicate()
        if answer:
            return answer
        if time.monotonic() > end:
            raise TimeoutError(f"waited {deadline:g} s for {what or predicate!r}; last answer: {answer!r}")
        time.sleep(every)
