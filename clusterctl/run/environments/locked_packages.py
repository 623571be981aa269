"""Chooses the file of each locked package for the nodes' platform and Python. Pure.

The lock is a pylock.toml (PEP 751), which uv writes both from `uv.lock` and from requirements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from packaging.markers import Marker
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from typing_extensions import override

from clusterctl.errors import EnvironmentFailed

_LEGACY_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Older names of manylinux tags, by the minor version of glibc (PEP 600)."""
_UV_GLIBC_MINORS = (17, 28, *range(31, 41))
"""The minor versions of glibc for which `uv pip compile --python-platform` has a name."""


@dataclass(frozen=True, slots=True)
class Platform:
    """What decides which files a node can install.

    Attributes:
        machine: Hardware name, as `uname -m` prints it.
        libc: C library and version, such as "glibc 2.36"; "musl" without a known version.
        python: Minor version of Python, such as "3.11".
    """

    machine: str
    libc: str
    python: str

    @override
    def __str__(self) -> str:
        return f"Python {self.python} on {self.machine} with {self.libc}"

    @property
    def glibc_minor(self) -> int | None:
        """The minor version of glibc 2, or `None` for another C library."""
        name, _, version = self.libc.partition(" ")
        return int(version.split(".")[1]) if name == "glibc" and version.startswith("2.") else None

    @property
    def uv_name(self) -> str:
        """The name of the platform for `uv --python-platform`."""
        minor = self.glibc_minor
        if minor is None:
            return f"{self.machine}-unknown-linux-musl"
        return f"{self.machine}-manylinux_2_{max(known for known in _UV_GLIBC_MINORS if known <= max(minor, 17))}"

    def list_tags(self) -> dict[Tag, int]:
        """Return the rank of each wheel tag that fits; the lowest rank fits best."""
        minor = self.glibc_minor
        names = [f"musllinux_1_{number}" for number in range(5, -1, -1)]
        if minor is not None:
            numbers = range(minor, 4, -1)
            names = [name for n in numbers for name in (f"manylinux_2_{n}", _LEGACY_NAMES.get(n)) if name]
        platforms = [f"{name}_{self.machine}" for name in [*names, "linux"]]
        version = tuple(map(int, self.python.split(".")))
        tags = [
            *cpython_tags(python_version=version, platforms=platforms),
            *compatible_tags(
                python_version=version, interpreter=f"cp{''.join(map(str, version))}", platforms=platforms
            ),
        ]
        return {tag: rank for rank, tag in reversed(list(enumerate(tags)))}

    def _build_marker_variables(self) -> dict[str, str | frozenset[str]]:
        return {
            "implementation_name": "cpython",
            "implementation_version": f"{self.python}.0",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": f"{self.python}.0",
            "python_version": self.python,
            "sys_platform": "linux",
            "extra": "",
            "extras": frozenset(),
            "dependency_groups": frozenset(),
        }

    def satisfies(self, marker: str) -> bool:
        """Return whether a requirement with this marker is installed on the platform."""
        return Marker(marker).evaluate(self._build_marker_variables(), context="lock_file")


@dataclass(frozen=True, slots=True)
class PackageFile:
    """A file of a package: a wheel, or a source archive of which the head builds a wheel.

    Attributes:
        name: Name of the package.
        version: Version of the package.
        filename: Name of the file.
        url: URL; a local file has a URL with the scheme `file`.
        sha256: SHA-256 of the file.
        index: URL of the package index, or "".
        is_source: Whether the file is a source archive.
    """

    name: str
    version: str
    filename: str
    url: str
    sha256: str
    index: str
    is_source: bool


def select_files(lock: Mapping[str, Any], platform: Platform) -> list[PackageFile]:
    """Return the file of each package that the platform needs, by name.

    Raises:
        EnvironmentFailed: The packages need another version of Python; or a package has no file for the platform, has
            no hash, or is not in an index.
    """
    required = lock.get("requires-python", "")
    if not SpecifierSet(required).contains(f"{platform.python}.99"):
        hint = "set `environment.python` to one that fits"
        raise EnvironmentFailed(f"the packages need Python {required}, not {platform.python}", hint=hint)
    tags = platform.list_tags()
    wanted = [p for p in lock.get("packages", ()) if "marker" not in p or platform.satisfies(p["marker"])]
    return [_select_file(package, platform, tags) for package in wanted]


def _select_file(package: Mapping[str, Any], platform: Platform, tags: Mapping[Tag, int]) -> PackageFile:
    label = f"{package['name']} {package.get('version', '')}".strip()
    local = next((kind for kind in ("vcs", "directory") if kind in package), None)
    if local is not None:
        where = package[local].get("url") or package[local].get("path")
        hint = (
            "build a wheel of it (`uv build --wheel`), and name the wheel in its place; or let `sync` send it as code"
        )
        raise EnvironmentFailed(f"{label} comes from `{where}`, not from an index or a file", hint=hint)
    wheels = [wheel for wheel in package.get("wheels", ()) if _read_url(wheel)]
    if "archive" in package:
        wheels = [package["archive"]] if _read_filename(package["archive"]).endswith(".whl") else []
    ranked = [(rank, wheel) for wheel in wheels if (rank := _rank(wheel, tags)) is not None]
    if ranked:
        return _describe_file(package, min(ranked, key=lambda pair: pair[0])[1], is_source=False)
    source = package.get("sdist") or (package.get("archive") if not wheels else None)
    if source is None:
        found = ", ".join(sorted({_read_filename(wheel).split("-", 2)[2].removesuffix(".whl") for wheel in wheels})[:6])
        hint = "lock a version that has one, or set `environment.python` to another version"
        text = f"{label} has no file for {platform}"
        raise EnvironmentFailed(f"{text}; it has files for {found}" if found else text, hint=hint)
    return _describe_file(package, source, is_source=True)


def _rank(wheel: Mapping[str, Any], tags: Mapping[Tag, int]) -> int | None:
    try:
        found = parse_wheel_filename(_read_filename(wheel))[3]
    except InvalidWheelFilename:
        return None
    return min((tags[tag] for tag in found if tag in tags), default=None)


def _describe_file(package: Mapping[str, Any], file: Mapping[str, Any], *, is_source: bool) -> PackageFile:
    digest = file.get("hashes", {}).get("sha256")
    if digest is None:
        raise EnvironmentFailed(f"the lock has no SHA-256 of {_read_filename(file)}", hint="`uv lock` writes hashes")
    version, filename = package.get("version"), _read_filename(file)
    if version is None:
        version = str(parse_wheel_filename(filename)[1]) if not is_source else "0"
    return PackageFile(
        package["name"], version, filename, _read_url(file), digest, package.get("index", ""), is_source=is_source
    )


def _read_url(file: Mapping[str, Any]) -> str:
    return str(file.get("url") or f"file://{file['path']}" if "url" in file or "path" in file else "")


def _read_filename(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or unquote(_read_url(file).partition("#")[0].rpartition("/")[2]))


def list_requirements(files: list[tuple[PackageFile, str, str | None]]) -> Iterator[str]:
    """Yield a line of a requirements file for each package.

    Args:
        files: The file of each package, the SHA-256 of its wheel, and its URL if the node downloads it.
    """
    for file, digest, url in files:
        yield f"{file.name}{f' @ {url}' if url else f'=={file.version}'} --hash=sha256:{digest}"
