"""JSON out, without `json`: importing that would cost a short script more than everything else here."""

from __future__ import annotations


def encode(value: object) -> str:
    """A value made of dict, list, tuple, str, int, float, bool and `None` as ASCII JSON; anything else as its text."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        finite = value == value and value not in (float("inf"), float("-inf"))  # noqa: PLR0124  (NaN)
        return float.__repr__(value) if finite else "null"
    if isinstance(value, dict):
        return "{" + ",".join(f"{_text(str(key))}:{encode(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(encode(item) for item in value) + "]"
    return _text(str(value))


def _text(text: str) -> str:
    plain = text[:200]
    if not (plain.isascii() and plain.isprintable() and '"' not in plain and "\\" not in plain):
        units = plain.encode("utf-16-be", "surrogatepass")
        plain = "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
    return f'"{plain}"'
