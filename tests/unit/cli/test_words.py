"""Times that a person types."""

from __future__ import annotations

from datetime import datetime

import click
import pytest

from clusterctl.cli.option_values import parse_time_option


def at(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


EVENING = at("2026-03-10T22:50")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        pytest.param("10m", at("2026-03-10T22:40"), id="so long ago"),
        pytest.param("22:43:12", at("2026-03-10T22:43:12"), id="a time of day"),
        pytest.param("22:43", at("2026-03-10T22:43"), id="without seconds"),
        pytest.param("22:43:12.250", at("2026-03-10T22:43:12.250"), id="as logs -t prints it"),
        pytest.param("23:30", at("2026-03-09T23:30"), id="later than now: of yesterday"),
        pytest.param("2026-03-01T08:00:00", at("2026-03-01T08:00"), id="a date"),
    ],
)
def test_a_time_is_so_long_ago_or_of_the_clock(text: str, meant: float) -> None:
    assert parse_time_option(text, "--since", now=EVENING) == meant


def test_a_time_of_day_before_the_run_began_is_meant_for_its_last_day() -> None:
    began = at("2026-03-10T22:40")

    assert parse_time_option("23:30", "--until", now=EVENING, run_start=began) == (at("2026-03-10T23:30"))


@pytest.mark.parametrize("text", ["soon", "25:00", "22:4", "1:2:3:4", ""])
def test_what_is_no_time_is_refused_with_the_forms_there_are(text: str) -> None:
    with pytest.raises(click.BadParameter, match="22:43:12"):
        parse_time_option(text, "--since", now=EVENING)
