"""`python -m tests.soak`: plays weeks and 1,000 restarts, and prints what they take of node and head."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.soak import followed, node, processes, restarts
from tests.soak.files import DAY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.followed import Followed
    from tests.soak.node import Played
    from tests.soak.restarts import Restarted

    Rows = Iterator[tuple[str, str]]

_REAL = {8: 0.05}
_REAL_OF_MANY = 0.5
_INDEX_A_DAY = 16 * DAY


def main(arguments: list[str]) -> int:
    """Play, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128], help="how many a node has, each a column")
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=list(_PARTS), help="what is played")
    parser.add_argument("--seconds", type=int, default=300, help="seconds that each run lives through one by one")
    parser.add_argument("--hours", type=int, default=720, help="leaps of an hour for each run of 8 ranks")
    parser.add_argument("--reconnects", type=int, default=120, help="hours of 8 ranks, each of which ends a connection")
    parser.add_argument("--restarts", type=int, default=1000, help="attempts of 8 ranks, as the head sees them")
    parser.add_argument("--node-restarts", type=int, default=1000, help="attempts of 8 ranks on a node")
    parser.epilog = (
        "Of 128 ranks a sixteenth of the hours and of the attempts is played, and a fifth of the reconnects."
    )
    chosen = parser.parse_args(arguments)
    rows: dict[str, list[str]] = {}
    for ranks in chosen.ranks:
        for part in chosen.parts:
            with tempfile.TemporaryDirectory() as folder:
                for what, value in _PARTS[part](Path(folder), ranks, chosen):
                    rows.setdefault(what, []).append(value)
                    print(f"{ranks} ranks: {what}: {value}", file=sys.stderr, flush=True)
    print("| a node | " + " | ".join(f"{ranks} ranks" for ranks in chosen.ranks) + " |")
    print("|---|" + "---|" * len(chosen.ranks))
    for what, values in rows.items():
        print(f"| {what} | {' | '.join(values)} |")
    return 0


def _node(folder: Path, ranks: int, chosen: argparse.Namespace) -> Rows:
    hours = chosen.hours * 8 // ranks
    real = _REAL.get(ranks, _REAL_OF_MANY)
    played = node.play(folder, ranks, seconds=chosen.seconds, real=real, hours=hours, lines=1e9, still=20)
    yield from _of_time(played)


def _head(folder: Path, ranks: int, chosen: argparse.Namespace) -> Rows:
    hours = chosen.reconnects if ranks == 8 else chosen.reconnects // 5
    real = _REAL.get(ranks, _REAL_OF_MANY)
    yield from _of_head(followed.play(folder, ranks, seconds=chosen.seconds, real=real, hours=hours, lines=360))


def _node_restarts(folder: Path, ranks: int, chosen: argparse.Namespace) -> Rows:
    for who, restarted in restarts.on_node(folder, ranks, chosen.node_restarts * 8 // ranks).items():
        yield from _of_restarts(who, restarted)


def _head_restarts(folder: Path, ranks: int, chosen: argparse.Namespace) -> Rows:
    played = processes.alone(restarts.on_head, folder, ranks, chosen.restarts * 8 // ranks)
    yield from _of_restarts("head", played)


_PARTS: dict[str, Callable[[Path, int, argparse.Namespace], Rows]] = {
    "node": _node,
    "head": _head,
    "node-restarts": _node_restarts,
    "head-restarts": _head_restarts,
}


def _of_time(played: Played) -> Rows:
    ranks = played.ranks
    yield "days played; lines", f"{played.days:.1f}; {played.lines:.2g}"
    yield "ranks that tell no steps, samples a day", _beside(played.written["samples"], played.sample * DAY / 2, ranks)
    yield "the same, index a day", _beside(played.written["index"], _INDEX_A_DAY * ranks, ranks)
    yield "the same, journal a day", _mb(played.written["journal"])
    for kind in ("samples", "index", "output", "journal"):
        yield f"{kind} held after half of it; in the end", _both(played.before.disk[kind], played.after.disk[kind])
    yield "descriptors of the supervisor", f"{played.before.descriptors}; {played.after.descriptors}"
    yield "memory of all processes", f"{played.before.memory_mb:.0f}; {played.after.memory_mb:.0f} MB"
    yield "peak of the supervisor", f"{played.peak_mb:.0f} MB"
    yield "processor a day", f"{played.cpu:.0f} s"


def _of_head(one: Followed) -> Rows:
    expected = {"samples": (100 + 400 * one.ranks) * DAY / 10, "index": _INDEX_A_DAY * one.ranks}
    yield "followed: days; reconnects", f"{one.days:.1f}; {one.after.reconnects}"
    for kind, formula in expected.items():
        for where, written in (("node", one.on_node), ("head", one.on_head)):
            yield f"ranks that tell steps, {kind} a day on the {where}", _beside(written[kind], formula, one.ranks)
    for where, written in (("node", one.on_node), ("head", one.on_head)):
        yield f"the same, journal a day on the {where}", _mb(written["journal"])
    yield "the same, events.jsonl a day; of clocks", f"{one.on_head['events'] / 1e3:.0f}; {one.clocks / 1e3:.0f} kB"
    for kind in ("samples", "index", "journal", "events"):
        yield f"{kind} held on the head", _both(one.before.disk[kind], one.after.disk[kind])
    yield "descriptors of the controller", f"{one.before.descriptors}; {one.after.descriptors}"
    yield "memory of the controller", f"{one.before.memory_mb:.0f}; {one.after.memory_mb:.0f} MB"
    yield "peak of the controller", f"{one.before.peak_mb:.0f}; {one.after.peak_mb:.0f} MB"
    yield "a reconnect: asks in; adds to events.jsonl", f"{one.asked} B; {one.events:.0f} B"
    again = (one.came - one.stored) / one.after.reconnects
    yield "a reconnect: more comes than is new", _mb(again)
    yield "bytes that came; files on the head that differ", f"{one.came / 1e6:.0f} MB; {len(one.differing)}"


def _beside(measured: float, formula: float, ranks: int) -> str:
    return f"{measured / 1e6 / ranks:.2f} MB a rank, {measured / 1e6:.0f} MB (formula: {formula / 1e6:.0f} MB)"


def _both(before: float, after: float) -> str:
    return f"{before / 1e6:.1f}; {after / 1e6:.1f} MB"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def _of_restarts(who: str, one: Restarted) -> Rows:
    yield f"{who}: restarts", str(one.restarts)
    if who != "agent":
        each = f"{one.bytes_each / 1e3:.0f} kB, {one.bytes_each / 1e3 / one.ranks:.1f} kB a rank"
        yield f"{who}: disk, a restart", each
    yield f"{who}: descriptors, more in the end", str(one.descriptors)
    yield f"{who}: memory, a restart", f"{one.memory_kb:.1f} kB"
    yield f"{who}: processor, a restart", f"{one.cpu_ms:.0f} ms"
    if one.asked_bytes:
        yield f"{who}: what a reconnect asks for", f"{one.asked_bytes} B"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
