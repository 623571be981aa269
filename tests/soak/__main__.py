"""`python -m tests.soak`: plays weeks and 1,000 restarts, and prints what they take of node and head."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak import node, restarts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.soak.node import Played
    from tests.soak.restarts import Restarted

RANKS = (8, 128)
_REAL = {8: 0.05, 128: 0.25}


def main(arguments: list[str]) -> int:
    """Play, and print tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--hours", type=int, default=720, help="leaps of an hour for each run")
    parser.add_argument("--seconds", type=int, default=300, help="seconds that each run lives through one by one")
    parser.add_argument("--restarts", type=int, default=1000, help="attempts of 8 ranks, as the head sees them")
    parser.add_argument("--node-restarts", type=int, default=1000, help="attempts of 8 ranks on a node")
    parser.epilog = "Of 128 ranks a sixteenth of the hours and of the attempts is played."
    chosen = parser.parse_args(arguments)
    rows: dict[str, list[str]] = {}
    for ranks in RANKS:
        for what, value in _of_ranks(ranks, chosen):
            rows.setdefault(what, []).append(value)
            print(f"{ranks} ranks: {what}: {value}", file=sys.stderr, flush=True)
    print("| a node | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |\n|---|" + "---|" * len(RANKS))
    for what, values in rows.items():
        print(f"| {what} | {' | '.join(values)} |")
    return 0


def _of_ranks(ranks: int, chosen: argparse.Namespace) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder) / name for name in ("run", "node", "head")]
        for part in parts:
            part.mkdir()
        yield from _of_time(
            node.play(
                parts[0],
                ranks,
                seconds=chosen.seconds,
                real=_REAL[ranks],
                hours=chosen.hours * 8 // ranks,
                lines=1e9,
                still=20,
            )
        )
        for who, restarted in restarts.on_node(parts[1], ranks, chosen.node_restarts * 8 // ranks).items():
            yield from _of_restarts(who, restarted)
        yield from _of_restarts("head", restarts.on_head(parts[2], ranks, chosen.restarts * 8 // ranks))


def _of_time(played: Played) -> Iterator[tuple[str, str]]:
    yield "days played; lines", f"{played.days:.0f}; {played.lines:.2g}"
    for kind, written in played.written.items():
        each = f"{written / 1e6 / played.ranks:.2f} MB a rank, {written / 1e6:.0f} MB"
        yield f"{kind} written a day", each if kind in ("samples", "index") else f"{written / 1e6:.0f} MB"
    for kind, size in played.after.disk.items():
        yield f"{kind} held after half of it; in the end", f"{played.before.disk[kind] / 1e6:.1f}; {size / 1e6:.1f} MB"
    yield "descriptors of the supervisor", f"{played.before.descriptors}; {played.after.descriptors}"
    yield "memory of all processes", f"{played.before.memory_mb:.0f}; {played.after.memory_mb:.0f} MB"
    yield "peak of the supervisor", f"{played.peak_mb:.0f} MB"
    yield "processor a day", f"{played.cpu:.0f} s"


def _of_restarts(who: str, one: Restarted) -> Iterator[tuple[str, str]]:
    yield f"{who}: restarts", str(one.restarts)
    if who != "agent":
        yield (
            f"{who}: disk, a restart",
            f"{one.bytes_each / 1e3:.0f} kB, {one.bytes_each / 1e3 / one.ranks:.1f} kB a rank",
        )
    yield f"{who}: descriptors, more in the end", str(one.descriptors)
    yield f"{who}: memory, a restart", f"{one.memory_kb:.1f} kB"
    yield f"{who}: processor, a restart", f"{one.cpu_ms:.0f} ms"
    if one.asked_bytes:
        yield f"{who}: what a reconnect asks for", f"{one.asked_bytes} B"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
