"""What a vendor's library answers where it has no value, in words that hold for every vendor.

    unsupported     the card or the driver has no such thing: nothing to judge
    denied          this user may not ask
    lost            the GPU is no longer there
    reset-required  the GPU works again only after a reset
    power           the GPU lacks power
    corrupted       its configuration memory is corrupted
    timeout         the call ran out of time
    unknown         the driver itself does not know what is wrong
    failed          the call failed for a reason that says nothing of the GPU

The vendor's own code is kept beside the word, for people.
"""

from __future__ import annotations

UNSUPPORTED, DENIED, FAILED = "unsupported", "denied", "failed"
LOST, RESET, POWER, CORRUPTED = "lost", "reset-required", "power", "corrupted"
TIMEOUT, UNKNOWN = "timeout", "unknown"

ODD = frozenset({POWER, TIMEOUT, UNKNOWN})
"""Answers that a healthy GPU gives now and then: asked again before anybody believes them."""
TROUBLE = frozenset({LOST, RESET, POWER, TIMEOUT, UNKNOWN})
"""Answers that speak of the GPU and not of the call."""

_NVML = {
    3: UNSUPPORTED,
    4: DENIED,
    8: POWER,
    10: TIMEOUT,
    11: UNKNOWN,
    13: UNSUPPORTED,
    14: CORRUPTED,
    15: LOST,
    16: RESET,
    25: UNSUPPORTED,
    28: LOST,
    999: UNKNOWN,
}
"""Return codes of NVIDIA's `nvml.h`: 11 is an interrupt problem, 13 and 25 are newer than the driver."""


def of_nvml(code: int) -> str:
    """Return the word for a return code of NVML."""
    return _NVML.get(code, FAILED)
