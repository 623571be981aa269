"""Signals that a command answers to."""

from __future__ import annotations

import signal


def heeded(*numbers: signal.Signals) -> list[signal.Signals]:
    """Return those that are not ignored from the start.

    `nohup` asks that SIGHUP be ignored; a shell without job control asks it of SIGINT, for what it starts with `&`.
    """
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
