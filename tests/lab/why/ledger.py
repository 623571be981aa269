"""What was said of each run, written down as soon as it is known: what was cut short goes on where it was."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

from tests.lab.why.kinds import CONTROLS, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from tests.lab.why.play import Told

GOALS: Final = (("named exactly", 95.0), ("class right", 90.0))


@dataclass(frozen=True)
class Entry:
    """What was said of one run, and whether it was right; `number` is its place among the runs of this seed."""

    seed: int
    number: int
    kind: str
    culprit: int
    cls: str
    confidence: str
    ranks: tuple[int, ...]
    exact: bool
    classed: bool
    wrong: bool
    calm: bool
    seconds: float
    words: str

    @property
    def key(self) -> tuple[int, int, str, int]:
        """Which run it is."""
        return self.seed, self.number, self.kind, self.culprit


def entry_of(told: Told, seed: int, number: int, seconds: float) -> Entry:
    """Return what is written down of a run."""
    return Entry(
        seed=seed,
        number=number,
        kind=told.kind,
        culprit=told.culprit,
        cls=told.cls,
        confidence=told.confidence,
        ranks=tuple(sorted(told.ranks)),
        exact=told.exact,
        classed=told.classed,
        wrong=told.wrong_at_certain,
        calm=told.calm,
        seconds=round(seconds, 1),
        words=told.trouble or str(told.verdict.get("summary", "")),
    )


class Ledger:
    """A file with a line a run, and beside it the same as a table (`.md`); in memory alone without a file."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.entries: list[Entry] = []
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                known = json.loads(line)
                self.entries.append(Entry(**{**known, "ranks": tuple(known["ranks"])}))

    def known(self) -> set[tuple[int, int, str, int]]:
        """Return the runs that are written down already."""
        return {entry.key for entry in self.entries}

    def add(self, entry: Entry) -> None:
        """Write a run down. By one thread at a time."""
        self.entries.append(entry)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(entry)) + "\n")
            self._path.with_suffix(".md").write_text("\n".join([*table(self.entries), "", *sums(self.entries), ""]))


def table(entries: Iterable[Entry]) -> list[str]:
    """Return what was said of each run as a table in Markdown, faults in the order of their kinds, then controls."""
    order = {kind: number for number, kind in enumerate((*KINDS, *CONTROLS))}
    lines = ["| kind | said | how sure | rank that did it, ranks named | |", "|---|---|---|---|---|"]
    for entry in sorted(entries, key=lambda entry: (order[entry.kind], entry.seed, entry.number)):
        control = entry.kind in CONTROLS
        good = ("calm" if entry.calm else "ALARM") if control else _judged(entry)
        named = ",".join(map(str, entry.ranks)) or "none"
        lines.append(f"| `{entry.kind}` | `{entry.cls}` | {entry.confidence} | {entry.culprit}, {named} | {good} |")
    return lines


def _judged(entry: Entry) -> str:
    return "WRONG" if entry.wrong else "right" if entry.exact and entry.classed else "not told"


def sums(entries: Sequence[Entry]) -> list[str]:
    """Return the sums over all runs, in lines."""
    faults, controls = (
        [entry for entry in entries if entry.kind in KINDS],
        [entry for entry in entries if entry.kind in CONTROLS],
    )
    wrong = [entry.kind for entry in faults if entry.wrong]
    missed = [entry.kind for entry in faults if not (entry.exact and entry.classed)]
    alarms = [entry.kind for entry in controls if not entry.calm]
    return [
        f"{len(faults)} faults of {len({entry.kind for entry in faults})} kinds",
        *(
            f"  {name:<16} {share:5.1f} %  (goal {goal:g} %)"
            for (name, goal), share in zip(GOALS, shares(faults), strict=True)
        ),
        f"  wrong at certain {len(wrong)}: {', '.join(wrong)}",
        f"  not told         {len(missed)}: {', '.join(missed)}",
        f"{len(controls)} controls, alarms {len(alarms)}: {', '.join(alarms)}",
    ]


def shares(faults: Sequence[Entry]) -> tuple[float, float]:
    """Return the percentages of faults whose culprits were named exactly, and whose class was right."""
    count = len(faults) or 1
    return (
        100.0 * sum(entry.exact for entry in faults) / count,
        100.0 * sum(entry.classed for entry in faults) / count,
    )


def reached(entries: Sequence[Entry]) -> bool:
    """Return whether all goals are reached, nothing wrong was said to be certain, and no control alarmed."""
    faults = [entry for entry in entries if entry.kind in KINDS]
    met = not faults or all(share >= goal for (_, goal), share in zip(GOALS, shares(faults), strict=True))
    return met and not any(entry.wrong for entry in faults) and all(e.calm for e in entries if e.kind in CONTROLS)
