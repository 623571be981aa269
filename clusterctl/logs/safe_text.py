"""Turns output bytes of a worker into text that is safe to show on a terminal.

Workers may print progress bars, cursor movement, terminal titles or binary data. Text and colours stay. Everything that
could move the cursor, change the terminal, reorder text or hide text is removed or escaped, also zero-width characters
and the conceal style. The safe text may still have the same colour as its background.
"""

from __future__ import annotations

import re
from functools import lru_cache

LINE_LIMIT = 256 * 1024
"""Maximum bytes of one line. A longer line is cut and gets a note."""

RESET = "\x1b[0m"

_INVISIBLE = "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
"""Characters that reorder text or are invisible."""

_SUSPECT_LEAD_BYTES = b"\xc2\xd8\xe1\xe2\xef\xf3"
"""First UTF-8 bytes of the C1 controls, the invisible characters and the joiners."""

_HARMLESS_BYTES = bytes(
    b for b in range(256) if b in b"\t\n" or 0x20 <= b < 0x7F or (b >= 0x80 and b not in _SUSPECT_LEAD_BYTES)
)
"""Bytes of a block that never need escaping."""

# Joiners stay between characters of scripts and emoji that use joiners. At other places they are escaped: in commands,
# names and paths, two different texts would look the same.
_JOINED = "[\u0600-\u06ff\u0750-\u077f\u08a0-\u08ff\u0900-\u0dff\u2190-\u2bff\ufe0f\U0001f000-\U0001faff]"
CONTROL_CHARACTERS = f"\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u200c\u200d{_INVISIBLE}"
"""Characters that shown text must not contain, for a character class; without ESC, because ESC begins colours."""
STRAY_JOINER = f"(?:(?<![\u200c\u200d])|(?!{_JOINED})|(?<!{_JOINED}[\u200c\u200d]))"
"""A prefix of patterns: after it, a joiner matches only at a place where joiners have no effect."""

_SUSPECT = re.compile(f"[\x1b{CONTROL_CHARACTERS}]")

# ECMA-48: CSI, OSC, DCS/SOS/PM/APC, then the escapes of two and three characters. An unterminated sequence does not
# match, so it hides no text; its escape character becomes visible. No sequence contains the start or end of another
# sequence, so matching takes linear time.
_SEQUENCE = re.compile(
    r"(?P<sgr>\x1b\[[0-9;:]{0,64}m)"
    r"|(?:\x1b\[|\x9b)[0-?]{0,4096}[ -/]{0,64}[@-~]"
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x80-\x9f]{0,4096}(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b[PX^_]|[\x90\x98\x9e\x9f])[^\x1b\x80-\x9f]{0,4096}(?:\x1b\\|\x9c)"
    r"|\x1b[ -/]{0,64}[0-OQ-WYZ\\`-~]"
)
_SGR = re.compile(r"\x1b\[[0-9;:]*m")
_CONCEAL = re.compile(r"\x1b\[(?:[0-9;:]*[;:])?0*8[;:m]")
_TO_ESCAPE = re.compile(f"[\x1b{CONTROL_CHARACTERS}](?:(?<!\x1b){STRAY_JOINER}|(?<=\x1b)(?!\\[[0-9;:]{{0,64}}m))")
_TOKEN = re.compile(r"\x1b\[[0-9;:]*m|.", re.DOTALL)


def clean_block(block: bytes) -> list[str]:
    """Return the lines of `block` as safe text.

    Args:
        block: Complete lines; the last line may have no line end.
    """
    text = block.decode("utf-8", "replace")
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    suspects = block.translate(None, _HARMLESS_BYTES)
    if not suspects or (0x1B not in suspects and _SUSPECT.search(text) is None):
        return lines
    if _TO_ESCAPE.search(text) is None and _CONCEAL.search(text) is None:  # nothing but colours
        return [line if "\x1b" not in line else _reset(line) for line in lines]
    return [clean_text(line) if _SUSPECT.search(line) else line for line in lines]


def clean_text(line: str) -> str:
    """Return one line as safe text: only the last frame of a progress bar, with escaped control characters."""
    if "\r" in line:
        line = find_last_frame(line)
    if "\x1b" in line or not line.isascii():
        line = _SEQUENCE.sub(_keep_colours, line)
    if "\x08" in line:
        line = _apply_backspaces(line)
    line = _TO_ESCAPE.sub(lambda match: escape_character(match[0]), line)
    return _reset(line) if "\x1b" in line else line


def find_last_frame(line: str) -> str:
    """Return the last frame with text of a line with carriage returns. A terminal would finally show this frame."""
    frames = line.split("\r")
    return next((frame for frame in reversed(frames) if not _is_blank(frame)), frames[-1])


def strip_colours(text: str) -> str:
    """Return sanitized text without its colours."""
    return _SGR.sub("", text) if "\x1b" in text else text


def _reset(line: str) -> str:
    return line if line.endswith((RESET, "\x1b[m")) else line + RESET


def _is_blank(frame: str) -> bool:
    return not frame or frame.isspace() or ("\x1b" in frame and not _SEQUENCE.sub("", frame).strip())


def _apply_backspaces(line: str) -> str:
    kept: list[str] = []
    for token in _TOKEN.findall(line):
        if token != "\x08":
            kept.append(token)
        elif kept:
            kept.pop()
    return "".join(kept)


def _keep_colours(match: re.Match[str]) -> str:
    sgr = match["sgr"] or ""
    return _drop_conceal(sgr) if "8" in sgr else sgr


@lru_cache(maxsize=256)
def _drop_conceal(sgr: str) -> str:
    """Return a style without parameter 8 (conceal), unless it is part of a colour (`38;5;8`)."""
    parameters = sgr[2:-1].split(";")
    kept: list[str] = []
    at = 0
    while at < len(parameters):
        number = parameters[at].partition(":")[0].lstrip("0")
        width = 1
        if number in ("38", "48", "58") and ":" not in parameters[at]:
            width += {"5": 2, "2": 4}.get(next(iter(parameters[at + 1 : at + 2]), ""), 0)
        if number != "8":
            kept += parameters[at : at + width]
        at += width
    return f"\x1b[{';'.join(kept)}m" if kept else ""


@lru_cache(maxsize=256)
def escape_character(character: str) -> str:
    """Return a control or invisible character as visible text: `^[`, `\\x9b`, `\\u202e`."""
    code = ord(character)
    if code == 0x7F:
        return "^?"
    if code < 0x20:
        return f"^{chr(code + 0x40)}"
    if code > 0xFFFF:
        return f"\\U{code:08x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
