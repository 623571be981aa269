"""What the suite of faults writes down: as each run ends, so that what was cut short goes on where it was."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.lab.why.ledger import Entry, Ledger, entry_of, reached, sums, table
from tests.lab.why.play import Told

if TYPE_CHECKING:
    from pathlib import Path

VERDICT = {"kind": "hang", "class": "NOT_JOINED", "confidence": "certain", "summary": "rank 2 did not join"}


def entry(kind: str = "sleeps", number: int = 0, **more: object) -> Entry:
    told = Told(kind, 2, 4, VERDICT, ranks=frozenset({2}))
    return replace(entry_of(told, 7, number, 30.04), **more)  # type: ignore[arg-type]


def test_what_was_written_is_known_to_whoever_goes_on(tmp_path: Path) -> None:
    first = Ledger(tmp_path / "why.jsonl")
    first.add(entry())
    first.add(entry("spins", 1))

    then = Ledger(tmp_path / "why.jsonl")

    assert then.known() == {(7, 0, "sleeps", 2), (7, 1, "spins", 2)}
    assert then.entries == first.entries


def test_the_table_beside_it_is_whole_after_each_run(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "why.jsonl")
    ledger.add(entry())

    assert "| `sleeps` | `NOT_JOINED` | certain | 2, 2 | right |" in (tmp_path / "why.md").read_text()
    assert "1 faults of 1 kinds" in (tmp_path / "why.md").read_text()


def test_without_a_file_it_is_kept_in_memory() -> None:
    ledger = Ledger(None)
    ledger.add(entry())

    assert len(ledger.entries) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"exact": False}, "not told", id="another rank, and not certain"),
        pytest.param({"exact": False, "wrong": True}, "WRONG", id="another rank, for certain"),
        pytest.param({"classed": False}, "not told", id="another class"),
    ],
)
def test_the_table_tells_what_is_not_right(change: dict[str, object], said: str) -> None:
    assert table([entry(**change)])[-1].endswith(f" {said} |")  # type: ignore[arg-type]


def test_controls_stand_last_and_tell_whether_they_were_calm() -> None:
    lines = table([entry("control_saves", 5, calm=False), entry()])

    assert ["`sleeps`" in lines[2], lines[3].startswith("| `control_saves`"), lines[3].endswith("ALARM |")] == [
        True
    ] * 3


def test_the_goals_are_reached_only_without_a_wrong_word_and_without_an_alarm() -> None:
    right, control = [entry("sleeps", number) for number in range(20)], entry("control_saves", 30, calm=True)

    assert reached([*right, control])
    assert reached([*right, entry("spins", 21, exact=False)])  # 95 of 100
    assert not reached([*right[:5], entry("spins", 21, exact=False)])
    assert not reached([*right, entry("spins", 21, wrong=True)])
    assert not reached([*right, replace(control, calm=False)])


def test_the_sums_name_what_was_not_told() -> None:
    lines = sums([entry(), entry("spins", 1, exact=False), entry("control_saves", 2, calm=True)])

    assert lines[0] == "2 faults of 2 kinds"
    assert lines[1].split()[:3] == ["named", "exactly", "50.0"]
    assert lines[4] == "  not told         1: spins"
    assert lines[5] == "1 controls, alarms 0: "
