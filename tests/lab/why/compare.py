"""Who is right on the same runs: `python -m tests.lab.why.compare`.

From the bundles that `--bundles` of `python -m tests.lab.why` keeps, or those that are committed, it tells of each kind
with a standstill what `why` says, what torch's own flight-recorder analyser says of the dumps, and what the rules of NVRx
and Ray would. Prints a table, and how many kinds each could judge.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from clusterctl.cli.verdicts import open_bundle
from clusterctl.run.record import saved_verdict, state_reader
from clusterctl.run.rules.why_input import build_why_evidence
from tests.lab.why import dumps, rivals
from tests.lab.why.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.why.evidence_types import Evidence
    from clusterctl.why.verdict import Verdict
    from tests.lab.why.dumps import Dump
    from tests.lab.why.rivals import Said

KEPT: Final = Path(__file__).parents[2] / "unit" / "why" / "kinds"
WHO: Final = ("why", "torch", "NVRx", "Ray")


@dataclass(frozen=True)
class Answer:
    """What one of them says of one run: the ranks that it names, and how that is to be called."""

    ranks: frozenset[int]
    right: bool
    text: str
    judged: bool = True


@dataclass(frozen=True)
class Row:
    """One run: its kind, who did it, what each says, and how torch's analyser ends on the dumps as gloo writes them."""

    kind: str
    wanted: frozenset[int]
    answers: tuple[Answer, ...]
    as_gloo_writes: str = ""


def main() -> int:
    """Print the table and the sums; 1 where nothing could be read."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.why.compare", description="Who is right on the same runs"
    )
    parser.add_argument("--bundles", type=Path, default=KEPT, help="a folder of KIND-RANK.tar.gz")
    parser.add_argument("--all", action="store_true", help="show kinds as well of which there is no dump")
    asked = parser.parse_args()
    rows = [row_of(path) for path in sorted(asked.bundles.glob("*.tar.gz"))]
    print("\n".join(table(rows if asked.all else [row for row in rows if row.answers[1].judged])))
    print("\n".join(["", *sums(rows)]))
    return 0 if rows else 1


def row_of(path: Path) -> Row:
    """Judge one bundle by all of them."""
    kind, _, culprit = path.name.removesuffix(".tar.gz").rpartition("-")
    with open_bundle(path) as run:
        state, _ = state_reader.load_state_and_attendance(run)
        name, evidence = saved_verdict.read_stall_evidence(run, state)
        case = build_why_evidence(state, evidence, evidence_folder=name, stalled=bool(evidence))
        ours = saved_verdict.judge_saved_run(run, state)
    stopped = frozenset(rank for rank, worker in state.workers.items() if worker.stopped)
    expected = KINDS[kind]
    wanted = frozenset(expected.ranks(int(culprit), len(state.workers) or 4, stopped))
    made = dumps.of_case(case)
    raw = rivals.torch_says(dumps.nameless(made), list(made), len(case.ranks)).trouble if made else ""
    answers = (_ours(ours, wanted, expected.classes), *_theirs(case, made, wanted))
    return Row(kind, wanted, answers, raw.partition(":")[0])


def _ours(told: Verdict, wanted: frozenset[int], classes: Sequence[str]) -> Answer:
    ranks = frozenset(one.rank for one in told.culprits if one.rank is not None)
    right = ranks == wanted and told.cls.value in classes
    return Answer(ranks, right, f"{_named(ranks)} `{told.cls.value}`, {told.confidence.value}")


def _theirs(case: Evidence, made: Mapping[int, Dump], wanted: frozenset[int]) -> tuple[Answer, ...]:
    if not made:
        return (Answer(frozenset(), right=False, text="no dump", judged=False),) * 3
    world = len(case.ranks)
    said = [rivals.torch_says(made, order, world) for order in (range(world), range(world - 1, -1, -1))]
    return (
        _by_order(said, wanted),
        _plain(rivals.nvrx_says(made), wanted),
        _plain(rivals.ray_says(case), wanted),
    )


def _by_order(said: Sequence[Said], wanted: frozenset[int]) -> Answer:
    """What torch's analyser names depends on the file that it reads first: right is what is right in both orders."""
    first, second = said
    if first.trouble or second.trouble:
        return Answer(frozenset(), right=False, text=f"ends with {(first.trouble or second.trouble).partition(':')[0]}")
    text = _named(first.ranks)
    if first.more and not first.ranks:
        text += f" ({first.more})"
    if first.ranks != second.ranks:
        text += f"; read the other way round {_named(second.ranks)}"
    return Answer(first.ranks | second.ranks, {first.ranks, second.ranks} == {wanted}, text)


def _plain(said: Said, wanted: frozenset[int]) -> Answer:
    return Answer(said.ranks, said.ranks == wanted, _named(said.ranks))


def _named(ranks: frozenset[int]) -> str:
    return ",".join(map(str, sorted(ranks))) or "nobody"


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as a table in Markdown; what is right stands in bold."""
    lines = ["| kind | did it | " + " | ".join(WHO) + " |", "|---" * (2 + len(WHO)) + "|"]
    for row in rows:
        cells = [f"**{answer.text}**" if answer.right else answer.text for answer in row.answers]
        lines.append(f"| `{row.kind}` | {_named(row.wanted)} | " + " | ".join(cells) + " |")
    return lines


def sums(rows: Sequence[Row]) -> list[str]:
    """Return how many kinds each could judge, and how it did."""
    lines = ["| | kinds judged | right | an innocent rank named | nobody named |", "|---|---|---|---|---|"]
    for place, name in enumerate(WHO):
        judged = [(row, row.answers[place]) for row in rows if row.answers[place].judged]
        kinds = len({row.kind for row, _ in judged})
        right = sum(answer.right for _, answer in judged)
        wrong = sum(not answer.right and bool(answer.ranks - row.wanted) for row, answer in judged)
        silent = sum(not answer.right and not answer.ranks for _, answer in judged)
        lines.append(f"| {name} | {kinds} | {right} of {len(judged)} | {wrong} | {silent} |")
    raw = Counter(row.as_gloo_writes for row in rows if row.as_gloo_writes)
    ends = ", ".join(f"{count} with {error}" for error, count in raw.items())
    return [*lines, "", f"torch's analyser on the same dumps as gloo writes them: {ends or 'no error'}"]


if __name__ == "__main__":
    sys.exit(main())
