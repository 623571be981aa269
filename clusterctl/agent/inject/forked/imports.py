"""What a script imports before it does anything else, as far as it is installed: nothing of the user's is executed.

A statement that does something ends the search. What it does may matter to the imports behind it: a variable of the
environment, a path, a filter of warnings.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.machinery
import os
import sys
import warnings

from .cannot import CannotForkError, standard_folders
from .origins import Missed

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    Wanted = tuple[str, tuple[str, ...]]
_MOST_FILES = 200
_MOST_BYTES = 1 << 20


class _StopError(Exception):
    """Here the code does something."""


class Reader:
    """Reads a script, and the user's own modules that it imports, for what is installed."""

    def __init__(self, variables: Collection[str]) -> None:
        """Begin; `variables` are those that the environment has."""
        self.wanted: list[Wanted] = []
        self._variables = variables
        self._seen: set[str] = set()
        self._standard = standard_folders()

    def script(self, path: str) -> list[Wanted]:
        """Return the modules that a script begins with, each with the names taken from it."""
        with contextlib.suppress(_StopError):
            self._file(path, "")
        return self.wanted

    def _file(self, path: str, package: str) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        try:
            if len(self._seen) > _MOST_FILES or os.path.getsize(path) > _MOST_BYTES:
                raise _StopError
            with open(path, "rb") as file, warnings.catch_warnings():
                # Each rank compiles it, and says so itself.
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read())
        except (OSError, SyntaxError, ValueError, RecursionError):
            raise _StopError from None
        self._body(tree.body, package, guarded=False)

    def _body(self, body: Sequence[ast.stmt], package: str, *, guarded: bool) -> None:
        for statement in body:
            self._statement(statement, package, guarded=guarded)

    def _statement(self, statement: ast.stmt, package: str, *, guarded: bool) -> None:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                self._module(alias.name, (), guarded=guarded)
        elif isinstance(statement, ast.ImportFrom):
            name = _absolute(statement, package)
            self._module(name, tuple(alias.name for alias in statement.names), guarded=guarded)
        elif isinstance(statement, ast.Try) and not statement.finalbody and not statement.orelse:
            self._body(statement.body, package, guarded=True)
        elif not (_does_nothing(statement) or self._says_what_holds(statement)):
            raise _StopError

    def _says_what_holds(self, statement: ast.stmt) -> bool:
        """Whether it is `os.environ.setdefault` of a variable that is set."""
        node = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(node, ast.Call) or ast.unparse(node.func) != "os.environ.setdefault" or not node.args:
            return False
        name = node.args[0]
        return isinstance(name, ast.Constant) and name.value in self._variables

    def _module(self, name: str, attributes: tuple[str, ...], *, guarded: bool) -> None:
        top = name.partition(".")[0]
        spec = None if top == "__future__" else importlib.machinery.PathFinder.find_spec(top)
        origin = spec.origin if spec is not None else None
        if top == "__future__" or top in sys.builtin_module_names or (origin == "frozen"):
            return
        if spec is None:
            if guarded:
                return
            raise _StopError
        parts = (origin or "").split(os.sep)
        if "site-packages" in parts or "dist-packages" in parts:
            self.wanted.append((name, attributes))
        elif origin is None or not any(origin.startswith(folder + os.sep) for folder in self._standard):
            self._own(name, list(spec.submodule_search_locations or ()), origin, attributes)

    def _own(self, name: str, places: list[str], origin: str | None, attributes: tuple[str, ...]) -> None:
        """Read a module of the user's, and every package above it."""
        if origin is not None:
            self._file(origin, name.partition(".")[0] if places else "")
        top, *below = name.split(".")
        package = top
        for part in below:
            spec = importlib.machinery.PathFinder.find_spec(f"{package}.{part}", places)
            if spec is None:
                raise _StopError
            places = list(spec.submodule_search_locations or ())
            package = f"{package}.{part}"
            if spec.origin is not None:
                self._file(spec.origin, package if places else package.rpartition(".")[0])
        for attribute in attributes if places else ():
            spec = importlib.machinery.PathFinder.find_spec(f"{package}.{attribute}", places)
            if spec is not None and spec.origin is not None:
                self._file(spec.origin, package)


def _absolute(statement: ast.ImportFrom, package: str) -> str:
    if not statement.level:
        return statement.module or ""
    above = package.split(".")
    kept = above[: len(above) - statement.level + 1]
    if not package or not kept:
        raise _StopError
    return ".".join([*kept, *([statement.module] if statement.module else [])])


def _does_nothing(statement: ast.stmt) -> bool:
    """Whether a statement cannot matter to the imports behind it."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return not statement.decorator_list and not statement.args.defaults and not any(statement.args.kw_defaults)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        plain = all(isinstance(target, ast.Name) for target in targets)
        return plain and (statement.value is None or _is_literal(statement.value))
    if isinstance(statement, ast.Expr):
        return _is_literal(statement.value)
    if isinstance(statement, ast.If):
        test = statement.test
        name = test.id if isinstance(test, ast.Name) else test.attr if isinstance(test, ast.Attribute) else ""
        return name == "TYPE_CHECKING" and not statement.orelse
    return isinstance(statement, ast.Pass)


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
    return True


# --- what is found


def bring(wanted: Sequence[Wanted]) -> set[str]:
    """Import modules, and those submodules among the names taken from them; return the names looked for in vain.

    Raises:
        CannotForkError: One cannot be imported.
    """
    usual, few = gc.get_threshold(), (1 << 20, 1 << 10, 1 << 10)
    # What imports make stays: to look for garbage among it takes an eighth of their time.
    gc.set_threshold(*few)
    missed = Missed()
    sys.meta_path.append(missed)
    try:
        _bring(wanted)
    finally:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(missed)
        # All ranks share it, garbage included: collections leave it alone, so that it stays shared. Before there is a
        # usual one again: the first would look at all of it.
        gc.freeze()
        if gc.get_threshold() == few:
            gc.set_threshold(*usual)
    return missed.names


def _bring(wanted: Sequence[Wanted]) -> None:
    for name, attributes in wanted:
        try:
            module = importlib.import_module(name)
            for attribute in attributes:
                if attribute != "*" and not hasattr(module, attribute):
                    importlib.import_module(f"{name}.{attribute}")
        except BaseException as error:
            raise CannotForkError(f"`import {name}` failed: {type(error).__name__}: {error}") from error


def named(names: Sequence[str]) -> Iterator[Wanted]:
    """Yield what the user named.

    Raises:
        CannotForkError: Something of it is code of the user's own, or is not there.
    """
    standard = standard_folders()
    for name in names:
        top = name.partition(".")[0]
        spec = importlib.machinery.PathFinder.find_spec(top)
        origin = spec.origin if spec is not None else None
        if spec is None and top not in sys.builtin_module_names:
            raise CannotForkError(f"there is no module `{top}`")
        parts = (origin or "").split(os.sep)
        installed = "site-packages" in parts or "dist-packages" in parts or spec is None or origin == "frozen"
        if not installed and not any((origin or "").startswith(folder + os.sep) for folder in standard):
            raise CannotForkError(
                f"`{top}` is not installed, but lies at {origin}: only what is installed is preloaded"
            )
        yield name, ()
