"""A traceback as its author reads it: frames of libraries folded, files of the code folder by their place in it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_RANK = re.compile(r"^\[?rank\d+\]?:? ?")
_FRAME = re.compile(r'^(?P<indent>\s+)File "(?P<file>[^"]+)", line \d+')
_PACKAGES = re.compile(r"/(?:site|dist)-packages/(?P<name>[^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/|^<frozen ")


class _Part(NamedTuple):
    """A frame with its source, or a line between frames (`library` is `None`)."""

    lines: list[str]
    library: str | None = None


def folded_trace(lines: Sequence[str], folders: Collection[str] = (), *, ellipsis: str = "…") -> list[str]:
    """Return the lines of a traceback, without the rank that some frameworks put before each.

    Of frames of libraries in a row the last stays, for it is where something was raised, or what went into the code
    that follows; of a row that is followed by frames of the code, none does.

    Args:
        lines: Clean text.
        folders: Where the code of the run lies, as the file or its defaults name it.
        ellipsis: The sign for what is left out.
    """
    plain = [_RANK.sub("", line) for line in lines]
    return [relative(line, folders) for line in _folded(list(_parts(plain)), ellipsis)]


def raised(lines: Sequence[str]) -> tuple[str, ...] | None:
    """Return where the last traceback among lines was raised, and with what; `None` where there is none.

    That is its last frame, and all that follows of the same output as far as it is part of a traceback.
    """
    plain = [_RANK.sub("", line) for line in lines]
    last = next((n for n in reversed(range(len(plain))) if _FRAME.match(plain[n])), None)
    if last is None:
        return None
    # The error: the first line after the frame that is no longer indented.
    end = next((n for n in range(last + 1, len(plain)) if not plain[n].startswith(" ")), None)
    return None if end is None else (plain[last].strip(), plain[end].strip())


def relative(line: str, folders: Collection[str]) -> str:
    """Return a line with the files of the code folder by their place in it."""
    for folder in folders:
        absolute = folder.startswith("/")
        start = (
            re.escape(folder.rstrip("/"))
            if absolute
            else r"/[^\"]*?/?" + re.escape(folder.removeprefix("~").strip("/"))
        )
        line = re.sub(rf'(?<=File "){start}/', "", line)
    return line


def _parts(lines: Sequence[str]) -> Iterator[_Part]:
    held: list[str] = []
    library: str | None = None
    indent = 0
    for line in lines:
        frame = _FRAME.match(line)
        inside = bool(held) and frame is None and len(line) - len(line.lstrip()) > indent
        if inside:
            held.append(line)
            continue
        if held:
            yield _Part(held, library)
            held = []
        if frame is None:
            yield _Part([line])
        else:
            held, library, indent = [line], library_of(frame["file"]), len(frame["indent"])
    if held:
        yield _Part(held, library)


def library_of(file: str) -> str:
    """Return the library that a file belongs to, "" for code of the user's own."""
    package = _PACKAGES.search(file)
    if package is not None:
        return package["name"].removesuffix(".py")
    return "Python" if _STANDARD.search(file) else ""


def _folded(parts: list[_Part], ellipsis: str) -> Iterator[str]:
    row: list[_Part] = []
    for part in [*parts, _Part([])]:
        if part.library:
            row.append(part)
            continue
        # The last frame before what was raised stays.
        kept = row[-1:] if part.library is None else []
        gone = row[: len(row) - len(kept)]
        if len(gone) == 1:
            kept, gone = [*gone, *kept], []
        if gone:
            names = ", ".join(dict.fromkeys(one.library for one in gone if one.library))
            yield f"  {ellipsis} {len(gone)} frames of {names}"
        for one in kept:
            yield from one.lines
        row = []
        yield from part.lines
