"""Who is missing where nothing is counted: by connections between ranks, by stacks, by what the kernel says."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from clusterctl.why import collectives, links
from clusterctl.why.places import Doing, at_network, waits_for
from clusterctl.why.seen import WAITS, because, computes, how_absent, ranks_named, wait_of, why_absent
from clusterctl.why.verdict import Class, Confidence

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clusterctl.why.seen import Seen
    from clusterctl.why.verdict import Verdict


def by_links(seen: Seen) -> Verdict | None:
    """Ranks that talk over sockets of their own: the one that others read from, and that reads from nobody."""
    if collectives.counted(seen.looks):
        return None
    reads = links.awaited(seen.looks, seen.nodes)
    circle = sorted(rank for rank in reads if _returns(reads, rank))
    if circle:
        return seen.verdict(
            Class.DEADLOCK,
            Confidence.LIKELY,
            f"{ranks_named(circle)} wait to read from each other",
            circle,
            lambda rank: f"it reads from rank {reads[rank]}",
        )
    roots = sorted(set(reads.values()) - set(reads))
    held = list(reads)
    if not roots:
        return None
    apart = [rank for rank in seen.looks if rank not in reads and rank not in roots]
    named = sorted({*roots, *apart})
    return seen.verdict(
        how_absent(seen, named),
        Confidence.LIKELY if len(named) == 1 else Confidence.AMBIGUOUS,
        f"{seen.called(named)} sent nothing, and {wait_of(sorted(held))} to read from it{because(seen, named)}",
        named,
        lambda rank: why_absent(seen, rank),
    )


def _returns(reads: Mapping[int, int], rank: int) -> bool:
    """Return whether a chain of waiting leads back to where it begins."""
    at: int | None = rank
    for _ in reads:
        at = reads.get(at) if at is not None else None
        if at == rank:
            return True
    return False


def odd_one(seen: Seen) -> Verdict | None:
    """Without numbers: most ranks wait in the same operation, and a few are elsewhere."""
    waits = [rank for rank, place in seen.places.items() if place.doing in WAITS and not computes(seen.looks[rank])]
    if not waits and not collectives.counted(seen.looks):
        waits = [rank for rank, look in seen.looks.items() if at_network(look)]
    others = [rank for rank in seen.places if rank not in waits and seen.places[rank].doing is not Doing.UNKNOWN]
    if waits and others and len(others) <= len(waits):
        cls = how_absent(seen, others)
        return seen.verdict(
            cls,
            Confidence.LIKELY if len(others) == 1 or 2 * len(others) < len(waits) else Confidence.AMBIGUOUS,
            f"{seen.called(others)} is where no other rank is; {wait_of(waits)}" + because(seen, others),
            others,
            lambda rank: why_absent(seen, rank),
        )
    signatures = Counter((place.where, place.op) for place in seen.places.values())
    if len(signatures) < 2 or len(seen.places) < 3:
        return None
    rare = [rank for rank, place in seen.places.items() if signatures[place.where, place.op] == 1]
    most = max(signatures.values())
    if len(rare) != 1 or most < len(seen.places) - 1:
        return None
    alike = seen.places[rare[0]].doing in WAITS
    if alike and collectives.counted(seen.looks):
        return None  # the numbers say that it is not in another one; it may belong to another group
    return seen.verdict(
        Class.MISMATCH if alike else how_absent(seen, rare),
        Confidence.LIKELY,
        f"{seen.called(rare)} is where no other rank is" + because(seen, rare),
        rare,
        lambda rank: why_absent(seen, rank),
    )


def by_kernel(seen: Seen) -> Verdict | None:
    """Without stacks and numbers: what the kernel says that most ranks wait for, and one does not."""
    if len(seen.looks) < 3 or any(look.frames for look in seen.looks.values()) or collectives.counted(seen.looks):
        return None
    does = {rank: waits_for(look) or look.wchan or "" for rank, look in seen.looks.items()}
    (usual, most), *rest = Counter(does.values()).most_common()
    odd = [rank for rank, words in does.items() if words != usual]
    if not odd or not rest or most < 2 or most < len(odd):
        return None
    return seen.verdict(
        how_absent(seen, odd),
        Confidence.LIKELY if len(odd) == 1 and waits_for(seen.looks[odd[0]]) else Confidence.AMBIGUOUS,
        f"{ranks_named(odd)} does not wait for what the others wait for{because(seen, odd)}",
        odd if most > len(odd) else list(does),
        lambda rank: why_absent(seen, rank),
    )
