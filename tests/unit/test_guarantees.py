"""Every promise of docs/guarantees.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "guarantees.md").read_text().partition("## How fast")[0]


def test_every_promise_names_a_test_that_exists() -> None:
    promises = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| promise")]
    named = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line) for line in promises]

    assert all(named), [line for line, tests in zip(promises, named, strict=True) if not tests]
    missing = [f"{path}::{name}" for tests in named for path, name in tests if name not in functions(path)]
    assert not missing


def functions(path: str) -> set[str]:
    file = REPOSITORY / path
    tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
