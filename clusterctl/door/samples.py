"""What a line of a node's samples may say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from clusterctl.agent.protocol import quick
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.validators import (
    any_json,
    any_of,
    boolean,
    digits,
    integer,
    list_of,
    mapping_of,
    number,
    object_of,
    optional,
    string,
    tuple_of,
)
from clusterctl.agent.protocol.worker_status import COUNT, PID, validate_status_sample
from clusterctl.door.journal import ATTEMPT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from clusterctl.agent.protocol.sample_types import ActivitySample, HealthSample

Kind = Literal["activity", "health"]
MOST_LINE = 1 << 20
_NUMBER = optional(number(-1e20, 1e20))
_WORDS = optional(string(8192))
_INDEX = integer(0, 1023)
_RANK = object_of(
    {},
    {
        "alive": boolean,
        "pid": optional(PID),
        "state": optional(string(8)),
        "wchan": optional(string(256)),
        "procs": COUNT,
        "cpu_s": _NUMBER,
        "read": optional(COUNT),
        "written": optional(COUNT),
        "output": optional(COUNT),
        "starved_s": _NUMBER,
        "faults": optional(COUNT),
        "inside": optional(validate_status_sample),
    },
)
_COUNT_OR_WORD = any_of(COUNT, string(200))


def _setting(value: Any) -> None:
    """True or false, a count, or a word; flags are no misfits first, of which each GPU would raise some."""
    if not isinstance(value, bool):
        _COUNT_OR_WORD(value)


_STAMPS = {"t": number(), "m": number(), "attempt": ATTEMPT}
_GPU = object_of(
    {"gpu": _INDEX},
    {
        "vendor": optional(string(64)),
        "uuid": optional(string(200)),
        **dict.fromkeys(("util", "mem_used", "mem_total", "temp_c", "mem_temp_c", "power_w", "sm_clock"), _NUMBER),
        **dict.fromkeys(("temp_limit_c", "mem_temp_limit_c"), _NUMBER),
        **dict.fromkeys(("throttle", "ecc_unc", "links_lost"), optional(COUNT)),
        **dict.fromkeys(("remap_pending", "remap_failure", "recovery_action"), optional(_setting)),
        "slowdown": optional(list_of(string(200), 64)),
        "err": optional(mapping_of(string(200), string(200), 256)),
        "codes": optional(mapping_of(string(200), optional(COUNT), 256)),
    },
)
_KINDS = {
    "activity": object_of(
        {},
        {
            **_STAMPS,
            "ranks": mapping_of(digits(), _RANK, 4096),
            "gpus": boolean,
            "steady": boolean,
            "watched": optional(mapping_of(string(4096), tuple_of(COUNT, COUNT), 256)),
        },
    ),
    "health": object_of(
        {},
        {
            **_STAMPS,
            **dict.fromkeys(("ms", "stuck_s", "cpu", "mem", "mem_used", "mem_total", "load1"), _NUMBER),
            "status": optional(string(64)),
            **dict.fromkeys(("reason", "state", "wchan"), _WORDS),
            "disk": optional(list_of(object_of({"path": string(4096), "free": COUNT, "total": COUNT}), 64)),
            "gpus": optional(list_of(_GPU, 1024)),
            "xids": optional(list_of(object_of({"gpu": optional(_INDEX), "xid": COUNT}), 4096)),
        },
    ),
}
_ENDS = {kind: f'"kind":"{kind}"}}'.encode() for kind in _KINDS}
_MARKS = {kind: (f'"{kind}"'.encode(), end, tuple(_ENDS.values())) for kind, end in _ENDS.items()}
_ANY = any_json(8, 4096, 65536)


def decode(line: bytes) -> dict[str, Any]:
    """Return a sample, of whatever kind.

    Raises:
        FrameError: The line is torn, or does not fit.
    """
    if len(line) > MOST_LINE:
        raise FrameError(f"a sample of {len(line)} bytes, and {MOST_LINE} are the most")
    try:
        value = quick.loads(line)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"not a sample: {line[:80]!r}") from error
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise FrameError(f"not a sample: {line[:80]!r}")
    _KINDS.get(value["kind"], _ANY)(value)
    return value


@overload
def readable(lines: Iterable[bytes], kind: Literal["activity"], *needed: str) -> Iterator[ActivitySample]: ...
@overload
def readable(lines: Iterable[bytes], kind: Literal["health"], *needed: str) -> Iterator[HealthSample]: ...
def readable(lines: Iterable[bytes], kind: Kind, *needed: str) -> Iterator[Any]:
    """Yield the samples of one kind that have these fields; lines that are none of ours are left out."""
    for line in lines:
        if may_be(line, kind):
            try:
                sample = decode(line)
            except FrameError:
                continue
            if sample["kind"] == kind and all(name in sample for name in needed):
                yield sample


def may_be(line: bytes, kind: Kind) -> bool:
    """Return whether a line may hold a sample of this kind, without taking it apart.

    Nodes write the kind last, so the end of nearly all lines tells; of others all is looked through.
    """
    mark, end, ends = _MARKS[kind]
    return line.endswith(end) or (not line.endswith(ends) and mark in line)


def ends_as(line: bytes, kind: Kind) -> bool:
    """Return whether a line ends as nodes end those of this kind."""
    return line.endswith(_ENDS[kind])


class SampleLines:
    """Cuts the bytes of the nodes' samples into lines, once for everybody who reads them.

    Keeps of each node the begin of a line whose end has not come yet.
    """

    def __init__(self) -> None:
        self._rest: dict[str, bytes] = {}

    def take(self, node: str, payload: bytes) -> list[bytes]:
        """Return the lines that are whole now, in the order in which the node wrote them.

        Of a line that is longer than any may be nothing is kept.
        """
        *lines, last = (self._rest.pop(node, b"") + payload).split(b"\n")
        if last and len(last) <= MOST_LINE:
            self._rest[node] = last
        return lines
