"""Durations and sizes read what people write, and write what they read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.units import UnitError, duration, format_duration, format_size, size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (90, 90.0),
        ("90", 90.0),
        ("90s", 90.0),
        ("10m", 600.0),
        ("1h30m", 5400.0),
        ("2d", 172800.0),
        ("250ms", 0.25),
        (1.5, 1.5),
    ],
)
def test_durations_are_seconds(written: object, seconds: float) -> None:
    assert duration(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "ten", "10 m", "1m30", "22:00", "-5", -5, True, None, [1], float("nan"), 1e300, "9" * 500]
)
def test_other_things_are_no_durations(written: object) -> None:
    with pytest.raises(UnitError):
        duration(written)


@pytest.mark.parametrize(
    ("written", "count"),
    [(5, 5), ("5", 5), ("500MiB", 500 * 2**20), ("10GB", 10**10), ("1.5 GiB", 3 * 2**29), ("1kB", 1000), ("7B", 7)],
)
def test_sizes_are_bytes(written: object, count: int) -> None:
    assert size(written) == count


@pytest.mark.parametrize("written", ["", "5M", "5 miles", -5, 1.5, True, None, "9" * 50 + "PB"])
def test_other_things_are_no_sizes(written: object) -> None:
    with pytest.raises(UnitError):
        size(written)


@given(st.integers(0, 10**8))
def test_whole_seconds_are_read_back(seconds: int) -> None:
    assert duration(format_duration(seconds)) == seconds


@given(st.integers(1, 10**6))
def test_milliseconds_are_read_back(milliseconds: int) -> None:
    assert duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


@given(st.integers(0, 2**59))
def test_sizes_are_read_back(count: int) -> None:
    assert size(format_size(count)) == count
