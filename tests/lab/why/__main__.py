"""What `clusterctl why` says of runs that go wrong: `python -m tests.lab.why` (`make why`).

    python -m tests.lab.why --seed 7                        # every kind and every control once
    python -m tests.lab.why --kinds sleeps,raises --rounds 5
    python -m tests.lab.why --kinds controls --rounds 20
    python -m tests.lab.why --seed 7 --jobs 2 --ledger /tmp/why.jsonl   # once more, and it goes on where it was

Each run has two nodes of its own with two ranks each, and a rank drawn at random that does it. After `--minutes` no
further run is begun; one takes a quarter of an hour at the very most.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tests.lab.lab import Lab
from tests.lab.spec import NodeSpec
from tests.lab.why import frameworks, untraced
from tests.lab.why.kinds import CONTROLS, KINDS, Place
from tests.lab.why.ledger import Entry, Ledger, entry_of, reached, sums
from tests.lab.why.play import PER_NODE, Told, play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.node import Node

NODES_EACH = 2
Run = tuple[int, str, int]
"""Its place among the runs of a seed, its kind, and the rank that does it."""


def main() -> int:
    """Play, print a line for each run and the sums; 1 where something wrong was said to be certain, or a goal missed."""
    # A plain `kill` of this process tears down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = _arguments()
    todo = _drawn(asked.seed, asked.rounds, asked.kinds)
    ledger = Ledger(asked.ledger)
    wanted, known = {(asked.seed, *run) for run in todo}, ledger.known()
    left = [run for run in todo if (asked.seed, *run) not in known]
    print(f"seed {asked.seed}, {len(todo)} runs, of which {len(todo) - len(left)} are known", flush=True)
    if left:
        _play_all(left, asked, ledger)
    mine = [entry for entry in ledger.entries if entry.key in wanted]
    print("", *sums(mine), sep="\n")
    if len(mine) < len(todo):
        print(f"{len(todo) - len(mine)} runs were not begun within {asked.minutes:g} minutes: the same again goes on")
    return 0 if reached(mine) and len(mine) >= len(todo) else 1


def _drawn(seed: int, rounds: int, kinds: Sequence[str]) -> list[Run]:
    """Return what is to be played; kinds that cannot be played here are drawn too, so that others stay as they are."""
    chance = random.Random(seed)
    every = [(kind, chance.randrange(NODES_EACH * PER_NODE)) for _ in range(rounds) for kind in kinds]
    todo = [(number, *each) for number, each in enumerate(every)]
    if frameworks.there():
        return todo
    out = dict.fromkeys(kind for _, kind, _ in todo if _place(kind) is Place.FRAMEWORKS)
    print(f"without CLUSTERCTL_HEAVY are left out: {', '.join(out) or 'none'}")
    return [run for run in todo if run[1] not in out]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.why", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default="all", help="names with commas between them, `faults`, `controls` or `all`")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at once")
    parser.add_argument("--ledger", type=Path, help="a line a run is written there, and a table beside it (.md)")
    parser.add_argument("--minutes", type=float, default=240.0, help="begin no run after that")
    parser.add_argument("--keep", type=Path, help="keep the state of the head there")
    parser.add_argument("--bundles", type=Path, help="save what is known of each fault there, to judge it again")
    asked = parser.parse_args()
    every = {"all": (*KINDS, *CONTROLS), "faults": tuple(KINDS), "controls": CONTROLS}
    asked.kinds = every.get(asked.kinds) or tuple(asked.kinds.split(","))
    if unknown := set(asked.kinds) - {*KINDS, *CONTROLS}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    return asked


def _play_all(todo: Sequence[Run], asked: argparse.Namespace, ledger: Ledger) -> None:
    with tempfile.TemporaryDirectory(prefix="clusterctl-why-") as temporary, Lab() as lab:
        folder = asked.keep or Path(temporary)
        if asked.bundles is not None:
            asked.bundles.mkdir(parents=True, exist_ok=True)
            asked.bundles = asked.bundles.resolve()
        env = lab.head_env(XDG_STATE_HOME=str(folder / "state"))
        free = _places(lab, [kind for _, kind, _ in todo], asked.jobs)
        progress = _Progress(len(todo), ledger)
        end = time.monotonic() + 60.0 * asked.minutes

        def one(number: int, kind: str, culprit: int) -> None:
            mine = free[_place(kind)]
            made = mine.get()
            began = time.monotonic()
            if began < end:
                try:
                    told = play(kind, culprit, folder / f"{number}" / kind, env, made, asked.bundles)
                except Exception as error:
                    told = Told(kind, culprit, NODES_EACH * PER_NODE, {}, trouble=f"{type(error).__name__}: {error}")
                progress.ended(told, entry_of(told, asked.seed, number, time.monotonic() - began))
            mine.put(made)

        with ThreadPoolExecutor(asked.jobs) as pool:
            try:
                for future in [pool.submit(one, *each) for each in todo]:
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        lab.end_head_processes()


class _Progress:
    """Prints a line for each run as it ends, with how many there are and for how long they may take still."""

    def __init__(self, count: int, ledger: Ledger) -> None:
        self._count, self._ledger = count, ledger
        self._done = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def ended(self, told: Told, entry: Entry) -> None:
        """Print and write down one run."""
        with self._lock:
            self._done += 1
            self._ledger.add(entry)
            each = (time.monotonic() - self._began) / self._done
            left = each * (self._count - self._done) / 60.0
            print(f"[{self._done:>3}/{self._count}, {left:3.0f} min left] {told}", flush=True)


def _place(kind: str) -> Place:
    return KINDS[kind].place if kind in KINDS else Place.PLAIN


def _places(lab: Lab, kinds: Sequence[str], jobs: int) -> dict[Place, SimpleQueue[list[Node]]]:
    """Return nodes for each place that is needed; of the plain ones as many as there are jobs."""
    specs = {
        Place.PLAIN: NodeSpec(),
        Place.FRAMEWORKS: NodeSpec(expose=(str(frameworks.FOLDER),)),
        Place.UNTRACED: untraced.node(),
    }
    free: dict[Place, SimpleQueue[list[Node]]] = {}
    for place in dict.fromkeys(map(_place, kinds)):
        free[place] = SimpleQueue()
        for _ in range(jobs if place is Place.PLAIN else 1):
            free[place].put(lab.add([specs[place]] * NODES_EACH))
    return free


if __name__ == "__main__":
    sys.exit(main())
