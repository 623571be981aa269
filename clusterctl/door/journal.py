"""What a line of a node's journal may say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

from clusterctl.agent.protocol import events, frames, quick
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
MOST_LINE = 1 << 20
"""Characters of a line, as many as a message has bytes. Texts of a worker in it have 48 Ki characters, and twelve may
stand for one of them; of thousands of processes that a dead mount holds each has some 150."""
MOST_REMAINING = 65536
_TICKS = integer(0, (1 << 63) - 1)
_WORD, _WORDS = string(200), string(8192)

REMAINING = list_of(
    object_of({"pid": PID, "start_time": _TICKS, "command": _WORDS, "why": _WORDS}),
    MOST_REMAINING,
)
LEFTOVERS = list_of(object_of({"pid": PID, "rank": optional(RANK), "command": _WORDS, "age_s": number(0.0)}), 256)
_STAMP = {"seq": SEQ, "wall": number(), "mono": number(), "boot": string(200)}
STAMP = object_of(_STAMP)


def _event(needed: dict[str, Validator], optional: dict[str, Validator] | None = None) -> Validator:
    return object_of({**_STAMP, **needed}, optional)


EVENTS: dict[str, Validator] = {
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
        },
    ),
    "grouped": _event({"attempt": ATTEMPT, "ranks": list_of(RANK, 4096), "size": RANK}),
    "stopping": _event({"attempt": ATTEMPT, "reason": _WORD, "grace": number(0.0)}, {"leaving": list_of(RANK, 4096)}),
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
"""By the kind of event, with its stamp; one that is not here is from a newer agent, and says nothing to us."""
_CLASSES: dict[str, type[Any]] = {cls.KIND: cls for cls in get_args(events.Event)}


def decode_line(line: bytes) -> tuple[events.Stamp, events.Event] | None:
    """Return what a line says, or `None` for a kind that only a newer agent knows.

    Raises:
        FrameError: The line is torn, or does not fit.
    """
    if len(line) > MOST_LINE:
        raise frames.FrameError(f"a line of {len(line)} bytes, and {MOST_LINE} are the most")
    try:
        value = quick.loads(line)
    except (ValueError, RecursionError) as error:
        raise frames.FrameError(f"not an event: {line[:80]!r}") from error
    return decode_record(value)


def decode_record(value: Any) -> tuple[events.Stamp, events.Event] | None:
    """Return what the object of a line says; as `decode_line`."""
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise frames.FrameError("not an event: it has no kind")
    kind = value["kind"]
    shape = EVENTS.get(kind)
    if shape is None:
        STAMP(value)
        return None
    try:
        shape(value)
    except ValidationError as error:
        STAMP(value)  # what is wrong with that is no matter of the event
        raise frames.FrameError(f"its event `{kind}`: {error}") from None
    stamp = events.Stamp(seq=value["seq"], wall=value["wall"], mono=value["mono"], boot=value["boot"])
    return stamp, parse_dataclass(_CLASSES[kind], value)


def ranks_of(event: events.Event) -> tuple[int, ...]:
    """Return the ranks of which an event speaks."""
    match event:
        case events.Started() | events.Exited() | events.Dropped():
            return (event.rank,)
        case events.Stopping():
            return tuple(event.leaving)
        case _:
            return ()
