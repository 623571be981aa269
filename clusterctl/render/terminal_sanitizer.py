"""The sanitizer of all output: only clusterctl's own styles and line ends pass.

Lines are put together from our words and from texts of nodes, workers, files and users. When a line is written, it can
no longer be told which of its characters are ours. So our styles carry a number that only this process knows, drawn at
random; `sanitize_line` takes that number away again. Every other character that steers or fools a terminal is made
visible; text after a line break within a line is indented, so that it cannot look like a line that we began.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from typing import Any

from clusterctl.logs.safe_text import CONTROL_CHARACTERS, STRAY_JOINER, escape_character

CONTINUED = "    "
"""The indent of a text's second line and those after it."""

_NUMBER = int.from_bytes(os.urandom(8), "big")
_SGR = re.compile(r"\x1b\[([0-9;:]*)m")

# A style that is not ours is dropped, and not made visible: it does no harm, and programs write many. A longer
# sequence is never dropped, for its end might lie in words of ours, or in another line.
_NOTED = re.compile(
    rf"[\x1b\n{CONTROL_CHARACTERS}](?:(?<=\x1b)\[(?:(?P<ours>[0-9;:]{{0,64}});{_NUMBER}|(?P<style>[0-9;:]{{0,64}}))m|{STRAY_JOINER})"
)


def ansi_style(text: str, *codes: str) -> str:
    """Return `text` in a style that passes the door."""
    return f"\x1b[{';'.join(codes)};{_NUMBER}m{text}\x1b[0;{_NUMBER}m"


def keep_ansi_colours(line: str) -> str:
    """Return a cleaned line of a program (`logs/safe_text.py`) with its colours, which pass the door unchanged."""
    return _SGR.sub(f"\x1b[\\1;{_NUMBER}m", line) if "\x1b" in line else line


def sanitize_line(line: str) -> str:
    """Return one line as it may be written; the lines that it goes on with are indented."""
    return line if line.isascii() and line.isprintable() else _NOTED.sub(_pass, line)


def sanitize_lines(lines: Iterable[str]) -> str:
    """Return lines as they may be written, each with its line end."""
    return "".join(f"{sanitize_line(line)}\n" for line in lines)


def _pass(match: re.Match[str]) -> str:
    ours = match["ours"]
    if ours is not None:
        return f"\x1b[{ours}m"
    if match["style"] is not None:
        return ""
    return f"\n{CONTINUED}" if match[0] == "\n" else escape_character(match[0])


_JSON_ESCAPED = re.compile(f"[{CONTROL_CHARACTERS}]{STRAY_JOINER}")


def json_line(value: Any) -> str:
    """Return a value as one line of JSON whose letters are readable in any script; what steers or hides is escaped."""
    return _JSON_ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], json.dumps(value, ensure_ascii=False))
