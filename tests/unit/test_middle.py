"""The middle of values, beside what the standard library says."""

from __future__ import annotations

import statistics

from hypothesis import given
from hypothesis import strategies as st

from clusterctl.middle import median, median_low


@given(st.lists(st.floats(-1e9, 1e9) | st.integers(-1000, 1000), min_size=1))
def test_the_middle_is_that_of_statistics(values: list[float]) -> None:
    assert median(values) == statistics.median(values)


@given(st.lists(st.integers(-1000, 1000), min_size=1))
def test_the_lower_middle_is_that_of_statistics(values: list[int]) -> None:
    assert median_low(values) == statistics.median_low(values)
