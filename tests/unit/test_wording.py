"""Durations, sizes and signals as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl import formatting


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (0.6, "0.6s"), (42.2, "42s"), (192, "3m12s"), (7500, "2h05m"), (273600, "3d04h"), (59.7, "1m00s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert formatting.format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.6, "1 s"),
        (40, "40 s"),
        (120, "120 s"),
        (130, "2.2 min"),
        (180, "3 min"),
        (3590, "60 min"),
        (5400, "1.5 h"),
        (172800, "2 d"),
    ],
)
def test_durations_within_a_sentence_are_seconds_as_long_as_people_count_them(seconds: float, text: str) -> None:
    assert formatting.describe_duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (65536, "64 KiB"),
        (1.4 * 2**30, "1.4 GiB"),
        (80 * 2**30, "80 GiB"),
        (2**40, "1.0 TiB"),
        (1023.4, "1023 B"),
        (1048575, "1.0 MiB"),
        (2**20 - 600, "1023 KiB"),
        (2**30 - 1, "1.0 GiB"),
        (2**40 - 1, "1.0 TiB"),
        (9.97 * 2**20, "10 MiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_have_as_many_digits_as_tell_something(count: float, text: str) -> None:
    assert formatting.format_size(count) == text


@given(st.integers(0, 2**50))
def test_no_size_has_1024_of_a_unit_or_more_but_the_largest(count: int) -> None:
    number, unit = formatting.format_size(count).split()
    assert float(number) < 1024 or unit == "TiB"


@pytest.mark.parametrize(("number", "text"), [(9, "SIGKILL"), (11, "SIGSEGV"), (35, "signal 35")])
def test_signals_are_called_by_their_names(number: int, text: str) -> None:
    assert formatting.signal_name(number) == text
