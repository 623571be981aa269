"""Reads what an environment consists of: the packages that uv has locked, and the version of Python.

The answers of uv are stored by the content of the files that they were made of, because uv takes longer than the rest
of a start.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from clusterctl.config.spec import EnvironmentSpec
from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.record.disk_files import write_atomically

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE_VERSION = 1
"""Part of each key. A change of how environments are made raises it, so that they are made again."""
_INCLUDED = re.compile(r"(?m)^\s*(?:-r|-c|--requirement|--constraint)[ =]+(\S+)")
_REQUIRES_PYTHON = re.compile(r"(?m)^requires-python = \"(.*)\"$")
_LAST_LINES = 6


def get_cache_folder(name: str) -> Path:
    """Return a folder of this name for files of the head that can be made again."""
    folder = user_cache_path("clusterctl") / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_uv(*words: str, purpose: str, cwd: str | None = None) -> str:
    """Run uv on the head and return its standard output.

    Raises:
        EnvironmentFailed: uv is not installed, or fails.
    """
    program = find_uv()
    done = subprocess.run(
        [program, *words], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise EnvironmentFailed(f"{purpose}: uv says: {' '.join(lines[-_LAST_LINES:]) or 'nothing'}")
    return done.stdout


def find_uv() -> str:
    """Return the path of uv: beside the running Python, or on PATH.

    Raises:
        EnvironmentFailed: The head has no uv.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "uv")
    found = beside if os.access(beside, os.X_OK) else shutil.which("uv")
    if found is None:
        hint = "`pip install 'clusterctl[uv]'` installs it on this head; nodes need none"
        raise EnvironmentFailed("`environment.uv` needs the program `uv` on this head, and there is none", hint=hint)
    return found


def find_uv_for_nodes(platform: Platform) -> str:
    """Return the path of the program uv that is sent to nodes.

    Raises:
        EnvironmentFailed: The uv of the head does not run on the nodes.
    """
    if platform.machine != os.uname().machine or platform.glibc_minor is None:
        text = f"the uv of this head does not run on {platform.machine} with {platform.libc}"
        raise EnvironmentFailed(
            text, hint="start from a head like the nodes, or make the environment there by `job.setup`"
        )
    return find_uv()


@dataclass(frozen=True, slots=True)
class Recipe:
    """The locked packages of an environment for one platform.

    Attributes:
        lock: The lock as a pylock.toml.
        folder: The folder of relative paths in the lock.
    """

    lock: str
    folder: str
    platform: Platform

    @property
    def key(self) -> str:
        """The name of the environment on a node."""
        parts = [self.lock, self.platform.python, self.platform.machine, self.platform.libc.partition(" ")[0]]
        return "py" + hashlib.sha256(json.dumps([RECIPE_VERSION, *parts]).encode()).hexdigest()[:24]

    def parse_lock(self) -> dict[str, Any]:
        """Return the lock as a mapping."""
        parsed: dict[str, Any] = tomllib.loads(self.lock)
        return parsed


def choose_python(settings: EnvironmentSpec) -> str:
    """Return the minor version of Python: of the setting, of `.python-version`, or of the running Python."""
    if settings.python is not None:
        return settings.python
    pinned = Path(settings.uv or "", ".python-version")
    found = re.match(r"(?:cpython-)?(3\.\d+)", pinned.read_text()) if pinned.is_file() else None
    return found[1] if found else "{}.{}".format(*sys.version_info[:2])


def load_recipe(settings: EnvironmentSpec, platform: Platform) -> Recipe:
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
    return Recipe(stored.read_text(), str(folder), platform)


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
