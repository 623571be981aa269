"""Durations given on the command line."""

from __future__ import annotations

import click


def parse_duration(text: str | None, option: str) -> float | None:
    """Return seconds, or `None` where nothing was given.

    Raises:
        click.BadParameter: It is no duration.
    """
    if text is None:
        return None
    from clusterctl.config.units import UnitError, duration

    try:
        return duration(text)
    except UnitError as error:
        raise click.BadParameter(str(error), param_hint=option) from error
