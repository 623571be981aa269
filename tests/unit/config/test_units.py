"""Durations and sizes read what people write, and write what they read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.config.value_parsers import (
    DURATION_PATTERN,
    SIZE_PATTERN,
    InvalidValueError,
    format_exact_duration,
    format_exact_size,
    parse_duration,
    parse_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(
    "written", ["", "ten", "10 m", "1m30", "22:00", "-5", -5, True, None, [1], float("nan"), 1e300, "9" * 500]
)
def test_other_things_are_no_durations(written: object) -> None:
    with pytest.raises(InvalidValueError):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "count"),
    [(5, 5), ("5", 5), ("500MiB", 500 * 2**20), ("10GB", 10**10), ("1.5 GiB", 3 * 2**29), ("1kB", 1000), ("7B", 7)],
)
def test_sizes_are_bytes(written: object, count: int) -> None:
    assert parse_size(written) == count


@pytest.mark.parametrize("written", ["", "5M", "5 miles", -5, 1.5, True, None, "9" * 50 + "PB"])
def test_other_things_are_no_sizes(written: object) -> None:
    with pytest.raises(InvalidValueError):
        parse_size(written)


@given(st.integers(0, 10**8))
def test_whole_seconds_are_read_back(seconds: int) -> None:
    assert parse_duration(format_exact_duration(seconds)) == seconds


@given(st.integers(1, 10**6))
def test_milliseconds_are_read_back(milliseconds: int) -> None:
    assert parse_duration(format_exact_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000)


@given(st.integers(0, 2**59))
def test_sizes_are_read_back(count: int) -> None:
    assert parse_size(format_exact_size(count)) == count


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0.0, "0s"),
        (90.0, "1m30s"),
        (3600.0, "1h"),
        (2 * 86400.0 + 3600.0 + 61.0, "2d1h1m1s"),
        (0.25, "250ms"),
        (59.5, "59500ms"),
        (60.5, "60.5s"),
        (90.5, "90.5s"),
        (0.0005, "0.001s"),
        (0.2500001, "250ms"),
    ],
)
def test_a_duration_is_written_as_people_write_it(seconds: float, written: str) -> None:
    assert format_exact_duration(seconds) == written


@pytest.mark.parametrize(
    ("count", "written"),
    [
        (0, "0B"),
        (1, "1B"),
        (524_288_000, "500MiB"),
        (1024, "1KiB"),
        (1000, "1kB"),
        (1023, "1023B"),
        (10**10, "10GB"),
        (2**40, "1TiB"),
        (2**50, "1PiB"),
        (10**15, "1PB"),
        (10**12, "1TB"),
        (10**6, "1MB"),
        (2**30, "1GiB"),
    ],
)
def test_a_size_is_written_in_the_largest_unit_that_keeps_it_whole(count: int, written: str) -> None:
    assert format_exact_size(count) == written


DURATION_HINT = "write seconds, or `90s`, `10m`, `1h30m`"
SIZE_HINT = "write bytes, or `500MiB`, `10GB`"


@pytest.mark.parametrize(
    ("read", "written", "said", "hint"),
    [
        pytest.param(parse_duration, "ten", "`ten` is not a duration", DURATION_HINT, id="a word"),
        pytest.param(parse_duration, float("nan"), "`nan` is not a duration", DURATION_HINT, id="not a number"),
        pytest.param(parse_duration, True, "`true` is not a duration", DURATION_HINT, id="a truth"),
        pytest.param(parse_duration, None, "`None` is not a duration", DURATION_HINT, id="nothing"),
        pytest.param(parse_duration, [1], "a list is not a duration", DURATION_HINT, id="a list"),
        pytest.param(parse_duration, {"a": 1}, "a mapping is not a duration", DURATION_HINT, id="a mapping"),
        pytest.param(parse_duration, "x" * 40, f"`{'x' * 40}` is not a duration", DURATION_HINT, id="forty characters"),
        pytest.param(
            parse_duration, "x" * 41, f"`{'x' * 37}...` is not a duration", DURATION_HINT, id="more than forty"
        ),
        pytest.param(
            parse_duration, "0" * 65, f"`{'0' * 37}...` is not a duration", DURATION_HINT, id="too many digits"
        ),
        pytest.param(parse_duration, -0.5, "a duration must not be negative", None, id="negative"),
        pytest.param(
            parse_duration,
            "3660d1s",
            "must not be longer than ten years",
            "if there should be no limit, leave the key out",
            id="beyond ten years",
        ),
        pytest.param(
            parse_duration,
            10**400,
            "must not be longer than ten years",
            "if there should be no limit, leave the key out",
            id="beyond a float",
        ),
        pytest.param(parse_size, "5 miles", "`5 miles` is not a size", SIZE_HINT, id="miles"),
        pytest.param(parse_size, 1.5, "`1.5` is not a size", SIZE_HINT, id="half a byte"),
        pytest.param(parse_size, False, "`false` is not a size", SIZE_HINT, id="a truth for a size"),
        pytest.param(parse_size, "1" * 65, f"`{'1' * 37}...` is not a size", SIZE_HINT, id="a size of too many digits"),
        pytest.param(
            parse_size,
            "5m",
            "`5m` has an ambiguous unit",
            "write `5MB` (powers of 1000) or `5MiB` (powers of 1024)",
            id="which unit",
        ),
        pytest.param(
            parse_size,
            "2K",
            "`2K` has an ambiguous unit",
            "write `2KB` (powers of 1000) or `2KiB` (powers of 1024)",
            id="thousands, or not quite",
        ),
        pytest.param(parse_size, -1, "a size must not be negative", None, id="a negative size"),
        pytest.param(parse_size, 2**60, "must be less than 2**60 bytes", None, id="2**60 bytes"),
    ],
)
def test_a_refusal_names_what_was_written_and_says_how_to_write_it(
    read: Callable[[object], object], written: object, said: str, hint: str | None
) -> None:
    with pytest.raises(InvalidValueError) as caught:
        read(written)

    assert (str(caught.value), caught.value.hint) == (said, hint)


def test_the_longest_and_largest_are_taken() -> None:
    assert parse_duration("3660d") == parse_duration(3660 * 86400) == 3660 * 86400.0
    assert parse_duration("0" * 63 + "5") == 5.0
    assert parse_size(2**60 - 1) == 2**60 - 1
    assert parse_size("0" * 63 + "5") == 5
    assert parse_size(" 5 GiB ") == 5 * 2**30
    assert parse_duration(0) == parse_size(0) == 0
    assert parse_duration("1.5h250ms") == 5400.25


@pytest.mark.parametrize("unit", ["kB", "KB", "KiB", "MB", "MiB", "GB", "GiB", "TB", "TiB", "PB", "PiB"])
def test_every_unit_is_its_power(unit: str) -> None:
    base = 1024 if "i" in unit else 1000
    assert parse_size(f"3{unit}") == 3 * base ** ("KMGTP".index(unit[0].upper()) + 1)


def refusal(read: Callable[[object], object], written: object) -> str:
    """Why it is refused; nothing where it is taken."""
    try:
        read(written)
    except InvalidValueError as error:
        return str(error)
    return ""


@given(st.from_regex(DURATION_PATTERN, fullmatch=True).filter(lambda text: len(text) <= 64))
def test_what_the_schema_takes_for_a_duration_is_one_or_too_long(written: str) -> None:
    assert refusal(parse_duration, written) in ("", "must not be longer than ten years")


@given(st.from_regex(SIZE_PATTERN, fullmatch=True).filter(lambda text: len(text) <= 64))
def test_what_the_schema_takes_for_a_size_is_one_or_larger_than_any_disk(written: str) -> None:
    assert refusal(parse_size, written) in ("", "must be less than 2**60 bytes")
