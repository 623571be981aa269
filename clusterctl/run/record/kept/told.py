"""The verdict that is kept with a run, for those who only show it: to judge takes far more modules."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clusterctl.run.record.rundir import RunDir

VERDICT_JSON, VERDICT_TEXT = "why.json", "why.txt"
_MOST_BYTES = 1 << 20


def kept_json(run: RunDir) -> dict[str, Any] | None:
    """Return the verdict that is kept with a run, as JSON; `None` where there is none."""
    try:
        verdict = json.loads((run.path / VERDICT_JSON).read_bytes()[:_MOST_BYTES])
    except (OSError, ValueError, RecursionError):
        return None
    return verdict if isinstance(verdict, dict) else None
