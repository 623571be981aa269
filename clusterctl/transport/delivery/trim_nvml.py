"""NVIDIA's bindings, cut down to what our agent calls: a twelfth of their text.

They define every structure and function there is, and a node pays for each at every look. What is kept is kept as it
was written, and whatever it needs is kept with it.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAME = re.compile(rb"\b(?:nvml[A-Z]\w*|NVML\w+|c_nvml\w+)\b")
_ERRORS = "NVML_ERROR_"
"""Names that the bindings look up among their own when they are imported, to make a class of each."""


def cut(bindings: bytes, users: Iterable[bytes]) -> bytes:
    """Return the source of `pynvml` with the definitions that other sources name, and those that these need.

    Args:
        bindings: The whole source.
        users: Sources that call it; any name of NVML's in them counts.
    """
    text = bindings.decode()
    tree = ast.parse(text)
    defined: dict[str, list[ast.stmt]] = {}
    for statement in tree.body:
        for name in _defines(statement):
            defined.setdefault(name, []).append(statement)
    wanted = {found.decode() for source in users for found in _NAME.findall(source)}
    wanted |= {name for name in defined if name.startswith(_ERRORS)}
    always = [statement for statement in tree.body if not _defines(statement)]
    wanted |= {name for statement in always for name in _uses(statement)}
    kept = {id(statement) for statement in always}
    while wanted:
        for statement in defined.get(wanted.pop(), ()):
            if id(statement) not in kept:
                kept.add(id(statement))
                wanted |= _uses(statement)
    lines = text.splitlines(keepends=True)
    licence = lines[: _first_line(tree.body[0]) - 1]
    pieces = ["".join(lines[_first_line(s) - 1 : s.end_lineno]) for s in tree.body if id(s) in kept]
    return "".join([*licence, *(piece if piece.endswith("\n") else piece + "\n" for piece in pieces)]).encode()


def _defines(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets) if all(isinstance(target, ast.Name) for target in targets):
            return [target.id for target in targets if isinstance(target, ast.Name)]
        case _:
            return []


def _uses(statement: ast.stmt) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _first_line(statement: ast.stmt) -> int:
    decorators = statement.decorator_list if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []
    return min([statement.lineno, *(decorator.lineno for decorator in decorators)])
