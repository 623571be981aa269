"""What a worker's status file may say: what does not fit is no word of a worker's, on its node and on the head."""

from __future__ import annotations

from clusterctl.agent.protocol import shapes
from clusterctl.agent.protocol.shapes import flag, many, maybe, real, record, row, table, text, whole

# Not from `typing`, whose import would be a good part of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.sample_types import WorkerStatus

PID = whole(0, (1 << 31) - 1)
COUNT = whole(-(1 << 63), (1 << 63) - 1)
_MOMENT = maybe(real())
_SOFT = {
    "frameworks": many(text(200), 64),
    "facts": table(text(200), shapes.loose(3, 256, 200), 256),
    "degraded": table(text(200), text(1024), 64),
}
_TOLD = {
    "pid": PID,
    "step": maybe(COUNT),
    "source": maybe(text(200)),
    "beats": COUNT,
    "seq": maybe(table(text(1024), row(COUNT, COUNT), 4096)),
    "backend": maybe(text(200)),
    "timeout_s": maybe(real(0.0)),
}
_PACE = {"looks": COUNT, "held": COUNT}
STATUS = record(
    {
        **_TOLD,
        "start_time": COUNT,
        "tid": PID,
        "time": real(),
        "progress_time": _MOMENT,
        "main_time": _MOMENT,
        "phase": maybe(record({"name": text(200), "since": real(), "limit_s": real(0.0)})),
    },
    _PACE,
)
"""The file, as the shim in a worker writes it."""
INSIDE = record(
    {},
    {
        **_TOLD,
        **_PACE,
        "age_s": _MOMENT,
        "progress_age_s": _MOMENT,
        "main_age_s": _MOMENT,
        "phase": maybe(record({"name": text(200), "age_s": real(), "limit_s": real(0.0)})),
        **{name: maybe(shape) for name, shape in _SOFT.items()},
        "unseen": flag,
    },
)
"""What becomes of it in a sample."""


def bounded(told: WorkerStatus) -> WorkerStatus:
    """Return a status file that fits; what only people read of it is left out where it does not.

    Raises:
        FrameError: It does not fit.
    """
    STATUS(told)
    return {**told, **{name: _soft(name, told.get(name)) for name in _SOFT}}  # type: ignore[typeddict-item]


def _soft(name: str, value: Any) -> Any:
    try:
        _SOFT[name](value)
    except shapes.MisfitError:
        return [] if name == "frameworks" else {}
    return value
