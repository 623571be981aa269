"""The output streams of a command: their width, and whether they show colours, redrawn lines and non-ASCII text.

Data goes to stdout, messages go to stderr. Each stream is examined separately, because one stream may be a pipe and the
other a terminal. All output passes the sanitizer (`clusterctl.render.terminal_sanitizer`), also the texts of clusterctl
itself.
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
    """The allowed values of the option `--color`."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The signs and drawing characters of the output. A word or a number always accompanies a sign.

    Attributes:
        bar_fills: Characters for a column of a bar, from the least filled to the completely filled.
        bar_background: The character for an empty column of a bar.
        trend_heights: Characters for a column of a trend, the lowest first.
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
"""ASCII replacements for signs of clusterctl and other programs, for a stream that shows only ASCII."""


def wants_colour(choice: ColorChoice, env: Mapping[str, str], *, isatty: bool) -> bool:
    """Return whether to write colours.

    `--color always` or `never` decides first, then NO_COLOR, then FORCE_COLOR. If none of them is set, a terminal gets
    colours, except with TERM=dumb.
    """
    if choice is not ColorChoice.AUTO:
        return choice is ColorChoice.ALWAYS
    if env.get("NO_COLOR"):
        return False
    forced = env.get("FORCE_COLOR") or env.get("CLICOLOR_FORCE")
    if forced:
        return forced != "0"
    return isatty and env.get("TERM") != "dumb"


def wants_ascii(env: Mapping[str, str]) -> bool:
    """Return whether the locale asks for ASCII signs.

    In the C locale Python writes UTF-8 by default. Only clusterctl's signs become ASCII; other texts remain UTF-8.
    """
    is_encoding_set = env.get("PYTHONIOENCODING") or env.get("PYTHONUTF8") == "1"
    return env.get("LC_ALL") in ("C", "POSIX") and not is_encoding_set


class Terminal:
    """One output stream.

    Attributes:
        colour: Whether the stream shows styles and colours.
        live: Whether the stream can redraw lines in place.
        glyphs: The signs that the encoding of the stream can show.
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
        """Return the terminal for a stream; its abilities follow from the stream and the environment."""
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
        """The device and inode of the stream; `None` if the stream has no descriptor."""
        try:
            found = os.fstat(self.stream.fileno())
        except (OSError, ValueError):
            return None
        return found.st_dev, found.st_ino

    def has_reader(self, seconds: float = 0.0) -> bool:
        """Return whether this stream still has a reader; wait at most `seconds` for the reader to close it."""
        try:
            return standard_streams.has_reader(self.stream.fileno(), seconds)
        except (OSError, ValueError):
            return True

    @property
    def width(self) -> int | None:
        """The present number of columns of the terminal; `None` if lines must not be cut (a pipe or a file)."""
        if self._width is not None:
            return self._width or None
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or _DEFAULT_WIDTH
        except (OSError, ValueError):
            return _DEFAULT_WIDTH

    @property
    def height(self) -> int:
        """The present number of lines of the terminal."""
        try:
            return os.get_terminal_size(self.stream.fileno()).lines or _DEFAULT_HEIGHT
        except (OSError, ValueError):
            return _DEFAULT_HEIGHT

    def style(self, text: str, *codes: str) -> str:
        """Return `text` in a style if the stream shows colours."""
        return ansi_style(text, *codes) if self.colour and text and codes else text

    def filter_colours(self, line: str) -> str:
        """Sanitize a line of a program; also remove its colours if the stream shows no colours."""
        return keep_ansi_colours(line) if self.colour else strip_colours(line)

    def write_line(self, text: str = "") -> None:
        """Write one line."""
        self.write_lines([text])

    def write_lines(self, lines: Iterable[str]) -> None:
        """Erase the drawn lines, then write these lines. Text after a line break within a line is indented."""
        if text := sanitize_lines(lines):
            self._put(self._erase() + text)

    def write_wrapped(self, lines: Iterable[str]) -> None:
        """Write sentences, wrapped between words to the width of the terminal."""
        width = self.width
        self.write_lines(lines if width is None else [part for line in lines for part in wrap_line(line, width)])

    def draw(self, lines: Iterable[str]) -> None:
        """Show lines that the next output or drawing replaces. If the stream cannot redraw lines, nothing is shown."""
        if self.live:
            text = sanitize_lines(lines).removesuffix("\n")
            self._put((self._erase() or _ERASE_LINE) + text)
            self._drawn_lines = text.count("\n") + 1

    def clear(self) -> None:
        """Erase the drawn lines."""
        if erased := self._erase():
            self._put(erased)

    def _erase(self) -> str:
        """Return the control codes that erase the drawn lines, and forget these lines."""
        count, self._drawn_lines = self._drawn_lines, 0
        if count <= 1:
            return _ERASE_LINE if count else ""
        # Delete the lines instead of blanking them: tmux keeps blanked lines in its history if they begin at the top.
        return f"\r\x1b[{count - 1}A\x1b[{count}M"

    def call_attention(self, text: str) -> None:
        """Ring the bell of a terminal, show `text` as its title, and as a notification if it supports OSC 9."""
        if self.live:
            words = safe(text)
            self._put(f"\x07\x1b]0;{words}\x07\x1b]9;{words}\x07")

    def switch_screen(self, *, alternate: bool) -> None:
        """Enter the alternate screen of the terminal, or leave it; on leaving, the previous content reappears."""
        self._put(_ENTER_SCREEN if alternate else _LEAVE_SCREEN)

    def draw_screen(self, lines: Iterable[str]) -> None:
        """Show lines from the top of the alternate screen. The screen is not cleared first, so it does not flicker."""
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
    """Stdout and stderr of a command. Output to one stream first erases the drawn lines of the other stream."""

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
        """Whether stdout and stderr are the same terminal, file or pipe."""
        return self.out.file_id is not None and self.out.file_id == self.err.file_id

    def write_stdout(self, *lines: str) -> None:
        """Write lines of data to stdout."""
        self.err.clear()
        self.out.write_lines(lines)

    def write_stdout_wrapped(self, *lines: str) -> None:
        """Write sentences to stdout, wrapped to the width of the terminal."""
        self.err.clear()
        self.out.write_wrapped(lines)

    def write_stdout_text(self, text: str) -> None:
        """Write a text with several lines to stdout."""
        self.write_stdout(*text.rstrip("\n").split("\n"))

    def write_stdout_json(self, value: Any) -> None:
        """Write a JSON document to stdout, in ASCII: it has no control characters, and any stream can encode it."""
        self.write_stdout_text(json.dumps(value, indent=2))

    def write_stderr(self, *lines: str) -> None:
        """Write messages to stderr, wrapped to the width of the terminal."""
        self.out.clear()
        self.err.write_wrapped(lines)


# --- text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return `text` filled with blanks up to `width` columns."""
    fill = " " * max(0, width - count_columns(strip_colours(text)))
    return fill + text if right else text + fill


def fit(text: str, width: int | None, glyphs: Glyphs = UNICODE) -> str:
    """Return `text` cut to `width` columns; `None` means no limit. The text must not contain colours."""
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
"""The largest number of characters to show of a text from another source."""


def safe(text: object) -> str:
    """Return a text from another source as one line of limited length, without colours and control sequences.

    Use this function if a text has to be one line, or if the width of the text matters. The sanitizer makes all output
    harmless in any case.
    """
    whole = str(text)
    more = len(whole) - PEER_LIMIT
    line = strip_colours(clean_text(" ".join(whole[:PEER_LIMIT].splitlines())))
    return f"{line} [{more:,} more characters]" if more > 0 else line
