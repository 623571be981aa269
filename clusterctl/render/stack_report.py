"""Renders Python stacks for `clusterctl stacks`, and tracebacks without most frames of libraries."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from clusterctl.formatting import group_pairs, name_ranks, plural
from clusterctl.render.console import BOLD, DIM, YELLOW, Terminal, safe

_STATES = {"T": "stopped", "t": "stopped by a tracer", "D": "in an uninterruptible wait", "Z": "dead, not waited for"}


def render_stacks(folded: Iterable[Mapping[str, Any]], terminal: Terminal) -> list[str]:
    """Return the stacks, most recent call first.

    Args:
        folded: The result of `fold_stacks`.
        terminal: The terminal that will show the stacks.
    """
    lines: list[str] = []
    for entry in folded:
        lines += ["", *_entry(entry, terminal)] if lines else _entry(entry, terminal)
    return lines


def _entry(entry: Mapping[str, Any], terminal: Terminal) -> list[str]:
    word = "rank" if entry["ranks"].isdigit() else "ranks"
    state = ", ".join(_STATES.get(letter, f"state {letter}") for letter in (entry["state"] or "?").split(","))
    where = f", in {safe(entry['wchan'])}" if entry["wchan"] else ""
    ranks = terminal.style(f"{word} {entry['ranks']}", BOLD)
    head = f"{ranks}  {state}{where}, by {safe(entry['source'])}"
    if entry["frames"] is None:
        return [head, "    no Python stack"]
    return [head, *(f"    {safe(f['function'])}  {terminal.style(_place(f), DIM)}" for f in entry["frames"])]


def _place(frame: Mapping[str, Any]) -> str:
    return f"{safe(frame['file'])}:{frame['line']}"


def render_stack_notes(ranks: Mapping[str, Mapping[str, Any]], terminal: Terminal) -> list[str]:
    """Return notes that say why a rank has no stack, and which of its child processes (data loaders) do not run.

    Args:
        ranks: The evidence of each rank, as the nodes sent it.
        terminal: The terminal that will show the notes.
    """
    ranks_of = group_pairs((text, int(rank)) for rank, evidence in ranks.items() for text in _remarks(evidence))
    word = terminal.style("note", YELLOW)
    return [f"{word}: {name_ranks(members)}: {safe(text)}" for text, members in ranks_of.items()]


def _remarks(evidence: Mapping[str, Any]) -> list[str]:
    reasons: Sequence[str] = evidence.get("why") or ()
    remarks = [f"no Python stack ({'; '.join(reasons)})"] if evidence["source"] == "proc" and reasons else []
    remarks += [evidence["error"]] if "error" in evidence else []
    children: Sequence[Mapping[str, Any]] = evidence.get("children") or ()
    return remarks + [
        f"its child {child['pid']} (`{child['command'] or child['name']}`) is {_STATES[child['state']]}"
        for child in children
        if child["state"] in _STATES
    ]


_RANK = re.compile(r"^\[?rank\d+\]?:? ?")
_FRAME = re.compile(r'^(?P<indent>\s+)File "(?P<file>[^"]+)", line \d+')
_PACKAGES = re.compile(r"/(?:site|dist)-packages/(?P<name>[^/]+)")
_STANDARD = re.compile(r"/lib(?:64)?/python3[^/]*/|^<frozen ")


class _Part(NamedTuple):
    """Part of a traceback: a frame (`library` is "" for user code), or a line between frames (`library` is `None`)."""

    lines: list[str]
    library: str | None = None


def fold_traceback(lines: Sequence[str], folders: Collection[str] = (), *, ellipsis: str = "…") -> list[str]:
    """Return a shortened traceback, without the rank number that some frameworks print before each line.

    Of several library frames before the error, only the last frame remains, because this frame raised the error.
    Library frames before a frame of the user's code are omitted.

    Args:
        lines: The traceback without control characters.
        folders: The folders of the run's code, as the cluster file or the defaults name them.
        ellipsis: The sign for omitted frames.
    """
    plain = [_RANK.sub("", line) for line in lines]
    return [shorten_paths(line, folders) for line in _folded(list(_parts(plain)), ellipsis)]


def find_raised_error(lines: Sequence[str]) -> tuple[str, ...] | None:
    """Return the last frame and the error of the last traceback in the lines; `None` if there is no traceback."""
    plain = [_RANK.sub("", line) for line in lines]
    last = next((n for n in reversed(range(len(plain))) if _FRAME.match(plain[n])), None)
    if last is None:
        return None
    # The error is the first line without indent after the frame.
    end = next((n for n in range(last + 1, len(plain)) if not plain[n].startswith(" ")), None)
    return None if end is None else (plain[last].strip(), plain[end].strip())


def shorten_paths(line: str, folders: Collection[str]) -> str:
    """Return a line of a traceback with the paths of the run's files relative to the code folder."""
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
            held, library, indent = [line], find_library_name(frame["file"]), len(frame["indent"])
    if held:
        yield _Part(held, library)


def find_library_name(file: str) -> str:
    """Return the name of the library that a file belongs to; "" for the user's code."""
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
        # The last library frame before an error remains.
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


_MOST = 3


def summarize_stacks(folded: Sequence[Mapping[str, Any]], nodes: Mapping[int, str]) -> list[str]:
    """Return a line for each position, such as `rank 2 on gpu03 is in load (train.py:21)`; fewest ranks first.

    Args:
        folded: The result of `fold_stacks`.
        nodes: The node of each rank.
    """
    entries = sorted(folded, key=lambda entry: _size(entry["ranks"]))
    lines = [_line(entry, nodes) for entry in entries[:_MOST]]
    more = len(entries) - len(lines)
    return [*lines, f"and {plural(more, 'other place')}"] if more else lines


def _line(entry: Mapping[str, Any], nodes: Mapping[int, str]) -> str:
    ranks = str(entry["ranks"])
    alone = ranks.isdigit()
    node = nodes.get(int(ranks)) if alone else None
    who = f"rank {ranks}" + (f" on {safe(node)}" if node else "") if alone else f"ranks {ranks}"
    return f"{who} {'is' if alone else 'are'} {_describe_place(entry['frames'], entry['wchan'])}"


def _describe_place(frames: Sequence[Mapping[str, Any]] | None, wchan: str | None) -> str:
    if not frames:
        return f"in {safe(wchan)} of the kernel" if wchan else "somewhere without a Python stack"
    own = next((frame for frame in frames if not find_library_name(str(frame["file"]))), frames[0])
    inside = "" if own is frames[0] else f"in {safe(frames[0]['function'])}, called by "
    name = str(own["file"]).rpartition("/")[2]
    return f"{inside or 'in '}{safe(own['function'])} ({safe(name)}:{own['line']})"


def _size(ranks: str) -> int:
    ends = [span.partition("-") for span in ranks.split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in ends)
