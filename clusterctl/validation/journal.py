"""Reads the events of a node's journal, and validates them by their declarations in `agent.protocol.events`."""

from __future__ import annotations

import json
from typing import Any

from clusterctl.agent.protocol import events, frames
from clusterctl.agent.protocol.requests import parse_dataclass
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.validation.derivation import derive_object

MAX_LINE_BYTES = 1 << 20
"""Maximum of a line; a message has the same. A worker's texts in an event have up to 48 Ki characters, and JSON may
need twelve bytes for one of them. If a dead mount blocks thousands of processes, each takes about 150 bytes.
"""
_validate_stamp = derive_object(events.Stamp)
_EVENT_VALIDATORS = {kind: derive_object(events.Stamp, cls) for kind, cls in events.EVENT_CLASSES.items()}


def parse_line(line: bytes) -> tuple[events.Stamp, events.Event] | None:
    """Return stamp and event of a line; `None` if only a newer agent knows the kind.

    Raises:
        FrameError: The line is torn, or a field does not fit.
    """
    if len(line) > MAX_LINE_BYTES:
        raise frames.FrameError(f"a line of {len(line)} bytes; the maximum is {MAX_LINE_BYTES}")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise frames.FrameError(f"not an event: {line[:80]!r}") from error
    return parse_record(value)


def parse_record(value: Any) -> tuple[events.Stamp, events.Event] | None:
    """Return stamp and event of a decoded line (see `parse_line`)."""
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
        _validate_stamp(value)  # a wrong stamp raises its own error, without the name of the event
        raise frames.FrameError(f"its event `{kind}`: {error}") from None
    stamp = events.Stamp(seq=value["seq"], wall=value["wall"], mono=value["mono"], boot=value["boot"])
    return stamp, parse_dataclass(events.EVENT_CLASSES[kind], value)


def list_event_ranks(event: events.Event) -> tuple[int, ...]:
    """Return the ranks that an event names."""
    match event:
        case events.Started() | events.Exited() | events.Dropped():
            return (event.rank,)
        case events.Stopping():
            return tuple(event.exiting_ranks)
        case _:
            return ()
