"""`${VAR}` in values: filled in after parsing, so that what a variable holds can never become YAML."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from clusterctl.config.text.tree import Mark, Node, Path, Report, label
from clusterctl.config.text.yaml_text import core_scalar

if TYPE_CHECKING:
    from collections.abc import Mapping

_EXPANSION = re.compile(r"\$\$|\$\{([^{}]*)\}|\$\{")
_BODY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:(:-|:\?)(.*))?", re.DOTALL)

_LITERAL = {"host", "address", "user", "proxy_jump", "identity_file", "transport"}
"""Keys of a host that say where a connection leads: what a variable holds would go to name servers and to strangers."""

_OF_THE_USER = {"USER", "LOGNAME"}
"""What every server is told anyway, so that `user:` may name it."""

_MOST_IN_A_VALUE = 20
"""Mistakes told of one value; a megabyte of `${` is one mistake, not a hundred thousand."""


def prepare(node: Node, environ: Mapping[str, str], report: Report, path: Path = ()) -> Node:
    """Leave out `x-*` keys and fill in variables, everywhere below `node`; keys are never filled in."""
    if isinstance(node.value, dict):
        entries: dict[str, Node] = {}
        for key, child in node.value.items():
            if key.startswith("x-"):
                _warn_hidden_host(node.key_mark(key), key, path, report)
                continue
            entries[key] = prepare(child, environ, report, (*path, key))
        return node.with_entries(entries)
    if isinstance(node.value, list):
        items = [prepare(child, environ, report, (*path, index)) for index, child in enumerate(node.value)]
        return Node(items, node.mark)
    if node.raw is None or "$" not in node.raw:
        return node
    return _filled(node, environ, report, path)


def _warn_hidden_host(mark: Mark, key: str, path: Path, report: Report) -> None:
    if path == ("hosts",):
        report.warn(mark, f"host `{key}` is ignored, as every key that begins with `x-`", "list hosts as `- x-1`")


def _filled(node: Node, environ: Mapping[str, str], report: Report, path: Path) -> Node:
    raw, used, before = node.raw or "", False, len(report.problems)
    reported = before + len(report.warnings)
    pieces: list[str] = []
    position = 0
    for match in _EXPANSION.finditer(raw):
        pieces.append(raw[position : match.start()])
        position = match.end()
        if match[0] == "$$":
            pieces.append("$")
            continue
        used = True
        mark = node.inside(match.start(), len(match[0]))
        pieces.append(_expanded(match[0], match[1], mark, environ, report, path))
        if len(report.problems) + len(report.warnings) - reported > _MOST_IN_A_VALUE:
            break
    if len(report.problems) > before:
        return Node(None, node.mark)
    text = "".join([*pieces, raw[position:]])
    # Unquoted, `port: ${PORT}` means a number; quoted, it is text.
    value: Any = core_scalar(text) if used and not node.quoted else text
    return Node(value, node.mark, raw=text, quoted=node.quoted)


def _expanded(whole: str, body: str | None, mark: Mark, environ: Mapping[str, str], report: Report, path: Path) -> str:
    match = None if body is None else _BODY.fullmatch(body)
    if match is None:
        hint = "there are `${VAR}`, `${VAR:-default}`, `${VAR:?message}`; write `$${` where a shell shall see `${`"
        report.add(mark, f"{label(path)}: `{whole}` cannot be filled in", hint)
        return ""
    name, operator, rest = match[1], match[2], match[3]
    if _is_literal(path) and not (path[-1] == "user" and name in _OF_THE_USER):
        is_file = "identity_file" in path or "known_hosts" in path
        hint = "`~` is the home" if is_file else f"write the value itself, or give it as `--set {label(path)}=VALUE`"
        report.add(mark, f"{label(path)}: `{whole}` is not filled in here: it would be shown to whoever is asked", hint)
        return ""
    value = environ.get(name, "")
    if operator == ":-":
        return value or rest
    if operator == ":?" and not value:
        report.add(mark, f"{label(path)}: `{name}` is not set{': ' + rest if rest else ''}", f"export {name}=...")
    elif not operator and name not in environ:
        report.warn(mark, f"{label(path)}: `{name}` is not set and taken as empty", f"write `${{{name}:-}}` if meant")
    return value


def _is_literal(path: Path) -> bool:
    """Tell whether the value at `path` is taken as it is written."""
    if path[:2] == ("ssh", "known_hosts"):
        return True
    if path[:1] == ("defaults",):
        return len(path) >= 2 and path[1] in _LITERAL
    if path[:1] != ("hosts",):
        return False
    if path[:2] == ("hosts", "from"):
        return path[2:3] == ("command",)
    # An item that is text is a host; the text of `host: GPUS` is none.
    return len(path) == 1 or (len(path) == 2 and isinstance(path[1], int)) or (len(path) >= 3 and path[2] in _LITERAL)
