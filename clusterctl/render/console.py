"""The streams that a person reads: whether they take colours, redrawing and non-ASCII, and how wide they are.

Data goes to stdout, narration to stderr; each is judged by itself, for either may be a pipe. All that is written passes
the door (`clusterctl.render.terminal_sanitizer`), our own words included.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TextIO

from clusterctl.logs.safe_text import clean_text, strip_colours
from clusterctl.render import standard_streams
from clusterctl.render.line_wrapping import count_columns, wrap_line
from clusterctl.render.terminal_sanitizer import ansi_style, keep_ansi_colours, sanitize_line, sanitize_lines

BOLD, DIM, RED, GREEN, YELLOW, CYAN = "1", "2", "31", "32", "33", "36"

_ERASE_LINE = "\r\x1b[K"
_ENTER_SCREEN, _LEAVE_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _TO_LINE_END, _TO_END = "\x1b[H", "\x1b[K", "\x1b[J"
_DEFAULT_WIDTH = 80
_DEFAULT_HEIGHT = 24


class ColorChoice(str, Enum):
    """What the user wants of colours."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Signs with a meaning; a word or a number always accompanies them.

    Attributes:
        bar_fills: What a column of a bar may be filled with, the least first and the whole last.
        bar_background: A column of a bar that is not filled.
        trend_heights: Columns of a trend, the lowest first.
    """

    ok: str
    warn: str
    fail: str
    running: tuple[str, ...]
    bar: str
    ellipsis: str
    dot: str
    arrow: str
    rule: str
    bar_fills: str
    bar_background: str
    trend_heights: str


UNICODE = Glyphs(
    ok="✓", warn="!", fail="✗", running=tuple("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"), bar="│", ellipsis="…", dot="·", arrow="→", rule="─",
    bar_fills="▏▎▍▌▋▊▉█", bar_background=" ", trend_heights="▁▂▃▄▅▆▇█",
)  # fmt: skip
ASCII = Glyphs(
    ok="ok", warn="!", fail="x", running=tuple("|/-\\"), bar="|", ellipsis="...", dot="-", arrow="->", rule="-",
    bar_fills="#", bar_background=".", trend_heights="_.:-=+*#",
)  # fmt: skip


_IN_ASCII = str.maketrans({"✓": "ok", "✗": "x", "│": "|", "…": "...", "·": "-", "→": "->", "─": "-", "°": ""})
"""How our signs are written where the stream can show none of them, whoever wrote them."""


def wants_colour(choice: ColorChoice, env: Mapping[str, str], *, isatty: bool) -> bool:
    """Decide about colours: the flag, then NO_COLOR, then FORCE_COLOR, then TERM=dumb, then what the stream is."""
    if choice is not ColorChoice.AUTO:
        return choice is ColorChoice.ALWAYS
    if env.get("NO_COLOR"):
        return False
    forced = env.get("FORCE_COLOR") or env.get("CLICOLOR_FORCE")
    if forced:
        return forced != "0"
    return isatty and env.get("TERM") != "dumb"


def wants_ascii(env: Mapping[str, str]) -> bool:
    """Return whether the locale asks for ASCII signs only.

    Python writes UTF-8 in it nevertheless, unless it was told what to write. That stays so for what others wrote.
    """
    told = env.get("PYTHONIOENCODING") or env.get("PYTHONUTF8") == "1"
    return env.get("LC_ALL") in ("C", "POSIX") and not told


class Terminal:
    """One output stream.

    Attributes:
        colour: Styles are written.
        live: Lines may be rewritten in place.
        glyphs: The signs that the stream's encoding can show.
    """

    def __init__(self, stream: TextIO, *, colour: bool, live: bool, unicode: bool, width: int | None = None) -> None:
        self.stream = stream
        self.colour = colour
        self.live = live
        self.glyphs = UNICODE if unicode else ASCII
        self._width = width
        self._drawn_lines = 0

    @classmethod
    def for_stream(cls, stream: TextIO, *, color: ColorChoice = ColorChoice.AUTO, env: Mapping[str, str]) -> Terminal:
        """Judge a stream."""
        isatty = stream.isatty()
        encoding = (stream.encoding or "").lower().replace("-", "").replace("_", "")
        return cls(
            stream,
            colour=wants_colour(color, env, isatty=isatty),
            live=isatty and env.get("TERM") not in (None, "", "dumb"),
            unicode=encoding == "utf8" and not wants_ascii(env),
            width=None if isatty else 0,
        )

    @property
    def file_id(self) -> tuple[int, int] | None:
        """The device and inode of the stream, or `None` without a descriptor."""
        try:
            found = os.fstat(self.stream.fileno())
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino

    def has_reader(self, seconds: float = 0.0) -> bool:
        """Return whether this stream still has a reader; wait at most so long for the reader to go."""
        try:
            return standard_streams.has_reader(self.stream.fileno(), seconds)
        except (OSError, ValueError):
            return True

    @property
    def width(self) -> int | None:
        """Columns of the terminal now, or `None` if lines must not be cut (a pipe or a file)."""
        if self._width is not None:
            return self._width or None
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or _DEFAULT_WIDTH
        except (OSError, ValueError):
            return _DEFAULT_WIDTH

    @property
    def height(self) -> int:
        """Lines of the terminal now."""
        try:
            return os.get_terminal_size(self.stream.fileno()).lines or _DEFAULT_HEIGHT
        except (OSError, ValueError):
            return _DEFAULT_HEIGHT

    def style(self, text: str, *codes: str) -> str:
        """Return `text` in a style if the stream shows colours."""
        return ansi_style(text, *codes) if self.colour and text and codes else text

    def filter_colours(self, line: str) -> str:
        """Return a sanitized line of a program, with its own colours if the stream shows colours."""
        return keep_ansi_colours(line) if self.colour else strip_colours(line)

    def write_line(self, text: str = "") -> None:
        """Write one line."""
        self.write_lines([text])

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write some lines at once in place of the drawn ones; what follows a line break within a line is indented."""
        if text := sanitize_lines(lines):
            self._put(self._erase() + text)

    def write_wrapped(self, lines: Iterable[str]) -> None:
        """Write sentences, wrapped between words to the width of the terminal."""
        width = self.width
        self.write_lines(lines if width is None else [part for line in lines for part in wrap_line(line, width)])

    def draw(self, lines: Iterable[str]) -> None:
        """Show lines that the next output or drawing replaces; nothing if lines cannot be rewritten."""
        if self.live:
            text = sanitize_lines(lines).removesuffix("\n")
            self._put((self._erase() or _ERASE_LINE) + text)
            self._drawn_lines = text.count("\n") + 1

    def clear(self) -> None:
        """Take the drawn lines away."""
        if erased := self._erase():
            self._put(erased)

    def _erase(self) -> str:
        """Return the codes that take the drawn lines away; they count as gone."""
        count, self._drawn_lines = self._drawn_lines, 0
        if count <= 1:
            return _ERASE_LINE if count else ""
        # Lines are deleted, not erased: if they begin at the top, tmux keeps what is erased in its history.
        return f"\r\x1b[{count - 1}A\x1b[{count}M"

    def switch_screen(self, *, alternate: bool) -> None:
        """Enter the alternate screen, or leave it; then the terminal is as it was before."""
        self._put(_ENTER_SCREEN if alternate else _LEAVE_SCREEN)

    def draw_screen(self, lines: Iterable[str]) -> None:
        """Show lines from the top of the alternate screen; without a flicker, for nothing is cleared beforehand."""
        shown = (sanitize_line(" ".join(line.split("\n"))) for line in lines)
        self._put(_HOME + "\r\n".join(line + _TO_LINE_END for line in shown) + _TO_END)

    def _put(self, text: str) -> None:
        if self.glyphs is ASCII:
            text = text.translate(_IN_ASCII)
        try:
            self.stream.write(text)
        except UnicodeEncodeError:
            encoding = self.stream.encoding or "ascii"
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        self.stream.flush()


class Console:
    """Stdout and stderr of a command. A line for the one first takes away the drawn lines of the other."""

    def __init__(self, out: Terminal, err: Terminal) -> None:
        self.out = out
        self.err = err

    @classmethod
    def for_standard_streams(cls, *, color: ColorChoice = ColorChoice.AUTO) -> Console:
        """Return the console of this process."""
        return cls(
            Terminal.for_stream(sys.stdout, color=color, env=os.environ),
            Terminal.for_stream(sys.stderr, color=color, env=os.environ),
        )

    @property
    def is_one_stream(self) -> bool:
        """Whether who reads stderr reads stdout above it: one terminal, one file or one pipe."""
        return self.out.file_id is not None and self.out.file_id == self.err.file_id

    def write_stdout(self, *lines: str) -> None:
        """Write lines of data to stdout."""
        self.err.clear()
        self.out.write_lines(lines)

    def write_stdout_wrapped(self, *lines: str) -> None:
        """Write lines of data that are sentences to stdout."""
        self.err.clear()
        self.out.write_wrapped(lines)

    def write_stdout_text(self, text: str) -> None:
        """Write a text of our own with several lines to stdout."""
        self.write_stdout(*text.rstrip("\n").split("\n"))

    def write_stdout_json(self, value: Any) -> None:
        """Write a JSON document to stdout, in ASCII alone: it steers nothing, and any stream can encode it."""
        self.write_stdout_text(json.dumps(value, indent=2))

    def write_stderr(self, *lines: str) -> None:
        """Write lines of narration to stderr."""
        self.out.clear()
        self.err.write_wrapped(lines)


# --- text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` filled up to `width` columns."""
    fill = " " * max(0, width - count_columns(strip_colours(text)))
    return fill + text if right else text + fill


def fit(text: str, width: int | None, glyphs: Glyphs = UNICODE) -> str:
    """Return `text`, which has no colours, cut to `width` columns; `None` is no limit."""
    if width is None or count_columns(text) <= width:
        return text
    room = width - count_columns(glyphs.ellipsis)
    if room <= 0:
        return glyphs.ellipsis[: max(0, width)]
    start = text[:room]
    while count_columns(start) > room:
        start = start[:-1]
    return start + glyphs.ellipsis


PEER_LIMIT = 8192
"""Characters shown of a text that came from elsewhere."""


def safe(text: object) -> str:
    """Return foreign text as one line of limited length, without colours and control sequences.

    It is needed where a text must be one line, or where its width counts; the door makes every text harmless anyway.
    """
    whole = str(text)
    more = len(whole) - PEER_LIMIT
    line = strip_colours(clean_text(" ".join(whole[:PEER_LIMIT].splitlines())))
    return f"{line} [{more:,} more characters]" if more > 0 else line
