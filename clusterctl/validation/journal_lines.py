"""Parses and validates the lines of a node's journal by the declarations in `agent.protocol.events`."""

from __future__ import annotations

import json
from typing import Any

from clusterctl.agent.protocol import events, frames
from clusterctl.agent.protocol.run_requests import parse_dataclass
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.validation.derived_validators import derive_object_validator

MAX_LINE_BYTES = 1 << 20
"""The maximum length of a line in bytes; a message has the same limit. The texts of a worker in an event have up to 48
Ki characters, and JSON may need twelve bytes for a character. An event may also list thousands of processes that a dead
mount blocks, with about 150 bytes for each.
"""
_validate_stamp = derive_object_validator(events.Stamp)
_EVENT_VALIDATORS = {kind: derive_object_validator(events.Stamp, cls) for kind, cls in events.EVENT_CLASSES.items()}


def parse_event_line(line: bytes) -> tuple[events.Stamp, events.Event] | None:
    """Return the stamp and the event of a journal line; `None` if the kind of event is unknown to this version.

    Raises:
        FrameError: The line is incomplete, or a field is invalid.
    """
    if len(line) > MAX_LINE_BYTES:
        raise frames.FrameError(f"a line of {len(line)} bytes; the maximum is {MAX_LINE_BYTES}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise frames.FrameError(f"not an event: {line[:80]!r}") from error
    return parse_event_record(value)


def parse_event_record(value: Any) -> tuple[events.Stamp, events.Event] | None:
    """Return the stamp and the event of a journal line that is already decoded (see `parse_event_line`)."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise frames.FrameError("not an event: no `kind`")
    kind = value["kind"]
    validate = _EVENT_VALIDATORS.get(kind)
    if validate is None:
        _validate_stamp(value)
        return None
    try:
        validate(value)
    except ValidationError as error:
        _validate_stamp(value)  # An invalid stamp raises an error of its own, without the kind of the event.
        raise frames.FrameError(f"its event `{kind}`: {error}") from None
    stamp = events.Stamp(seq=value["seq"], wall=value["wall"], mono=value["mono"], boot=value["boot"])
    return stamp, parse_dataclass(events.EVENT_CLASSES[kind], value)


def list_event_ranks(event: events.Event) -> tuple[int, ...]:
    """Return the ranks of the workers to which an event refers."""
    match event:
        case events.Started() | events.Exited() | events.OutputDropped():
            return (event.rank,)
        case events.Stopping():
            return tuple(event.exiting_ranks)
        case _:
            return ()
