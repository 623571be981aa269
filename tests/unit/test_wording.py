"""Durations, sizes and signals as people read them."""

from __future__ import annotations

import pytest

from clusterctl import wording


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0s"), (0.6, "0.6s"), (42.2, "42s"), (192, "3m12s"), (7500, "2h05m"), (273600, "3d04h"), (59.7, "1m00s")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


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
    assert wording.span(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (65536, "64 KiB"),
        (1.4 * 2**30, "1.4 GiB"),
        (80 * 2**30, "80 GiB"),
        (2**40, "1.0 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_have_as_many_digits_as_tell_something(count: float, text: str) -> None:
    assert wording.size(count) == text


@pytest.mark.parametrize(("number", "text"), [(9, "SIGKILL"), (11, "SIGSEGV"), (35, "signal 35")])
def test_signals_are_called_by_their_names(number: int, text: str) -> None:
    assert wording.signal_name(number) == text
