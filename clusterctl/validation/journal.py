"""Types and bounds of the events in a node's journal."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, get_args

from clusterctl.agent.protocol import events, frames
from clusterctl.agent.protocol.dataclass_json import parse_dataclass
from clusterctl.agent.protocol.validators import (
    ValidationError,
    boolean,
    integer,
    list_of,
    number,
    object_of,
    optional,
    string,
)
from clusterctl.agent.protocol.worker_status import PID

if TYPE_CHECKING:
    from clusterctl.agent.protocol.validators import Validator

SEQ = EPOCH = integer(0, (1 << 53) - 1)
ATTEMPT = integer(-1, 1_000_000)
RANK = integer(0, 9_999_999)
BYTES = integer(0, 1 << 62)
MAX_LINE_BYTES = 1 << 20
"""Maximum of a line; a message has the same. A worker's texts in an event have up to 48 Ki characters, and JSON may
need
twelve bytes for one of them. If a dead mount blocks thousands of processes, each takes about 150 bytes.
"""
MAX_REMAINING = 65536
_TICKS = integer(0, (1 << 63) - 1)
_WORD, _WORDS = string(200), string(8192)

REMAINING = list_of(
    object_of({"pid": PID, "start_time": _TICKS, "command": _WORDS, "why": _WORDS}),
    MAX_REMAINING,
)
LEFTOVERS = list_of(object_of({"pid": PID, "rank": optional(RANK), "command": _WORDS, "age_s": number(0.0)}), 256)
_STAMP = {"seq": SEQ, "wall": number(), "mono": number(), "boot": string(200)}
STAMP = object_of(_STAMP)


def _event(needed: dict[str, Validator], optional: dict[str, Validator] | None = None) -> Validator:
    return object_of({**_STAMP, **needed}, optional)


EVENT_SHAPES: dict[str, Validator] = {
    "prepared": _event({"attempt": ATTEMPT}, {"ports": list_of(integer(0, 65535), 1024)}),
    "started": _event({"attempt": ATTEMPT, "rank": RANK, "local_rank": RANK, "pid": PID, "start_time": _TICKS}),
    "exited": _event(
        {"attempt": ATTEMPT, "rank": RANK},
        {
            "exit_code": optional(integer(-(1 << 31), (1 << 31) - 1)),
            "signal": optional(integer(0, 127)),
            "stopped": boolean,
            "earliest": number(),
            "latest": number(),
            "oom": optional(_WORD),
            "error": optional(object_of({}, {"message": string(8192), "traceback": optional(string(32768))})),
            "tail": string(8192),
            "outside_signal": optional(object_of({"signal": integer(1, 127), "before_s": number(0.0)})),
            "worked_alone": boolean,
            "failed_child": optional(object_of({"pid": PID, "message": string(8192)})),
        },
    ),
    "grouped": _event({"attempt": ATTEMPT, "ranks": list_of(RANK, 4096), "size": RANK}),
    "stopping": _event(
        {"attempt": ATTEMPT, "reason": _WORD, "grace": number(0.0)}, {"exiting_ranks": list_of(RANK, 4096)}
    ),
    "swept": _event(
        {"attempt": ATTEMPT},
        {"killed": integer(), "remaining": REMAINING, "leftovers": LEFTOVERS, "past_grace": LEFTOVERS},
    ),
    "finished": _event({"state": _WORD, "exit_code": integer(-(1 << 31), (1 << 31) - 1)}),
    "adopted": _event({"attempt": ATTEMPT, "pid": PID}),
    "dropped": _event({"attempt": ATTEMPT, "rank": RANK, "first_valid": BYTES, "lost": BYTES, "why": _WORDS}),
    "alarm": _event(
        {"attempt": ATTEMPT, "code": _WORD, "message": _WORDS},
        {"severity": _WORD, "gpu": optional(integer(0, 1023)), "rank": optional(RANK)},
    ),
}
"""Kind of an event to its shape, with the stamp. A newer agent may send other kinds, which the head ignores."""
_EVENT_CLASSES: dict[str, type[Any]] = {cls.KIND: cls for cls in get_args(events.Event)}


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
    shape = EVENT_SHAPES.get(kind)
    if shape is None:
        STAMP(value)
        return None
    try:
        shape(value)
    except ValidationError as error:
        STAMP(value)  # a wrong stamp raises its own error, without the name of the event
        raise frames.FrameError(f"its event `{kind}`: {error}") from None
    stamp = events.Stamp(seq=value["seq"], wall=value["wall"], mono=value["mono"], boot=value["boot"])
    return stamp, parse_dataclass(_EVENT_CLASSES[kind], value)


def list_event_ranks(event: events.Event) -> tuple[int, ...]:
    """Return the ranks that an event names."""
    match event:
        case events.Started() | events.Exited() | events.Dropped():
            return (event.rank,)
        case events.Stopping():
            return tuple(event.exiting_ranks)
        case _:
            return ()
