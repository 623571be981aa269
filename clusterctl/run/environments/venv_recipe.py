"""An environment that is a copy of a virtual environment or conda environment of the head."""

from __future__ import annotations

import io
import os
import re
import secrets
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.tags import parse_tag

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.recipe import Parts, compute_key, get_cache_folder, run_conda_pack

_VERSION = re.compile(r"(?m)^version(?:_info)?\s*=\s*(3\.\d+)")
_RELOCATABLE = b"#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'python' \"$0\" \"$@\"\n' '''\n"
"""The first lines of a script that starts the Python beside it, wherever this is; both sh and Python can read them."""
_OWN_FILES = re.compile(r"pyvenv\.cfg|lib64|bin/python[\d.]*|.*\.lock|\.gitignore|CACHEDIR\.TAG")
"""Files that each virtual environment has of its own."""


def read_venv_python(venv: str) -> str:
    """Return the minor version of the Python of a virtual environment or conda environment.

    Raises:
        EnvironmentFailed: The file `pyvenv.cfg` cannot be read, or the conda environment has no Python.
    """
    if is_conda(venv):
        packages = [
            re.match(r"python-(3\.\d+)\.", path.name) for path in Path(venv, "conda-meta").glob("python-3*.json")
        ]
        for package in filter(None, packages):
            return package[1]
        raise EnvironmentFailed(f"the conda environment {venv} has no Python")
    try:
        found = _VERSION.search(Path(venv, "pyvenv.cfg").read_text())
    except OSError as error:
        raise EnvironmentFailed(f"cannot read {venv}/pyvenv.cfg: {error.strerror}") from error
    if found is None:
        raise EnvironmentFailed(f"{venv}/pyvenv.cfg names no version of Python")
    return found[1]


def is_conda(folder: str) -> bool:
    """Return whether a folder is a conda environment."""
    return os.path.isdir(f"{folder}/conda-meta")


@dataclass(frozen=True, slots=True)
class VenvRecipe:
    """A copy of a virtual environment or conda environment; see `Recipe`.

    Attributes:
        venv: Path of the environment.
        listing: Path, size and time of each file in it, as one text.
    """

    venv: str
    listing: str
    platform: Platform

    @property
    def key(self) -> str:
        """See `Recipe`."""
        return compute_key(self.venv, self.listing, self.platform.machine)

    def find_url(self) -> str | None:
        """See `Recipe`."""
        return None

    def gather_parts(self, report: Callable[[str], None], *, by_nodes: bool) -> Parts:
        """See `Recipe`."""
        del by_nodes
        self._refuse_other_platform()
        has_python = is_conda(self.venv)
        archive = get_cache_folder("venvs") / f"{self.key}.tar.gz"
        if not archive.is_file():
            report(f"packing {self.venv}")
            self._pack_conda(archive) if has_python else self._pack(archive)

        def list_steps(folder: str, name: str, python: str) -> list[dict[str, Any]]:
            place = f"{folder}/{name}"
            unpack = ["tar", "-xzf", f"{folder}/packages/{archive.name}", "-C", place]
            if not has_python:
                return [{"argv": [python, "-m", "venv", "--without-pip", place]}, {"argv": unpack}]
            finish = [f"{place}/bin/python", f"{place}/bin/conda-unpack"]
            return [{"argv": argv} for argv in (["mkdir", place], unpack, finish)]

        return Parts([archive], list_steps, has_python)

    def _refuse_other_platform(self) -> None:
        if is_conda(self.venv):
            if self.platform.machine != os.uname().machine or self.platform.glibc_minor is None:
                raise EnvironmentFailed(f"the conda environment {self.venv} does not run on {self.platform}")
            return
        tags = self.platform.list_tags()
        for file in sorted(Path(self.venv).glob("lib/python*/site-packages/*.dist-info/WHEEL")):
            found = re.findall(r"(?m)^Tag: (\S+)", file.read_text(errors="replace"))
            if found and not any(tag in tags for text in found for tag in parse_tag(text)):
                name = file.parent.name.removesuffix(".dist-info").replace("-", " ")
                text = f"{name} in {self.venv} was built for {found[0]}, which does not fit {self.platform}"
                raise EnvironmentFailed(text, hint="`environment: {uv: .}` chooses the files that fit the nodes")

    def _pack_conda(self, archive: Path) -> None:
        part = archive.with_name(f".{secrets.token_hex(8)}.tar.gz")
        words = ["--quiet", "--prefix", self.venv, "--output", str(part), "--compress-level", "1", "--n-threads", "-1"]
        try:
            run_conda_pack(*words, purpose=f"cannot pack {self.venv}")
            part.replace(archive)
        finally:
            part.unlink(missing_ok=True)

    def _pack(self, archive: Path) -> None:
        part = archive.with_name(f".{secrets.token_hex(8)}")
        try:
            with tarfile.open(part, mode="x:gz", compresslevel=1) as packed:
                for path, name in _list_files(self.venv):
                    entry = packed.gettarinfo(path, name)
                    content = path.read_bytes() if entry.isreg() else b""
                    if name.startswith("bin/") and content.startswith(f"#!{self.venv}/bin/python".encode()):
                        content = _RELOCATABLE + content.partition(b"\n")[2]
                    entry.size = len(content)
                    packed.addfile(entry, io.BytesIO(content))
            part.replace(archive)
        except OSError as error:
            raise EnvironmentFailed(f"cannot pack {self.venv}: {error.strerror or error}") from error
        finally:
            part.unlink(missing_ok=True)


def load_venv_recipe(venv: str, platform: Platform) -> VenvRecipe:
    """Return the recipe of a copy. The content of the files is not read.

    Raises:
        EnvironmentFailed: A file cannot be read.
    """
    try:
        states = [(name, path.lstat()) for path, name in _list_files(venv)]
    except OSError as error:
        raise EnvironmentFailed(f"cannot read {error.filename}: {error.strerror}") from error
    return VenvRecipe(venv, "".join(f"{name} {one.st_size} {one.st_mtime_ns}\n" for name, one in states), platform)


def _list_files(venv: str) -> list[tuple[Path, str]]:
    """Return path and relative path of each file to copy: all but bytecode and `_OWN_FILES`."""
    found = []
    for top, folders, names in os.walk(venv):
        folders[:] = sorted(folder for folder in folders if folder != "__pycache__")
        links = [folder for folder in folders if os.path.islink(os.path.join(top, folder))]
        for name in sorted([*names, *links]):
            path = os.path.join(top, name)
            inside = os.path.relpath(path, venv)
            if not _OWN_FILES.fullmatch(inside):
                found.append((Path(path), inside))
    return found
