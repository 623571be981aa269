"""What `clusterctl why` says of runs that go wrong: `python -m tests.lab.why` (`make why`).

    python -m tests.lab.why --seed 7                        # every kind and every control once
    python -m tests.lab.why --kinds sleeps,raises --rounds 5
    python -m tests.lab.why --kinds controls --rounds 20

Each run has two nodes of its own with two ranks each, and a rank drawn at random that does it.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tests.lab.lab import Lab
from tests.lab.spec import NodeSpec
from tests.lab.why import frameworks, untraced
from tests.lab.why.kinds import CONTROLS, KINDS, Place
from tests.lab.why.play import PER_NODE, Told, play

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.node import Node

NODES_EACH = 2
GOALS = (("named exactly", 95.0), ("class right", 90.0))


def main() -> int:
    """Play, print a line for each run and the sums; 1 where something wrong was said to be certain, or a goal missed."""
    # A plain `kill` of this process tears down as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    asked = _arguments()
    chance = random.Random(asked.seed)
    todo = [(kind, chance.randrange(NODES_EACH * PER_NODE)) for _ in range(asked.rounds) for kind in asked.kinds]
    if not frameworks.there():
        left = [kind for kind, _ in todo if _place(kind) is Place.FRAMEWORKS]
        todo = [each for each in todo if each[0] not in left]
        print(f"without CLUSTERCTL_HEAVY are left out: {', '.join(left) or 'none'}")
    print(f"seed {asked.seed}, {len(todo)} runs", flush=True)
    told = _play_all(todo, asked.jobs, asked.keep, asked.bundles)
    return _summed(told)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.why", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kinds", default="all", help="names with commas between them, `faults`, `controls` or `all`")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=3, help="how many runs at once")
    parser.add_argument("--keep", type=Path, help="keep the state of the head there")
    parser.add_argument("--bundles", type=Path, help="save what is known of each fault there, to judge it again")
    asked = parser.parse_args()
    every = {"all": (*KINDS, *CONTROLS), "faults": tuple(KINDS), "controls": CONTROLS}
    asked.kinds = every.get(asked.kinds) or tuple(asked.kinds.split(","))
    if unknown := set(asked.kinds) - {*KINDS, *CONTROLS}:
        parser.error(f"no such kind: {', '.join(sorted(unknown))}")
    return asked


def _play_all(todo: Sequence[tuple[str, int]], jobs: int, keep: Path | None, bundles: Path | None) -> list[Told]:
    with tempfile.TemporaryDirectory(prefix="clusterctl-why-") as temporary, Lab() as lab:
        folder = keep or Path(temporary)
        if bundles is not None:
            bundles.mkdir(parents=True, exist_ok=True)
            bundles = bundles.resolve()
        env = lab.head_env(XDG_STATE_HOME=str(folder / "state"))
        free = _places(lab, [kind for kind, _ in todo], jobs)

        def one(number: int, kind: str, culprit: int) -> Told:
            mine = free[_place(kind)]
            made = mine.get()
            try:
                told = play(kind, culprit, folder / f"{number}" / kind, env, made, bundles)
            except Exception as error:
                told = Told(kind, culprit, NODES_EACH * PER_NODE, {}, trouble=f"{type(error).__name__}: {error}")
            mine.put(made)
            print(told, flush=True)
            return told

        with ThreadPoolExecutor(jobs) as pool:
            futures = [pool.submit(one, number, *each) for number, each in enumerate(todo)]
            told = [future.result() for future in futures]
        lab.end_head_processes()
        return told


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


def _summed(told: Sequence[Told]) -> int:
    faults, controls = [t for t in told if t.kind in KINDS], [t for t in told if t.kind in CONTROLS]
    shares = [
        100.0 * sum(values) / (len(faults) or 1) for values in ([t.exact for t in faults], [t.classed for t in faults])
    ]
    wrong, alarms = [t for t in faults if t.wrong_at_certain], [t for t in controls if not t.calm]
    print(f"\n{len(faults)} faults of {len({t.kind for t in faults})} kinds")
    good = True
    for (name, goal), share in zip(GOALS, shares, strict=True):
        print(f"  {name:<16} {share:5.1f} %  (goal {goal:g} %)")
        good = good and (share >= goal or not faults)
    print(f"  wrong at certain {len(wrong)}: {', '.join(t.kind for t in wrong)}")
    print(f"{len(controls)} controls, alarms {len(alarms)}: {', '.join(t.kind for t in alarms)}")
    return 0 if good and not wrong and not alarms else 1


if __name__ == "__main__":
    sys.exit(main())
