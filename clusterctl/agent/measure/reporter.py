"""Prints the lines of the child of a rank: steps that begin, and results."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


class Reporter:
    """Prints the lines of this rank, each after `mark`."""

    def __init__(self, mark: str) -> None:
        self._rank, self._mark = int(os.environ["RANK"]), mark

    def begin(self, step: str, limit_s: float, **more: Any) -> None:
        """Tell the guard that a step begins, which may last `limit_s` seconds."""
        self._print({"begin": step, "limit_s": limit_s, **more})

    def report(self, step: str, **values: Any) -> None:
        """Print a result."""
        self._print({"rank": self._rank, "step": step, "t": time.time(), **values})

    def _print(self, values: dict[str, Any]) -> None:
        sys.stdout.write(self._mark + json.dumps(values) + "\n")
        sys.stdout.flush()
