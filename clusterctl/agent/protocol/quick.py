"""JSON for a start that is quick: what `json` says, by its parts in C alone.

`json` imports `re` and compiles expressions: a tenth of an agent's start. Where these parts are not there, it does it.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BLANKS = " \t\n\r"


def loads(text: str | bytes) -> Any:
    """Return the value of some JSON; of bytes those of UTF-8.

    Raises:
        ValueError: It is none.
        RecursionError: It is nested too deeply.
    """
    whole = (text if isinstance(text, str) else text.decode("utf-8", "surrogatepass")).strip(_BLANKS)
    try:
        value, end = _scan(whole, 0)
    except StopIteration:
        raise ValueError("this is no JSON") from None
    if end != len(whole):
        raise ValueError("this is JSON and something more")
    return value


def dumps(value: object, *, ascii_only: bool = True) -> str:
    """Return a value as JSON without blanks.

    Args:
        value: What is to be written.
        ascii_only: Write other characters as escapes.

    Raises:
        TypeError: It holds something that JSON has not.
    """
    return "".join((_to_ascii if ascii_only else _to_text)(value, 0))


class _Reading:
    """How the scanner is to read: as `json` does by default."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int
    parse_constant = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}.__getitem__


def _unknown(value: object) -> Any:
    raise TypeError(f"a {type(value).__name__} is nothing that JSON has")


def _parts() -> tuple[Any, Any, Any]:
    """Return what reads JSON, and what writes it in ASCII and as it is."""
    try:
        import _json

        read: Any = _json.make_scanner
        texts = (_json.encode_basestring_ascii, _json.encode_basestring)
        to_ascii, to_text = (
            _json.make_encoder(None, _unknown, text, None, ":", ",", False, False, True) for text in texts
        )
        return read(_Reading), to_ascii, to_text
    except (ImportError, AttributeError, TypeError):
        # Not of CPython, or of one that does it otherwise.
        import json

        def written(*, ascii_only: bool) -> Any:
            encode = json.JSONEncoder(ensure_ascii=ascii_only, separators=(",", ":")).encode
            return lambda value, _level: encode(value)

        return json.JSONDecoder().raw_decode, written(ascii_only=True), written(ascii_only=False)


_scan, _to_ascii, _to_text = _parts()
