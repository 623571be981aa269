"""Validation of a worker's status file, on its node and on the head."""

from __future__ import annotations

from clusterctl.agent.protocol import validators
from clusterctl.agent.protocol.validators import (
    boolean,
    integer,
    list_of,
    mapping_of,
    number,
    object_of,
    optional,
    string,
    tuple_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.sample_types import WorkerStatus

PID = integer(0, (1 << 31) - 1)
COUNT = integer(-(1 << 63), (1 << 63) - 1)
_TIME = optional(number())
_DISPLAY_FIELDS = {
    "frameworks": list_of(string(200), 64),
    "facts": mapping_of(string(200), validators.any_json(3, 256, 200), 256),
    "degraded": mapping_of(string(200), string(1024), 64),
}
_REPORT_FIELDS = {
    "pid": PID,
    "step": optional(COUNT),
    "source": optional(string(200)),
    "beats": COUNT,
    "seq": optional(mapping_of(string(1024), tuple_of(COUNT, COUNT), 4096)),
    "backend": optional(string(200)),
    "timeout_s": optional(number(0.0)),
}
_COLLECTIVE_FIELDS = {"looks": COUNT, "held": COUNT}
validate_status = object_of(
    {
        **_REPORT_FIELDS,
        "start_time": COUNT,
        "tid": PID,
        "time": number(),
        "progress_time": _TIME,
        "main_time": _TIME,
        "phase": optional(object_of({"name": string(200), "since": number(), "limit_s": number(0.0)})),
    },
    _COLLECTIVE_FIELDS,
)
"""Validate the status file that the shim in a worker writes."""
validate_status_sample = object_of(
    {},
    {
        **_REPORT_FIELDS,
        **_COLLECTIVE_FIELDS,
        "age_s": _TIME,
        "progress_age_s": _TIME,
        "main_age_s": _TIME,
        "phase": optional(object_of({"name": string(200), "age_s": number(), "limit_s": number(0.0)})),
        **{name: optional(shape) for name, shape in _DISPLAY_FIELDS.items()},
        "unseen": boolean,
    },
)
"""Validate the status in a sample."""


def sanitize_status(report: WorkerStatus) -> WorkerStatus:
    """Validate a status file; fields that only people read are emptied if they do not fit.

    Raises:
        FrameError: Another field does not fit.
    """
    validate_status(report)
    return {**report, **{name: _sanitize_field(name, report.get(name)) for name in _DISPLAY_FIELDS}}  # type: ignore[typeddict-item]


def _sanitize_field(name: str, value: Any) -> Any:
    try:
        _DISPLAY_FIELDS[name](value)
    except validators.ValidationError:
        return [] if name == "frameworks" else {}
    return value
