"""Why no rank may be forked: the reason is told, and the ranks start anew."""

from __future__ import annotations

import os

_MOST_REASON = 1000


class CannotForkError(Exception):
    """A rank cannot be forked; the text says why."""


def reason(error: BaseException) -> str:
    """Say what went wrong, and where, if that is no refusal of ours."""
    if isinstance(error, CannotForkError):
        return str(error)
    import traceback

    last = traceback.extract_tb(error.__traceback__)[-1:]
    places = [f" ({os.path.basename(frame.filename)}:{frame.lineno})" for frame in last]
    return f"{type(error).__name__}: {error}"[:_MOST_REASON] + "".join(places)
