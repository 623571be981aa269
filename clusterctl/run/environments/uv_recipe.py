"""An environment from `uv.lock`, or from a requirements file.

The answers of uv are stored by the content of the files that they were made of, because uv takes longer than the rest
of a start.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.config.spec import EnvironmentSpec
from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments import locked_packages
from clusterctl.run.environments.locked_packages import PackageFile, Platform, list_requirements
from clusterctl.run.environments.package_store import fetch_files
from clusterctl.run.environments.recipe import Parts, compute_key, find_uv_for_nodes, get_cache_folder, run_uv
from clusterctl.run.record.disk_files import write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_INCLUDED = re.compile(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[ =]+(\S+)")


@dataclass(frozen=True, slots=True)
class UvRecipe:
    """The locked packages of an environment for one platform; see `Recipe`.

    Attributes:
        lock: The lock as a pylock.toml.
        folder: The folder of the project.
    """

    lock: str
    folder: str
    platform: Platform

    @property
    def key(self) -> str:
        """See `Recipe`."""
        platform = self.platform
        return compute_key(self.lock, platform.python, platform.machine, platform.libc.partition(" ")[0])

    def select_files(self) -> list[PackageFile]:
        """Return the file of each package (see `locked_packages.select_files`)."""
        return locked_packages.select_files(tomllib.loads(self.lock), self.platform)

    def find_url(self) -> str | None:
        """See `Recipe`."""
        return next((file.url for file in self.select_files() if _is_remote(file)), None)

    def gather_parts(self, report: Callable[[str], None], *, by_nodes: bool) -> Parts:
        """See `Recipe`."""
        files = self.select_files()
        own = [file for file in files if not (by_nodes and _is_remote(file))]
        wheels = fetch_files(own, self.platform, self.folder, lambda name: report(f"downloading {name}"))
        listed: list[tuple[PackageFile, str, str | None]] = []
        for file in files:
            wheel, digest = wheels.get(file), file.sha256
            if wheel is not None and file.is_source:
                digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
            listed.append((file, digest, None if wheel is not None else file.url))
        requirements = "\n".join(list_requirements(listed))

        def list_steps(folder: str, name: str, python: str) -> list[dict[str, Any]]:
            uv, place = f"{folder}/packages/uv", f"{folder}/{name}"
            options = ["--no-config", "--no-progress"]
            install = [uv, "pip", "install", *options, "--python", f"{place}/bin/python", "--no-deps"]
            install += ["--require-hashes", "--find-links", f"{folder}/packages", "--requirement", "-"]
            venv = [uv, "venv", *options, "--offline", "--no-python-downloads", "--python", python, place]
            closed = [] if by_nodes else ["--offline", "--no-index"]
            return [{"argv": venv}, {"argv": [*install, *closed], "stdin": requirements}]

        return Parts([Path(find_uv_for_nodes(self.platform)), *wheels.values()], list_steps)


def _is_remote(file: PackageFile) -> bool:
    return file.url.startswith(("http://", "https://"))


def choose_python(settings: EnvironmentSpec) -> str:
    """Return the minor version of Python: of the setting, of `.python-version`, or of the running Python."""
    if settings.python is not None:
        return settings.python
    pinned = Path(settings.uv or "", ".python-version")
    found = re.match(r"(?:cpython-)?(3\.\d+)", pinned.read_text()) if pinned.is_file() else None
    return found[1] if found else "{}.{}".format(*sys.version_info[:2])


def load_uv_recipe(settings: EnvironmentSpec, platform: Platform) -> UvRecipe:
    """Return the recipe of an environment for a platform. uv runs only if a file has changed since it last ran.

    Raises:
        EnvironmentFailed: The lock is missing or outdated, or uv fails.
    """
    assert settings.uv is not None
    source = Path(settings.uv)
    if source.is_dir() and (source / "uv.lock").is_file():
        inputs = [source / "uv.lock", source / "pyproject.toml"]
        words = ["export", "--format", "pylock.toml", "--locked", "--no-emit-workspace", "--python", sys.executable]
        words += [word for extra in settings.extras for word in ("--extra", extra)]
        folder = source
    else:
        file = source / "requirements.txt" if source.is_dir() else source
        inputs, folder = _list_requirement_files(file), file.parent
        words = ["pip", "compile", file.name, "--format", "pylock.toml", "--python-version", platform.python]
        words += ["--python-platform", platform.uv_name]
    contents = [(str(path), _read(path)) for path in inputs]
    digest = hashlib.sha256(json.dumps([words, contents]).encode()).hexdigest()
    stored = get_cache_folder("locks") / f"{digest}.toml"
    if not stored.is_file():
        write_atomically(stored, _ask_uv(words, folder).encode())
    return UvRecipe(stored.read_text(), str(folder), platform)


def _ask_uv(words: list[str], folder: Path) -> str:
    words = [*words, "--no-header", "--quiet"]
    if words[0] == "pip":
        return run_uv(*words, purpose=f"the requirements in {folder} cannot be resolved", cwd=str(folder))
    try:
        return run_uv(*words, "--offline", purpose="", cwd=str(folder))
    except EnvironmentFailed:
        # uv may need an index to check the lock.
        purpose = f"`uv.lock` in {folder} does not fit `pyproject.toml` (`uv lock` updates it)"
        return run_uv(*words, purpose=purpose, cwd=str(folder))


def _list_requirement_files(file: Path) -> list[Path]:
    files, open_files = [file], [file]
    while open_files:
        current = open_files.pop()
        included = [current.parent / name for name in _INCLUDED.findall(_read(current))]
        files += (fresh := [path for path in included if path not in files and "://" not in str(path)])
        open_files += fresh
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentFailed(f"cannot read {path}: {error}") from error
