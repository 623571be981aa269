"""By which part of their time ranks waited, from four samples of each node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clusterctl.run.rules.rank_timing import have_all_ranks_wait_counts, measure_rank_timings, measure_wait_shares


def sampled(m: float, *, attempt: int = 0, pid: int = 7, looks: int | None = None) -> dict[str, Any]:
    seen = int(4 * m) if looks is None else looks
    inside = {"pid": 7, "beats": 0, "looks": seen, "held": seen // 2, "seq": {"0": [int(m), int(m)]}}
    ranks = {"3": {"alive": True, "pid": pid, "inside": inside}}
    return {"t": m, "m": m, "attempt": attempt, "ranks": ranks, "kind": "activity"}


def written(*samples: dict[str, Any]) -> bytes:
    machine = json.dumps({"t": 1.0, "m": 1.0, "attempt": 0, "kind": "health", "reason": "x" * 2000}) + "\n"
    return "".join(json.dumps(sample) + "\n" + machine for sample in samples).encode()


def waits(*samples: dict[str, Any], attempt: int = 0) -> dict[int, tuple[float, ...] | None]:
    return measure_wait_shares([(samples[-1], written(*samples).split(b"\n"))], attempt)


@pytest.mark.parametrize("seconds", [60, 290, 2000])
def test_four_samples_tell_what_all_of_the_last_minutes_tell(seconds: int) -> None:
    samples = [sampled(m) for m in range(100, 100 + seconds, 5)]
    of_all = measure_rank_timings({"gpu02": written(*samples).splitlines()}, 0, max_lines=10_000)[3].wait_shares

    assert of_all is not None
    assert waits(*samples)[3] == pytest.approx(of_all, abs=0.01)


@pytest.mark.parametrize(
    "samples",
    [
        pytest.param([sampled(100), sampled(105), sampled(110)], id="seen for ten seconds"),
        pytest.param([sampled(100 + m, attempt=m // 195) for m in range(0, 200, 5)], id="a new attempt"),
        pytest.param([sampled(100 + m, pid=7 + m // 195) for m in range(0, 200, 5)], id="another process"),
        pytest.param([sampled(100)], id="one sample"),
    ],
)
def test_of_a_rank_that_was_seen_too_seldom_nothing_is_said(samples: list[dict[str, Any]]) -> None:
    assert waits(*samples, attempt=samples[-1]["attempt"]) == {}


def test_only_the_attempt_that_goes_on_counts() -> None:
    old = [sampled(100 + m) for m in range(0, 200, 5)]
    new = [sampled(300 + m, attempt=1) for m in range(0, 100, 5)]

    assert waits(*old, *new, attempt=1)[3] == pytest.approx((0.5,) * 3)
    assert waits(*old, *new, attempt=2) == {}


def test_a_rank_that_does_not_count_its_looks_leaves_nothing_to_compare() -> None:
    assert have_all_ranks_wait_counts([sampled(100)])
    assert not have_all_ranks_wait_counts([sampled(100), sampled(100, looks=0)])


def test_what_stands_there_besides_samples_is_passed_over() -> None:
    samples = [sampled(100 + m) for m in range(0, 200, 5)]
    torn = b'no sample\n{"kind": "activity", "attempt": 0}\n' + written(*samples) + b'{"kind": "activity"'

    assert measure_wait_shares([(samples[-1], torn.split(b"\n"))], 0)[3] == pytest.approx((0.5,) * 3)
    assert measure_wait_shares([({"kind": "activity"}, torn.split(b"\n"))], 0) == {}
