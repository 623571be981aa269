"""What a node samples of its workers, how much of it is written down, and how much of that is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol.run_files import find_first_kept_byte
from clusterctl.agent.supervisor.sampling import SampleFile, SampleThinning


def inside(age: float = 0.3, *, of_file: float = 0.5, phase: Any = None) -> dict[str, Any]:
    return {"progress_age_s": age, "age_s": of_file, "phase": phase}


def sample(time: float, *insides: dict[str, Any] | None, alive: bool = True) -> dict[str, Any]:
    return {"m": time, "ranks": {str(r): {"alive": alive, "inside": said} for r, said in enumerate(insides)}}


def written(
    steadiness: SampleThinning, times: list[int], *insides: dict[str, Any] | None, alive: bool = True
) -> list[int]:
    return [time for time in times if not steadiness.should_skip(sample(time, *insides, alive=alive))]


def test_once_all_ranks_have_moved_for_a_minute_one_sample_in_five_is_written() -> None:
    times = list(range(0, 120, 2))

    assert written(SampleThinning(), times, inside(), inside()) == [*range(0, 60, 2), *range(68, 120, 10)]


@pytest.mark.parametrize(
    ("changed", "alive"),
    [
        pytest.param(inside(4.1), True, id="a rank falls behind"),
        pytest.param(inside(of_file=11.0), True, id="a rank is not heard from inside"),
        pytest.param(inside(phase={"name": "save"}), True, id="a phase begins"),
        pytest.param(None, True, id="nothing is said from inside"),
        pytest.param({**inside(), "progress_age_s": None}, True, id="no progress yet"),
        pytest.param(inside(), False, id="a rank has ended"),
    ],
)
def test_every_sample_counts_as_soon_as(changed: dict[str, Any] | None, alive: bool) -> None:
    steadiness = SampleThinning()
    written(steadiness, list(range(0, 100, 2)), inside(), inside())
    times = list(range(100, 110, 2))

    assert written(steadiness, times, inside(), changed, alive=alive) == times


def test_a_sample_says_whether_others_before_it_may_be_missing() -> None:
    steadiness = SampleThinning()
    said = []
    for time in range(0, 70, 2):
        one = sample(time, inside())
        if not steadiness.should_skip(one):
            said.append((time, one["steady"]))
    assert said == [*((time, False) for time in range(0, 60, 2)), (68, True)]


@given(st.integers(0, 10_000), st.integers(2, 1000))
def test_of_a_file_that_is_cut_from_its_front_the_end_is_kept_and_never_more_than_allowed(size: int, most: int) -> None:
    first = find_first_kept_byte(size, most)

    assert 0 <= first <= size
    assert size - first < 2 * (most // 2)
    assert first == 0 or size - first >= most // 2


def test_the_space_of_samples_that_are_cut_off_is_given_back(tmp_path: Path) -> None:
    path, most = tmp_path / "samples.jsonl", 64 << 10
    samples = SampleFile(str(path), most)
    for number in range(4000):
        samples.append(0, "activity", {"number": number, "filler": "x" * 200})
        assert path.stat().st_blocks * 512 <= most + (8 << 10)
    first = find_first_kept_byte(path.stat().st_size, most)
    assert first > 8 * most
    lines = path.read_bytes()[first:].splitlines()[1:]
    assert [json.loads(line)["number"] for line in lines] == list(range(4000 - len(lines), 4000))
