"""Losses and steps that trainers print."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from clusterctl.logs.printed_values import _EvenPoints, find_printed_values


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("step 24 loss 3.2178 lr 3.0e-04", {"step": 24.0, "loss": 3.2178}),
        ("{'loss': 2.31, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'epoch': 0.1}", {"loss": 2.31}),
        ("{'eval_loss': 1.5e-1, 'eval_runtime': 3.1}", {"eval_loss": 0.15}),
        (
            "100/200 [====>] - loss: 0.5012 - accuracy: 0.91 - val_loss: 0.4",
            {"loss": 0.5012, "val_loss": 0.4},
        ),
        (" iteration      100/  500000 | lm loss: 6.789E+00 | loss scale: 1.0 |", {"step": 100.0, "loss": 6.789}),
        ("[rank0]: step:  10  loss:  7.2  grad_norm:  1.4  mfu: 33%", {"step": 10.0, "loss": 7.2}),
        ("iter 250: loss 1.9921, time 12.04ms", {"step": 250.0, "loss": 1.9921}),
        ("global_step=7 train_loss=1", {"step": 7.0, "train_loss": 1.0}),
        ("loss nan", {}),
        ("loss 1e999", {}),
        ("no loss of data in 3 steps", {}),
        ("flossy 3", {}),
        ("stepping 3 times", {}),
        ("step 1.5", {}),
        ("", {}),
        ("loss " * 100_000, {}),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_the_losses_and_the_step_of_a_line_are_found(line: str, values: dict[str, float]) -> None:
    assert find_printed_values(line) == values


@pytest.mark.parametrize(
    ("line", "values"),
    [
        pytest.param("reward=0.25 after 7", {"reward": 0.25, "step": 7.0}, id="all-groups"),
        pytest.param("reward=0.25", {"reward": 0.25}, id="a-group-that-took-no-part"),
        pytest.param("reward=- after 7", {"step": 7.0}, id="no-number"),
        pytest.param("step 3 loss 1.0", {}, id="not-what-is-found-without-a-pattern"),
    ],
)
def test_a_pattern_names_the_values_itself(line: str, values: dict[str, float]) -> None:
    pattern = re.compile(r"reward=(?P<reward>\S+)(?: after (?P<step>\d+))?")
    assert find_printed_values(line, pattern) == values


@pytest.mark.parametrize("count", [1, 2, 400, 401, 5000, 20_000])
def test_a_long_series_keeps_points_that_are_evenly_spread_and_the_last(count: int) -> None:
    points = _EvenPoints()
    for number in range(count):
        points.add((float(number), 0.0))

    times = [time for time, _ in points.list()]
    gaps = {later - earlier for earlier, later in pairwise(times[:-1])}
    assert (times[0], times[-1]) == (0.0, count - 1)
    assert len(times) <= 402
    assert len(gaps) <= 1
