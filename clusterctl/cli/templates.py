"""Finds ready-to-run jobs (templates) in the installed package or in the source checkout."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import NotFoundError

_NEVER = frozenset({"__pycache__", ".ruff_cache", ".mypy_cache", ".pytest_cache"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A ready-to-run job: a folder with a README and a cluster file. `summary` is the first sentence of the README."""

    name: str
    path: Path
    summary: str

    def list_files(self) -> Iterator[Path]:
        """Yield the paths of the template's files, relative to the template's folder."""
        for path in sorted(self.path.rglob("*")):
            relative = path.relative_to(self.path)
            if path.is_file() and not _NEVER.intersection(relative.parts):
                yield relative


def find_templates_folder() -> Path | None:
    """Return the folder of all templates, or `None` if this installation has none."""
    package = Path(__file__).resolve().parents[1]
    candidates = (package / "_templates", package.parent / "templates")
    return next((path for path in candidates if path.is_dir()), None)


def list_templates() -> list[Template]:
    """Return every template that has a README and a cluster file, by name."""
    base = find_templates_folder()
    folders = sorted(base.iterdir()) if base is not None else []
    return [_template(path) for path in folders if (path / "README.md").is_file() and (path / "cluster.yaml").is_file()]


def find_template(name: str) -> Template:
    """Return the template with this name.

    Raises:
        NotFoundError: There is no such template.
    """
    by_name = {template.name: template for template in list_templates()}
    if name not in by_name:
        close = difflib.get_close_matches(name, by_name, 1)
        hint = f"did you mean `{close[0]}`?" if close else "`clusterctl init --list` lists all templates"
        raise NotFoundError(f"no template `{name}`", hint=hint)
    return by_name[name]


def _template(path: Path) -> Template:
    lines = (path / "README.md").read_text(encoding="utf-8").splitlines()
    sentences = (line.strip() for line in lines if line.strip() and not line.startswith("#"))
    return Template(name=path.name, path=path, summary=next(sentences, ""))
