"""Whether a file is a Python program, by its name and its content. Pure."""

from __future__ import annotations

import ast
import os
import warnings
from typing import NamedTuple

_ARCHIVES = (".pyc", ".pyz", ".zip", ".egg", ".whl")
"""Files of bytes that Python runs all the same."""
_DATA = tuple(
    ".json .jsonl .yaml .yml .toml .ini .cfg .conf .csv .tsv .xml .html .md .txt .env .lock .log .rst".split()  # noqa: SIM905
)
_SHELL = (".sh", ".bash", ".zsh", ".ksh", ".csh", ".slurm", ".sbatch", ".pbs")
_RUN_PYTHON = ("uv", "uvx", "pixi", "pdm", "hatch", "poetry", "rye", "conda", "mamba", "micromamba", "sage")
"""Programs that a shebang names for a Python file, beside Pythons."""


class NoPython(NamedTuple):
    """What a file is instead, and which key would run it."""

    what: str
    hint: str


def why_no_python(name: str, data: bytes) -> NoPython | str | None:
    """Return what a file is that is no Python program; the mistake in one that this Python cannot read; else `None`."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _ARCHIVES or data.startswith(b"PK\3\4"):
        return None
    path = name if "/" in name else f"./{name}"
    interpreter = _interpreter(data)
    if interpreter is not None and not _runs_python(interpreter):
        return NoPython(f"is run by `{interpreter}`, not by Python", f"`command: {path}` runs it")
    if b"\0" in data:
        return NoPython("is a binary file, no Python", f"`command: {path}` runs it, if it is a program")
    if suffix == ".ipynb" or _is_notebook(data):
        hint = f"`command: jupyter nbconvert --to notebook --execute {name}` runs it; `--to script` makes Python of it"
        return NoPython("is a notebook, no Python", hint)
    if suffix in _SHELL:
        return NoPython("is a shell script, no Python", f"`command: bash {name}` runs it")
    if suffix in _DATA:
        return _data(name)
    return _by_syntax(name, data, suffix)


def _data(name: str) -> NoPython:
    return NoPython("is data, no Python", f"name the program as `script`, and this file in `args: [{name}]`")


def _interpreter(data: bytes) -> str | None:
    """Return the name of the program in a shebang, or `None` where there is none."""
    if not data.startswith(b"#!"):
        return None
    words = data[2:512].partition(b"\n")[0].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return os.path.basename(words[0]) if words else None


def _runs_python(interpreter: str) -> bool:
    return "python" in interpreter or "pypy" in interpreter or interpreter in _RUN_PYTHON


def _is_notebook(data: bytes) -> bool:
    return data.lstrip().startswith(b"{") and b'"cells"' in data and b'"nbformat"' in data


def _by_syntax(name: str, data: bytes, suffix: str) -> NoPython | str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data)
    except SyntaxError as error:
        if suffix.startswith(".py"):
            return f"line {error.lineno}: {error.msg}"
        return NoPython(
            f"is no Python: line {error.lineno}: {error.msg}", f"`command: bash {name}` runs a shell script"
        )
    except (ValueError, RecursionError, MemoryError):
        return None
    if tree.body and not _has_docstring_alone(tree) and all(_does_nothing(statement) for statement in tree.body):
        return _data(name)
    return None


def _has_docstring_alone(tree: ast.Module) -> bool:
    return len(tree.body) == 1 and ast.get_docstring(tree) is not None


_VALUES = (ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.Set, ast.Name)
_IDLE = (*_VALUES, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator, ast.expr_context)


def _does_nothing(statement: ast.stmt) -> bool:
    """Return whether a statement is a value that nobody takes: JSON, YAML and plain text can be read as such."""
    if isinstance(statement, ast.AnnAssign):
        return statement.value is None
    return isinstance(statement, ast.Expr) and all(isinstance(node, _IDLE) for node in ast.walk(statement.value))
