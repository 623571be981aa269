"""Downloads the files of packages to the head once, and verifies them. Keys of private indexes stay here."""

from __future__ import annotations

import base64
import hashlib
import netrc
import os
import re
import secrets
import shutil
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clusterctl.errors import EnvironmentFailed
from clusterctl.run.environments.locked_packages import PackageFile, Platform
from clusterctl.run.environments.recipe import get_cache_folder, run_uv

_PARALLEL = 8
_CHUNK_BYTES = 1 << 20
_TIMEOUT_S = 60.0


def fetch_files(
    files: Sequence[PackageFile], platform: Platform, folder: str, on_file: Callable[[str], None]
) -> dict[PackageFile, Path]:
    """Return the wheel of each package on the head. Only missing files are downloaded; sources are built.

    Args:
        files: The files.
        platform: The platform of the nodes, for sources.
        folder: Folder of the project, whose `pyproject.toml` names its indexes.
        on_file: A function that receives the name of each file. Several threads call it.

    Raises:
        EnvironmentFailed: A file cannot be downloaded or built, or has a wrong hash.
    """
    keys = _read_index_keys(os.environ, folder)

    def fetch(file: PackageFile) -> Path:
        stored = get_cache_folder("packages") / file.sha256 / file.filename
        if not stored.is_file():
            on_file(file.filename)
            _download(file, stored, keys)
        return _build_wheel(file, stored, platform) if file.is_source else stored

    with ThreadPoolExecutor(_PARALLEL) as pool:
        return dict(zip(files, pool.map(fetch, files), strict=True))


def _download(file: PackageFile, stored: Path, keys: Mapping[str, tuple[str, str]]) -> None:
    url, login = _split_login(file.url)
    login = login or next((key for index, key in keys.items() if file.index.startswith(index)), None)
    request = urllib.request.Request(url)
    if login is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(":".join(login).encode()).decode())
    stored.parent.mkdir(parents=True, exist_ok=True)
    part, digest = stored.parent / f".{secrets.token_hex(8)}", hashlib.sha256()
    try:
        with part.open("xb") as written, urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            while chunk := answer.read(_CHUNK_BYTES):
                digest.update(chunk)
                written.write(chunk)
        if digest.hexdigest() != file.sha256:
            hint = "the file at this place has changed: lock the packages again, or ask its owner"
            raise EnvironmentFailed(
                f"{file.filename} does not have the hash in the lock ({_hide_login(url)})", hint=hint
            )
        part.replace(stored)
    except (OSError, ValueError) as error:
        reason: object = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        forbidden = isinstance(error, urllib.error.HTTPError) and error.code in (401, 403)
        keys_hint = (
            "`~/.netrc` or UV_INDEX_NAME_USERNAME and _PASSWORD hold the keys of an index" if forbidden else None
        )
        raise EnvironmentFailed(
            f"cannot download {file.filename} from {_hide_login(url)}: {reason}", hint=keys_hint
        ) from error
    finally:
        part.unlink(missing_ok=True)


def _hide_login(url: str) -> str:
    return urllib.parse.urlsplit(url)._replace(query="", fragment="").geturl()


def _split_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """Return a URL without its login, and the login in the URL or in `~/.netrc`."""
    parts = urllib.parse.urlsplit(url)
    if parts.username:
        bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
        return bare, (urllib.parse.unquote(parts.username), urllib.parse.unquote(parts.password or ""))
    try:
        found = netrc.netrc().authenticators(parts.hostname or "")
    except (OSError, netrc.NetrcParseError):
        return url, None
    return url, (found[0], found[2] or "") if found else None


def _read_index_keys(environ: Mapping[str, str], folder: str) -> dict[str, tuple[str, str]]:
    """Return user and password of each index of a project by URL, from the variables that uv documents for them."""
    project = Path(folder, "pyproject.toml")
    text = project.read_text() if project.is_file() else ""
    found = {}
    for name, url in re.findall(r"(?ms)^\[\[tool\.uv\.index\]\][^\[]*?^name = \"(.+?)\"[^\[]*?^url = \"(.+?)\"", text):
        variable = "UV_INDEX_" + re.sub(r"\W", "_", name).upper()
        if f"{variable}_USERNAME" in environ or f"{variable}_PASSWORD" in environ:
            found[url] = environ.get(f"{variable}_USERNAME", ""), environ.get(f"{variable}_PASSWORD", "")
    return found


def _build_wheel(file: PackageFile, source: Path, platform: Platform) -> Path:
    """Return the wheel of a source archive, which is built on the head for the Python of the nodes."""
    place = source.parent / f"py{platform.python}"
    if not list(place.glob("*.whl")):
        purpose = f"no wheel can be built of {file.filename}, and {file.name} {file.version} has none for {platform}"
        with tempfile.TemporaryDirectory(dir=source.parent) as made:
            run_uv("build", str(source), "--wheel", "--out-dir", made, "--python", platform.python, purpose=purpose)
            shutil.copytree(made, place, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
    wheel = next(place.glob("*.whl"))
    own = os.uname().machine, os.confstr("CS_GNU_LIBC_VERSION")
    if not wheel.name.endswith("-any.whl") and (platform.machine, platform.libc) != own:
        text = (
            f"{file.name} {file.version} has no wheel for {platform}, and a wheel built on this head may not run there"
        )
        raise EnvironmentFailed(text, hint="build the wheel on a machine like the nodes, and lock its URL")
    return wheel
