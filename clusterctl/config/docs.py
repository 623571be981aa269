"""Tables of keys in docs/cluster-file.md: `python -m clusterctl.config.docs docs/cluster-file.md`."""

from __future__ import annotations

import re
import sys
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from clusterctl.config.sections.section_fields import (
    CLUSTER_FILE,
    CONTROLLER_LOSS,
    RESULTS,
    SECTIONS,
    SYNC,
    Section,
    build_section,
    split_annotation,
)
from clusterctl.config.spec import HostSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.config.field_types import FieldType
    from clusterctl.config.sections.section_fields import SectionField

_TABLE = re.compile(r"(<!-- keys: (.*?) -->\n)(?:\|.*\n)*")
_HEAD = "| key | value | default | |\n|---|---|---|---|\n"


def render_page(text: str) -> str:
    """Return the page with new tables."""
    keys = dict(list_keys())

    def made(found: re.Match[str]) -> str:
        rows = [
            _format_row(path, key) for one in found[2].split() for path, key in keys.items() if fnmatchcase(path, one)
        ]
        return found[1] + _HEAD + "".join(rows)

    return _TABLE.sub(made, text)


def list_keys() -> Iterator[tuple[str, SectionField]]:
    """Yield path and field of each key, without the sections that consist of keys."""
    yield from ((name, key) for name, key in CLUSTER_FILE.keys.items() if name == "defaults" or name not in SECTIONS)
    yield from _list_keys_below("hosts[].", build_section(HostSpec))
    sections = {name: section for name, section in SECTIONS.items() if name != "defaults"}
    for name, section in (sections | {"sync": SYNC, "results": RESULTS, "on_controller_loss": CONTROLLER_LOSS}).items():
        yield from _list_keys_below(f"{name}.", section)


def _list_keys_below(path: str, section: Section) -> Iterator[tuple[str, SectionField]]:
    for name, key in section.keys.items():
        if isinstance(key.type, Section):
            yield from _list_keys_below(f"{path}{name}.", key.type)
        else:
            yield path + name, key


def _format_row(path: str, key: SectionField) -> str:
    default = "required" if key.required else key.default_text
    name, values = path.removeprefix("hosts[]."), _describe_values(key.type, key.kind)
    return f"| `{name}` | {values} | {default} | {key.key.summary} |\n"


def _describe_values(annotation: Any, kind: FieldType) -> str:
    """Return what a user may write for a type."""
    words = kind.choices or _describe_type(annotation)
    if kind.syntax or words:
        return kind.syntax or ", ".join(f"`{word}`" for word in words)
    if kind.limits is not None:
        return f"{kind.limits[0]} to {kind.limits[1]}"
    if get_origin(annotation) is tuple:
        return f"list of {_describe_values(*split_annotation(get_args(annotation)[0]))}"
    if get_origin(annotation) is dict:
        return f"mapping to {_describe_values(*split_annotation(get_args(annotation)[1]))}".removesuffix(" to mapping")
    return {str: "text", bool: "`true`, `false`", float: "numbers"}.get(annotation, "mapping")


def _describe_type(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return (
        tuple(word.value for word in annotation)
        if isinstance(annotation, type) and issubclass(annotation, Enum)
        else ()
    )


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(render_page(target.read_text(encoding="utf-8")), encoding="utf-8")
