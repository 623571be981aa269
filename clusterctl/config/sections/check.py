"""Validation of one section: the errors of pydantic in our words, each at its mark in the file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from clusterctl.config.sections import normal
from clusterctl.config.sections.declared import CLUSTER_FILE, HOST, RESULTS, SECTIONS, SYNC, Section
from clusterctl.config.sections.models import model_of
from clusterctl.config.text.tree import Node, Path, Report, label
from clusterctl.config.value_parsers import describe_value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pydantic_core import ErrorDetails

    from clusterctl.config.text.tree import Node, Report


# What people bring along from other tools' files.
_ALIASES = {
    "cmd": "command",
    "command_args": "args",
    "entrypoint": "script",
    "envs": "env",
    "environment": "env",
    "gpu": "gpus",
    "hostname": "host",
    "identity": "identity_file",
    "ip": "address",
    "key_file": "identity_file",
    "node": "host",
    "nodes": "hosts",
    "nproc_per_node": "workers",
    "private_key": "identity_file",
    "processes": "workers",
    "run": "command",
    "slots": "gpus",
    "ssh_key": "identity_file",
    "ssh_port": "port",
    "ssh_private_key": "identity_file",
    "ssh_user": "user",
    "username": "user",
    "working_dir": "workdir",
}


def validate(section: Section, node: Node, path: Path, report: Report) -> dict[str, Any] | None:
    """Give what a section says, as the spec holds it; problems go to `report`, and then it is `None`."""
    shaped = normal.section(node, section)
    try:
        return model_of(section).validate_python(shaped.plain())
    except ValidationError as error:
        details = error.errors(include_url=False)
        meant = _meant_keys(details, section)
        for detail in details:
            if detail["type"] != "missing" or (detail["loc"][:-1], detail["loc"][-1]) not in meant:
                _translate(detail, shaped, path, section, report)
        return None


def _meant_keys(details: Iterable[ErrorDetails], section: Section) -> set[tuple[Path, int | str]]:
    """Keys that were written with a typing error, so that they are not reported as missing as well."""
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    return {(loc[:-1], near) for loc in unknown if (near := meant_key(str(loc[-1]), _fields_at(section, loc[:-1])))}


def _translate(detail: ErrorDetails, root: Node, path: Path, section: Section, report: Report) -> None:
    loc = detail["loc"]
    parent, node, inner = _find(root, loc)
    kind = detail["type"]
    if kind == "extra_forbidden":
        key = str(loc[-1])
        fields = _fields_at(section, loc[:-1])
        report.add(parent.key_mark(key), f"{label((*path, *loc))}: unknown key", unknown_key_hint(key, fields))
    elif kind == "missing":
        at = parent.key_mark(loc[-2]) if len(loc) > 1 else node.mark
        report.add(at, f"{label((*path, *loc[:-1]))}: the key `{loc[-1]}` is missing")
    elif node.value is not None or node.raw is not None:
        # A node without value and text has been reported already, by the filling in of variables.
        text, hint = _words(detail, node, str(loc[-1]) if loc else "")
        report.add(node.mark, f"{label((*path, *inner))}: {text}", hint)


def _find(root: Node, loc: tuple[int | str, ...]) -> tuple[Node, Node, Path]:
    """Walk as far as the document goes: `loc` may name a part that is missing, or an item of a short form."""
    parent = node = root
    inner: list[int | str] = []
    for part in loc:
        below = node.child(part)
        if below is None:
            # An unknown or missing key belongs to the mapping reached so far.
            return node, node, tuple(inner)
        parent, node = node, below
        inner.append(part)
    return parent, node, tuple(inner)


def _fields_at(section: Section, loc: tuple[int | str, ...]) -> Iterable[str]:
    for part in loc:
        kind = section.keys.get(str(part))
        if kind is not None and isinstance(kind.type, Section):
            section = kind.type
    return section.keys


def unknown_key_hint(key: str, fields: Iterable[str]) -> str | None:
    """Guess what an unknown key was meant to be."""
    names = list(fields)
    meant = meant_key(key, names)
    if meant is not None:
        return f"did you mean `{meant}`?"
    homes = [name for name, home in _HOMES.items() if key in home.keys]
    if homes:
        return f"`{key}` belongs to {' or '.join(f'`{home}`' for home in homes[:2])}"
    if key in CLUSTER_FILE.keys:
        return f"`{key}` belongs to the top level, without indentation"
    return f"there are: {', '.join(names)}" if len(names) <= 16 else None


def meant_key(key: str, fields: Iterable[str]) -> str | None:
    """The known key that an unknown one comes close to."""
    import difflib

    names, word = list(fields), key.lower().replace("-", "_")
    alias = _ALIASES.get(word)
    if alias in names:
        return alias
    begun = [name for name in names if len(word) >= 3 and name.startswith(word)]
    if len(begun) == 1:
        return begun[0]
    close = difflib.get_close_matches(word, names, 1, 0.65)
    return close[0] if close else None


_HOMES: dict[str, Section] = {
    "job": SECTIONS["job"],
    "hosts[]": HOST,
    "defaults": SECTIONS["defaults"],
    "sync": SYNC,
    "results": RESULTS,
    **{name: section for name, section in SECTIONS.items() if name not in ("job", "defaults")},
}


def _words(detail: ErrorDetails, node: Node, key: str) -> tuple[str, str | None]:
    kind = detail["type"]
    if node.value is None and kind in _TYPES:
        return "has no value", _type_hint(kind, node, key)
    context: Mapping[str, Any] = detail.get("ctx", {})
    if kind == "value_error":
        error = context["error"]
        return str(error), getattr(error, "hint", None)
    if kind == "literal_error":
        return _literal_words(str(context["expected"]), node)
    if kind in _LIMITS:
        return f"must be {_LIMITS[kind]} {next(iter(context.values()))}, not {describe_value(node.value)}", None
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, not {describe_value(node.value)}", _type_hint(kind, node, key)
    return str(detail["msg"]), None


_LIMITS = {"greater_than_equal": "at least", "less_than_equal": "at most", "greater_than": "more than"}
_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "`true` or `false`",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
}


def _literal_words(expected: str, node: Node) -> tuple[str, str | None]:
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    shown_words = " or ".join(filter(None, [", ".join(f"`{w}`" for w in words[:-1]), f"`{words[-1]}`"]))
    import difflib

    close = difflib.get_close_matches(str(node.value).lower(), words, 1, 0.5)
    return f"must be {shown_words}, not {describe_value(node.value)}", f"did you mean `{close[0]}`?" if close else None


def _type_hint(kind: str, node: Node, key: str) -> str | None:
    raw = node.raw or ""
    if kind == "string_type":
        if node.value is None:
            return 'write `""` for empty text'
        return f'put it in quotes: "{raw}"' if node.raw is not None else None
    if kind in ("int_type", "float_type") and node.quoted and raw.strip().isdigit():
        return "leave the quotes out"
    if kind == "bool_type" and raw.lower() in ("yes", "on", "no", "off"):
        return f"write `{'true' if raw.lower() in ('yes', 'on') else 'false'}`"
    if kind == "list_type" and isinstance(node.value, str):
        return f"write `{key}: [{', '.join(_quoted(word) for word in _split(raw))}]`"
    if kind == "list_type" and node.raw is not None:
        return f"write `{key}: [{raw}]`"
    if kind == "dict_type" and key == "env" and isinstance(node.value, list):
        return "write `NAME: value` lines, without `- `"
    return None


def _split(text: str) -> list[str]:
    import shlex

    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _quoted(word: str) -> str:
    return f'"{word}"' if '"' not in word else f"'{word}'"
