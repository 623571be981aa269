"""Writes output lines of workers, each with a prefix for node and rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from enum import Enum

from clusterctl.formatting import fold_ranks
from clusterctl.logs.fold import FoldedLine
from clusterctl.logs.log_line import LogLine
from clusterctl.logs.safe_text import RESET, strip_colours
from clusterctl.render.console import DIM, Terminal
from clusterctl.render.line_wrapping import count_columns
from clusterctl.render.terminal_sanitizer import json_line

NODE_COLOURS = ("36", "33", "32", "35", "34", "96", "93", "92", "95", "94", "38;5;208", "38;5;141")
"""The colours of nodes, in the order of node rank. Neighbours differ clearly, and red is reserved for failures."""

_LONGEST_ON_SCREEN = 4000
_WIDEST_PREFIX = 32


class Timestamps(str, Enum):
    """The kind of timestamp before each line, which `-t` chooses."""

    NONE = "none"
    SHORT = "short"


def format_time(time: float) -> str:
    """Return a wall clock time in the local time zone: `14:03:22.125`."""
    local = datetime.fromtimestamp(time, tz=timezone.utc).astimezone()
    return f"{local:%H:%M:%S}.{local.microsecond // 1000:03}"


def format_local_time(time: float) -> str:
    """Return a wall clock time with its date, in the local time zone: `2026-03-01 14:03:22`."""
    return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S}"


def format_rfc3339(time: float) -> str:
    """Return a wall clock time in UTC in the format of RFC 3339, with milliseconds."""
    return datetime.fromtimestamp(time, tz=timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class LogWriter:
    """Writes lines of workers to a terminal or a pipe.

    A terminal redraws an unfinished line, such as a progress bar, in place. In a pipe each update of a progress bar is
    a separate line.

    Args:
        terminal: The stream to write to.
        nodes: All nodes of the run in the order of node rank; they determine colours and the width of the prefix.
        ranks: All ranks whose output may appear; they determine the width of the prefix.
        timestamps: The kind of timestamp before each line.
        prefix: Whether each line begins with node and rank.
    """

    def __init__(
        self,
        terminal: Terminal,
        nodes: Sequence[str] = (),
        ranks: Iterable[int] = (),
        *,
        timestamps: Timestamps = Timestamps.NONE,
        prefix: bool = True,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self._terminal = terminal
        self._colours: dict[str, str] = {}
        self._with_prefix = prefix
        self._labels: Mapping[str, str] = {}
        self._timestamps = timestamps
        self._width = 0
        self._prefixes: dict[tuple[tuple[str, ...], tuple[int, ...]], str] = {}
        self._stamp: tuple[float, str] = (float("nan"), "")
        self.widen_prefix(nodes, ranks, labels or {})

    def widen_prefix(self, nodes: Sequence[str], ranks: Iterable[int], labels: Mapping[str, str]) -> None:
        """Make the prefix wide enough for more nodes and ranks; the prefix never becomes narrower.

        Args:
            nodes: The nodes.
            ranks: The ranks.
            labels: What the prefix shows for a node, in place of its name.
        """
        self._labels = labels
        for node in nodes:
            self._colours.setdefault(node, NODE_COLOURS[len(self._colours) % len(NODE_COLOURS)])
        widest = (
            max((count_columns(labels.get(node, node)) for node in nodes), default=0)
            + len(f" r{max(ranks, default=0)}")
            if nodes
            else 0
        )
        self._grow(widest)

    def write(self, lines: Sequence[LogLine | FoldedLine]) -> None:
        """Write lines, then flush the stream once."""
        terminal = self._terminal
        frame: str | None = None
        out: list[str] = []
        for line in lines:
            if line.partial and terminal.live:
                frame = self.format(line)
            else:
                frame = None
                out.append(self.format(line))
        terminal.write_lines(out)
        if frame is not None:
            terminal.draw([_fit_coloured(frame, terminal.width)])

    def format(self, line: LogLine | FoldedLine) -> str:
        """Return a line with timestamp and prefix, shortened if it is very long and the output is a terminal."""
        text = line.text
        if self._terminal.live and len(text) > _LONGEST_ON_SCREEN:
            text = f"{text[:_LONGEST_ON_SCREEN]}{RESET if ESCAPE in text else ''} {self._terminal.glyphs.ellipsis}"
            text += f" [{len(line.text):,} characters; all of them with --format raw]"
        text = self._terminal.filter_colours(text)
        stamp = self._time(line.time) if self._timestamps is not Timestamps.NONE else ""
        if not self._with_prefix:
            return stamp + text
        if isinstance(line, FoldedLine):
            nodes, ranks = line.nodes, line.ranks
        else:
            nodes, ranks = (line.node,), (line.rank,)
        prefix = self._prefixes.get((nodes, ranks))
        return stamp + (prefix if prefix is not None else self._make_prefix(nodes, ranks)) + text

    # --- inside

    def _make_prefix(self, nodes: tuple[str, ...], ranks: tuple[int, ...]) -> str:
        label = f"{self._labels.get(nodes[0], nodes[0])} r{ranks[0]}" if len(ranks) == 1 else f"r{fold_ranks(ranks)}"
        self._grow(count_columns(label))
        colour = self._colours.setdefault(nodes[0], NODE_COLOURS[len(self._colours) % len(NODE_COLOURS)])
        if len(label) > _WIDEST_PREFIX and len(ranks) > 1:
            label = f"r{min(ranks)}-{max(ranks)} ({len(ranks)} ranks)"
        padded = f"{label}{' ' * (self._width - count_columns(label))} {self._terminal.glyphs.bar}"
        prefix = self._terminal.style(padded, colour if len(ranks) == 1 else DIM) + " "
        if len(self._prefixes) > 5000:
            self._prefixes.clear()
        self._prefixes[nodes, ranks] = prefix
        return prefix

    def _grow(self, width: int) -> None:
        width = min(width, _WIDEST_PREFIX)
        if width > self._width:
            self._width = width
            self._prefixes.clear()

    def _time(self, time: float) -> str:
        if self._stamp[0] != time:
            text = format_time(time)
            self._stamp = (time, self._terminal.style(text, DIM) + " ")
        return self._stamp[1]


ESCAPE = "\x1b"


def format_json_line(line: LogLine) -> str:
    """Return a line as JSON; `partial` marks a line without an end of line."""
    value: dict[str, object] = {
        "time": format_rfc3339(line.time),
        "node": line.node,
        "rank": line.rank,
        "attempt": line.attempt,
        "text": strip_colours(line.text),
    }
    if line.partial:
        value["partial"] = True
    return json_line(value)


def encode_raw_line(line: LogLine) -> bytes:
    """Return the bytes of a line exactly as the worker wrote them."""
    return line.text.encode("utf-8", "surrogateescape") + (b"" if line.partial else b"\n")


def _fit_coloured(text: str, width: int | None) -> str:
    """Return a line with colours, cut to the width of the screen, so that it can be redrawn in place."""
    if width is None or count_columns(strip_colours(text)) < width:
        return text
    out, used, position = [], 0, 0
    while position < len(text) and used < width - 1:
        end = text.find("m", position) if text[position] == ESCAPE else -1
        piece = text[position : end + 1] if end >= 0 else text[position]
        used += 0 if end >= 0 else count_columns(piece)
        out.append(piece)
        position += len(piece)
    return "".join(out) + (RESET if ESCAPE in text else "")
