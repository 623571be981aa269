"""Waiting for what can be observed, with a deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_REST: Final = 2.0
_LONGEST_REST: Final = 0.5
"""The pause after a look is this much longer than the look, up to that many seconds: a look may be a command of its own,
and those who look without a pause would take a core from what they wait for."""

DEADLINE: Final = 60.0
"""Seconds after which what is waited for is not coming: it takes moments, on a machine with too much to do ten times that."""


def wait_for(predicate: Callable[[], T | None], deadline: float = DEADLINE, what: str = "", every: float = 0.01) -> T:
    """Ask again and again until the answer is truthy, and return it.

    Args:
        predicate: Observes; must not block for long.
        deadline: Seconds until it is a failure.
        what: Said in the failure, as in "waited 15 s for <what>".
        every: Seconds between two looks, at least.

    Raises:
        TimeoutError: naming `what` and the last answer.
    """
    end = time.monotonic() + deadline
    while True:
        began = time.monotonic()
        answer = predicate()
        if answer:
            return answer
        now = time.monotonic()
        if now > end:
            raise TimeoutError(f"waited {deadline:g} s for {what or predicate!r}; last answer: {answer!r}")
        time.sleep(max(every, min(_REST * (now - began), _LONGEST_REST)))
