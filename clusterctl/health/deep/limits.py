"""Which differences between rates matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from clusterctl.health.checks.comparison import MAD_TO_DEVIATION

_DEVIATIONS_LOW, _DEVIATIONS_VERY_LOW = 3, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Shares of a reference below which a rate is low or very low.

    A rate must also be 3 or 6 standard deviations below the reference: 15 healthy nodes spread by about 3 %, but nodes
    with other load by far more.

    Attributes:
        warn: For a low rate, in percent below the reference.
        fail: For a very low rate.
    """

    warn: float = 10.0
    fail: float = 20.0

    def is_low(self, rate: float, reference: float, deviation: float) -> bool:
        """Return whether a rate is low, for a standard deviation of healthy rates."""
        return rate < reference - max(reference * self.warn / 100, _DEVIATIONS_LOW * deviation)

    def is_very_low(self, rate: float, reference: float, deviation: float) -> bool:
        """Return whether a rate is very low, for a standard deviation of healthy rates."""
        return rate < reference - max(reference * self.fail / 100, _DEVIATIONS_VERY_LOW * deviation)


def estimate_deviation(rates: Iterable[float]) -> float:
    """Return the standard deviation, estimated so that outliers do not change it (scaled MAD)."""
    known = list(rates)
    middle = median(known)
    return MAD_TO_DEVIATION * median(abs(rate - middle) for rate in known)
