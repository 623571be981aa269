"""Imports: no cycle between files, and no start-up shortcut where it saves nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import clusterctl

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(clusterctl.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
STARTED_EACH_TIME = (
    "clusterctl.agent.__main__",
    "clusterctl.agent.serve.main",
    "clusterctl.agent.serve.node_commands",
    "clusterctl.agent.facts",
    "clusterctl.agent.inject",
    "clusterctl.agent.forkserver",
    "clusterctl.agent.shim",
    "clusterctl.agent.worker",
)
"""What begins anew at every look at a node and in every worker: what ADR 10 is about."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def imported_by(module: str) -> Iterator[str]:
    """What a file imports of ours, wherever it does so: within functions and for types, too."""
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for name in node.names:
                inside = f"{source}.{name.name}"
                yield from [inside] if inside in MODULES else [source] if source in MODULES else []


def loaded_with(*modules: str) -> set[str]:
    """Every file of ours that is imported with some, outside of functions and not for types alone."""
    waiting, loaded = list(modules), set[str]()
    while waiting:
        module = waiting.pop()
        if module in loaded:
            continue
        loaded.add(module)
        waiting += imported_at_once(ast.parse(MODULES[module].read_text()).body)
        waiting += [parent for parent in [module.rpartition(".")[0]] if parent in MODULES]
    return loaded


def imported_at_once(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{name.name}" for name in node.names)]
            yield from (name for name in names if name in MODULES)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            yield from imported_at_once([*node.body, *node.orelse])


def test_only_what_starts_each_time_saves_the_import_of_typing() -> None:
    begun = [name for name in MODULES if name.startswith(STARTED_EACH_TIME)]
    saving = {name for name, path in MODULES.items() if "\nTYPE_CHECKING = False\n" in path.read_text()}

    assert saving <= loaded_with(*begun)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = {module: set(imported_by(module)) - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_agent_needs_nothing_but_the_standard_library() -> None:
    """Types of messages need packages of the head, and no node has these."""
    agent = [name for name in MODULES if name.startswith(("clusterctl.agent.serve.", "clusterctl.agent.cast."))]
    script = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r}); import {', '.join(agent)}"

    done = subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_circle_would_be_found() -> None:
    assert "clusterctl.agent.protocol.frozen_dataclass" in imported_by("clusterctl.agent.protocol.frames")
    assert "clusterctl.agent.shim.file_writer" in imported_by("clusterctl.agent.shim.status_writer")
