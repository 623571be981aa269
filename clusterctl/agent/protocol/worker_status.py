"""Validation of a worker's status file, on its node: by hand, since the head alone can read the declarations."""

from __future__ import annotations

from clusterctl.agent.protocol import validators
from clusterctl.agent.protocol.validators import (
    COUNT,
    PID,
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

_TIME = optional(number())
_DISPLAY_FIELDS = {
    "frameworks": list_of(string(200), 64),
    "facts": mapping_of(string(200), validators.any_json(3, 256, 200), 256),
    "degraded": mapping_of(string(200), string(1024), 64),
}
validate_status = object_of(
    {
        "pid": PID,
        "step": optional(COUNT),
        "source": optional(string(200)),
        "beats": COUNT,
        "seq": optional(mapping_of(string(1024), tuple_of(COUNT, COUNT), 4096)),
        "backend": optional(string(200)),
        "timeout_s": optional(number(0.0)),
        "start_time": COUNT,
        "tid": PID,
        "time": number(),
        "progress_time": _TIME,
        "main_time": _TIME,
        "phase": optional(object_of({"name": string(200), "since": number(), "limit_s": number(0.0)})),
    },
    {"looks": COUNT, "held": COUNT},
)
"""Validate the status file that the shim in a worker writes; `sample_types.WorkerStatus` has the same bounds."""


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
