"""Sanitizes all output: only clusterctl's own styles and line ends pass.

Lines contain texts of clusterctl and texts of nodes, workers, files and users. clusterctl marks its own styles by a
random number that only this process knows. `sanitize_line` removes the number. Every other character that controls a
terminal or misleads a reader is made visible. Text after a line break within a line is indented, so that it cannot look
like a line of clusterctl.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

from clusterctl.logs.safe_text import CONTROL_CHARACTERS, STRAY_JOINER, escape_character

CONTINUED = "    "
"""The indent of all lines of a text but the first."""

_NUMBER = int.from_bytes(os.urandom(8), "big")
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")

# Styles of other programs are removed instead of made visible, because they are harmless and frequent. A sequence with
# more than 64 characters is not removed, because its end might be in a text of clusterctl or in another line.
_CONTROL_SEQUENCE = re.compile(
    rf"[\x1b\n{CONTROL_CHARACTERS}](?:(?<=\x1b)\[(?:(?P<ours>[0-9;:]{{0,64}});{_NUMBER}|(?P<style>[0-9;:]{{0,64}}))m|{STRAY_JOINER})"
)


def ansi_style(text: str, *codes: str) -> str:
    """Return `text` in a style that passes the sanitizer."""
    return f"\x1b[{';'.join(codes)};{_NUMBER}m{text}\x1b[0;{_NUMBER}m"


def keep_ansi_colours(line: str) -> str:
    """Return a cleaned line of a program (`logs/safe_text.py`) with colours that pass the sanitizer."""
    return _SGR.sub(f"\x1b[\\1;{_NUMBER}m", line) if "\x1b" in line else line


def sanitize_line(line: str) -> str:
    """Return a line that is safe to write; text after a line break in it is indented."""
    return line if line.isascii() and line.isprintable() else _CONTROL_SEQUENCE.sub(_replace, line)


def sanitize_lines(lines: Iterable[str]) -> str:
    """Return lines that are safe to write, each with its line end."""
    return "".join(f"{sanitize_line(line)}\n" for line in lines)


def _replace(match: re.Match[str]) -> str:
    ours = match["ours"]
    if ours is not None:
        return f"\x1b[{ours}m"
    if match["style"] is not None:
        return ""
    return f"\n{CONTINUED}" if match[0] == "\n" else escape_character(match[0])


_JSON_ESCAPED = re.compile(f"[{CONTROL_CHARACTERS}]{STRAY_JOINER}")


def json_line(value: Any) -> str:
    """Return a value as one line of JSON. Letters of all scripts stay readable; control characters are escaped."""
    return _JSON_ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], json.dumps(value, ensure_ascii=False))
