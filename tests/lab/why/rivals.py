"""What others would say of the same run: torch's own analyser itself, and the rules of NVRx and of Ray.

The rules are stated here in our words, as far as the sources tell them:

- NVRx: `nvidia_resiliency_ext/attribution/trace_analyzer/fr_attribution.py` of NVIDIA/nvidia-resiliency-ext (16a9d66);
- Ray: `train/v2/_internal/callbacks/nv_hang_detector.py` of ray-project/ray (5ee7b44), which names suspects. What was
  merged instead (`callbacks/nccl_ras.py`, 057a6c4) finds much the same communicators, and lists counts without a name.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tests.lab.why.dumps import members

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from clusterctl.agent.protocol.record_types import FlightRecorderEntry
    from clusterctl.why.evidence_types import Evidence
    from tests.lab.why.dumps import Dump

_MISSING = re.compile(r"^missing ranks: \{([\d, ]+)\}")
_NO_DUMP = re.compile(r"missed FR dumps from ranks \(\{([\d, ]+)\}\)")
_CULPRIT = re.compile(r"Culprit rank (\d+)")
_RAS_COUNTS: Final = {
    "all_reduce": "AllReduce",
    "allreduce": "AllReduce",
    "barrier": "AllReduce",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
    "all_gather": "AllGather",
    "allgather": "AllGather",
    "_all_gather_base": "AllGather",
    "_allgather_base": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "_reduce_scatter_base": "ReduceScatter",
}
"""Under what NCCL counts an operation of torch: a barrier is an all-reduce there. Messages are not counted."""


@dataclass(frozen=True)
class Said:
    """What one of them says.

    Attributes:
        ranks: Whom it names.
        trouble: The error with which it ended.
        more: What it says where it names nobody.
    """

    ranks: frozenset[int] = frozenset()
    trouble: str = ""
    more: str = ""


# --- torch's flight-recorder analyser


def torch_says(dumps: Mapping[int, Dump], order: Sequence[int], world: int) -> Said:
    """Let torch's analyser judge dumps in an order; what it names in the first thing that it finds wrong counts."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    incomplete = [] if len(dumps) == world else ["--allow-incomplete-ranks"]
    arguments = JobConfig().parse_args(["folder", *incomplete])
    details = {f"rank_{rank}": {**copy.deepcopy(dumps[rank]), "rank": rank} for rank in order if rank in dumps}
    version = next(iter(dumps.values()))["version"]
    with _heard() as lines:
        try:
            build_db(details, arguments, version)
        except (Exception, SystemExit) as error:
            return Said(trouble=f"{type(error).__name__}: {error}")
    lacking = next((found[1] for line in lines if (found := _NO_DUMP.search(line))), "")
    return Said(ranks=first_named(lines), more=f"no dump of {lacking}" if lacking else "")


def first_named(lines: Sequence[str]) -> frozenset[int]:
    """Return the ranks in the first line of the analyser that names any."""
    for line in lines:
        missing = _MISSING.match(line)
        numbers = re.findall(r"\d+", missing[1]) if missing else _CULPRIT.findall(line)
        if numbers:
            return frozenset(map(int, numbers))
    return frozenset()


@contextlib.contextmanager
def _heard() -> Iterator[list[str]]:
    """Give the lines that the analyser logs, and keep them off the terminal."""
    lines: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.extend(record.getMessage().splitlines())

    logger = logging.getLogger("Flight Recorder")
    before, logger.handlers, logger.propagate = list(logger.handlers), [Ear()], False
    try:
        yield lines
    finally:
        logger.handlers = before


# --- NVRx


def nvrx_says(dumps: Mapping[int, Dump]) -> Said:
    """State the rule of NVRx's attribution.

    In each process group those ranks are missing that have enqueued less than the rank that has enqueued most, and those
    that have nothing outstanding while others have. Of groups that share ranks the missing ranks of the first count: the
    largest group, and of equal ones that whose collectives came first. Where no group misses a rank nobody is named.
    """
    missing: dict[str, set[int]] = {}
    groups: dict[str, set[int]] = {}
    for dump in dumps.values():
        for name, config in dump["pg_config"].items():
            groups.setdefault(name, set()).update(int(rank) for rank in re.findall(r"\d+", config["ranks"]))
    for name, ranks in groups.items():
        lagging = _lagging(dumps, name, ranks)
        if lagging:
            missing[name] = lagging
    order = {name: position for position, name in enumerate(_by_appearance(dumps))}
    todo = sorted(missing, key=lambda name: (-len(groups[name]), order.get(name, len(order))))
    named: set[int] = set()
    done: set[str] = set()
    for name in todo:
        if name not in done:
            named |= missing[name]
            done |= {other for other in todo if groups[other] & groups[name]}
    return Said(ranks=frozenset(named))


def _lagging(dumps: Mapping[int, Dump], name: str, ranks: set[int]) -> set[int]:
    enqueued = {
        rank: dump["pg_status"][name]["last_enqueued_collective"]
        for rank, dump in dumps.items()
        if name in dump["pg_status"]
    }
    outstanding = {
        rank
        for rank, dump in dumps.items()
        if any(entry["process_group"][0] == name and not entry["retired"] for entry in dump["entries"])
    }
    if not outstanding:
        return set()  # what it looks at are collectives that are still scheduled
    most = max(enqueued.values())
    return (ranks - outstanding) | {rank for rank, number in enqueued.items() if number < most}


def _by_appearance(dumps: Mapping[int, Dump]) -> list[str]:
    names = [entry["process_group"][0] for rank in sorted(dumps) for entry in dumps[rank]["entries"]]
    return list(dict.fromkeys(names))


# --- Ray


def ray_says(case: Evidence) -> Said:
    """State the rule by which Ray Train's detector had named suspects.

    NCCL's RAS thread counts, in each communicator, how often each rank has launched each kind of collective. Where these
    counts differ and stand still, the kind that differs most tells: whoever has launched less of it than the rank with
    the most is a suspect. So is a rank whose RAS thread does not answer. A stopped process does not; one that holds the
    interpreter lock does.
    """
    known = {
        rank.rank: rank.snapshot.entries for rank in case.ranks if rank.snapshot is not None and rank.snapshot.entries
    }
    mute = {rank.rank for rank in case.ranks if rank.snapshot is not None and (rank.snapshot.state or "") in ("T", "t")}
    named: set[int] = set(mute) if known else set()
    for group, ranks in members(known, world=[rank.rank for rank in case.ranks]).items():
        counts = {rank: _launches(case, known, rank, group) for rank in ranks - mute}
        kinds = {kind for each in counts.values() if each is not None for kind in each}
        told = {rank: each for rank, each in counts.items() if each is not None}
        spread = {kind: _spread([each[kind] for each in told.values()]) for kind in kinds}
        widest = max(sorted(spread), key=lambda kind: spread[kind], default=None)
        if widest is not None and spread[widest]:
            most = max(each[widest] for each in told.values())
            named |= {rank for rank, each in told.items() if each[widest] < most}
    return Said(ranks=frozenset(named))


def _spread(counts: Sequence[int]) -> int:
    return max(counts) - min(counts)


def _launches(
    case: Evidence, known: Mapping[int, Sequence[FlightRecorderEntry]], rank: int, group: str
) -> Counter[str] | None:
    """Return how often a rank has launched each kind; of one without entries as often as its counter says."""
    begin = max((_begin(entries, group) for entries in known.values()), default=0)
    own = known.get(rank)
    if own is None:
        look = next(each.snapshot for each in case.ranks if each.rank == rank)
        until = look.seq.get(group, (0, 0))[0] if look is not None else 0
        other = next(iter(known.values()), ())
        own = [entry for entry in other if entry["number"] <= until] if until else None
    if own is None:
        return None
    return Counter(
        _RAS_COUNTS.get(entry["op"], entry["op"])
        for entry in own
        if entry["group"] == group and entry["number"] >= max(begin, 1) and not entry["p2p"]
    )


def _begin(entries: Sequence[FlightRecorderEntry], group: str) -> int:
    return min(
        (entry["number"] for entry in entries if entry["group"] == group and entry["number"] and not entry["p2p"]),
        default=0,
    )
