"""Durations and sizes as people write them."""

from __future__ import annotations

import math
import re

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|[dhms]))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|[dhms])")
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_LONGEST = 10 * 366 * 86400.0

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")
_BYTES = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base ** (power + 1)
    for power, prefix in enumerate("kmgtp")
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_LARGEST = 2**60

DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|[dhms])?|([0-9]+(\.[0-9]+)?(ms|[dhms]))+)$"
SIZE_PATTERN = r"^[0-9]+(\.[0-9]+)? *(([kKmMgGtTpP][iI]?)?[bB])?$"


class UnitError(ValueError):
    """Not a duration or size; `hint` says how one is written."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


def duration(value: object) -> float:
    """Read `90`, `90s`, `10m`, `1h30m`, `250ms` or `2d` as seconds.

    Raises:
        UnitError: It is something else, negative, or longer than ten years.
    """
    seconds = _seconds(value)
    if seconds is None or not math.isfinite(seconds):
        raise UnitError(f"{_shown(value)} is not a duration", "write seconds, or `90s`, `10m`, `1h30m`")
    if seconds < 0:
        raise UnitError("a duration cannot be negative")
    if seconds > _LONGEST:
        raise UnitError("longer than ten years", "leave it out for no limit, where that is the default")
    return seconds


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if not isinstance(value, str):
        # An integer of many digits does not fit a float; it is refused as too long, whatever it was.
        return _LONGEST * 2 if value > _LONGEST else float(value)
    if len(value) > 64:
        return None
    if _DURATION.fullmatch(value):
        return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(value))
    return float(value) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value) else None


def size(value: object) -> int:
    """Read `500MiB`, `10GB` or a number of bytes.

    Raises:
        UnitError: It is something else, negative, or 2**60 and more.
    """
    count = _byte_count(value)
    if count < 0:
        raise UnitError("a size cannot be negative")
    if count >= _LARGEST:
        raise UnitError("larger than any disk")
    return count


def _byte_count(value: object) -> int:
    wrong = UnitError(f"{_shown(value)} is not a size", "write bytes, or `500MiB`, `10GB`")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str) or len(value) > 64:
        raise wrong
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise wrong
    number, unit = match[1], match[2].lower()
    if unit in {"k", "m", "g", "t", "p"}:
        hint = f"write `{number}{unit.upper()}B` (powers of 1000) or `{number}{unit.upper()}iB` (powers of 1024)"
        raise UnitError(f"`{value}` does not say which unit it is", hint)
    if unit not in _BYTES:
        raise wrong
    return int(float(number) * _BYTES[unit]) if "." in number else int(number) * _BYTES[unit]


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"`{value if len(value) <= 40 else value[:37] + '...'}`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else f"`{value}`"


def format_duration(seconds: float) -> str:
    """Write seconds so that `duration` reads the same number: `90.0` gives `1m30s`, `0.25` gives `250ms`."""
    if seconds != int(seconds):
        milli = round(seconds * 1000, 3)
        return f"{int(milli)}ms" if milli == int(milli) and seconds < 60 else f"{seconds:.3f}".rstrip("0") + "s"
    rest, parts = int(seconds), []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        parts += [f"{count}{unit}"] if count else []
    return "".join(parts) or "0s"


def format_size(count: int) -> str:
    """Write bytes in the largest unit that keeps the number whole: `524288000` gives `500MiB`."""
    for unit in ("PiB", "PB", "TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"):
        if count and count % _BYTES[unit.lower()] == 0:
            return f"{count // _BYTES[unit.lower()]}{unit}"
    return f"{count}B"
