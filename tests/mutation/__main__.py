"""How strong the tests of the deciding modules are: `python -m tests.mutation`.

Draws mutants at random, the same number of each module, and runs the module's narrow tests with each. A mutant that no
test minds has survived, unless `equivalent.yaml` says why it makes no difference.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice, repeat, zip_longest
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import yaml

from tests.mutation import trial
from tests.mutation.modules import TESTS
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.reached import Lines, has_processes, outermost, tests_for
from tests.mutation.trial import Trial, Verdict

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

EQUIVALENT = Path(__file__).with_name("equivalent.yaml")
Change = tuple[str, str, str]


def main() -> int:
    """Draw, try, report; return the exit code."""
    asked = _arguments()
    every = {module: mutants_of(module, trial.source_of(module)) for module in asked.modules or TESTS}
    equivalent = _equivalent()
    if stale := _stale(equivalent, every):
        print("error: equivalent.yaml names mutants that there are not (any more):", *stale, sep="\n  ")
        return 2
    drawn = draw(every, asked.count, random.Random(asked.seed), equivalent)
    print(f"{len(drawn)} of {sum(map(len, every.values()))} mutants, seed {asked.seed}", flush=True)
    trials = _try_all(drawn, asked.jobs)
    return _report(trials, every, equivalent, least=asked.least)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"only these, of {', '.join(TESTS)}")
    parser.add_argument("--count", type=int, default=200, help="how many to draw; 0 for all")
    parser.add_argument("--seed", type=int, default=1, help="the same seed draws the same mutants of the same code")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0))))
    parser.add_argument("--least", type=float, default=92.0, metavar="PERCENT", help="fail below this")
    asked = parser.parse_args()
    if unknown := set(asked.modules) - TESTS.keys():
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    return asked


# --- drawing


def draw(
    every: dict[str, list[Mutant]], count: int, chance: random.Random, equivalent: dict[Change, str]
) -> list[Mutant]:
    """Return `count` mutants that are not known as equivalent, module by module in turn; all where it is 0."""
    shuffled = [chance.sample(mutants, len(mutants)) for mutants in every.values()]
    turns = (mutant for turn in zip_longest(*shuffled) for mutant in turn if mutant is not None)
    differing = (mutant for mutant in turns if mutant.change not in equivalent and mutant.compiles)
    return list(islice(differing, count or None))


def _equivalent() -> dict[Change, str]:
    entries = yaml.safe_load(EQUIVALENT.read_text()) or []
    return {(entry["module"], entry["was"].strip(), entry["becomes"].strip()): entry["why"] for entry in entries}


def _stale(equivalent: dict[Change, str], every: dict[str, list[Mutant]]) -> list[str]:
    there = {mutant.change for mutants in every.values() for mutant in mutants}
    return [f"{change[0]}: {change[1]}" for change in equivalent if change[0] in every and change not in there]


# --- trying


def _try_all(drawn: Sequence[Mutant], jobs: int) -> list[Trial]:
    modules = {mutant.module for mutant in drawn}
    quick = {module for module in modules if not any(map(has_processes, TESTS[module]))}
    trials: list[Trial] = []
    with (
        TemporaryDirectory(prefix="clusterctl-mutants-") as base,
        ProcessPoolExecutor(jobs, get_context("spawn"), trial.settle, (base,)) as pool,
    ):
        # What takes longest comes last.
        for group in (quick, modules - quick):
            trials += _try(pool, [mutant for mutant in drawn if mutant.module in group], sorted(group), len(trials))
    return trials


def _try(pool: ProcessPoolExecutor, drawn: Sequence[Mutant], modules: Sequence[str], before: int) -> list[Trial]:
    seconds, lines = _whole(pool, modules)
    limits = {module: 30.0 + 4 * _seconds_of(TESTS[module], seconds) for module in modules}
    waiting = [pool.submit(trial.try_mutant, m, tests_for(m, lines, TESTS[m.module]), limits[m.module]) for m in drawn]
    return [_told(done.result(), number) for number, done in enumerate(as_completed(waiting), before + 1)]


def _whole(pool: ProcessPoolExecutor, modules: Sequence[str]) -> tuple[dict[str, float], Lines]:
    """Run all tests of the modules once without a mutant; return how long each place takes, and who runs which line."""
    places = outermost(place for module in modules for place in TESTS[module])
    lines: Lines = {module: {} for module in modules}
    seconds: dict[str, float] = {}
    for place, (took, seen) in zip(places, pool.map(trial.baseline, places, repeat(modules)), strict=True):
        print(f"whole      {place}  {took:.1f} s", flush=True)
        seconds[place] = took
        for module, tests_of in seen.items():
            for line, tests in tests_of.items():
                lines[module].setdefault(line, []).extend(tests)
    return seconds, lines


def _seconds_of(places: Sequence[str], seconds: Mapping[str, float]) -> float:
    """Return how long all that holds these places takes."""
    return sum(took for whole, took in seconds.items() if any(f"{place}/".startswith(f"{whole}/") for place in places))


def _told(done: Trial, number: int) -> Trial:
    where = f"{done.mutant.module}:{done.mutant.line}"
    print(f"{number:>4}  {done.verdict.value:<9}  {where}  {done.seconds:.1f} s", flush=True)
    if done.verdict is Verdict.SURVIVED:
        print(*done.mutant.diff, sep="\n", flush=True)
    return done


# --- telling


def _report(
    trials: Sequence[Trial], every: dict[str, list[Mutant]], equivalent: dict[Change, str], *, least: float
) -> int:
    survivors = [t.mutant for t in trials if t.verdict is Verdict.SURVIVED]
    for mutant in sorted(survivors, key=lambda m: (m.module, m.line)):
        print(f"\nsurvived: clusterctl/{mutant.module}.py:{mutant.line}", *mutant.diff, sep="\n")
    print(f"\n{'module':<24}{'killed':>8}{'survived':>10}{'timed out':>11}{'equivalent':>12}{'score':>8}")
    for module in every:
        _print_row(module, [t for t in trials if t.mutant.module == module], sum(m == module for m, *_ in equivalent))
    _print_row("all", trials, len(equivalent))
    return int(score(trials) < least)


def _print_row(name: str, trials: Sequence[Trial], equivalent: int) -> None:
    counts = Counter(t.verdict for t in trials)
    numbers = (
        f"{counts[Verdict.KILLED]:>8}{counts[Verdict.SURVIVED]:>10}{counts[Verdict.TIMED_OUT]:>11}{equivalent:>12}"
    )
    print(f"{name:<24}{numbers}{score(trials):>7.0f}%")


def score(trials: Sequence[Trial]) -> float:
    """Return how many of 100 mutants the tests have noticed; one that makes them hang is noticed too."""
    if not trials:
        return 100.0
    return 100.0 * sum(t.verdict is not Verdict.SURVIVED for t in trials) / len(trials)


if __name__ == "__main__":
    sys.exit(main())
