"""Small packages, locked by the real uv, and a Python that uv can download: all from files, as a lab has no internet."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Mapping

PURE: Final = "py3-none-any"


def find_program(name: str) -> str | None:
    """Return the path of a program that pip has installed, or None."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def write_wheel(folder: Path, name: str, version: str, code: str, tags: str = PURE) -> Path:
    """Write a wheel with one module of the package's name."""
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text)}\n" for path, text in files.items())
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"{name}-{version}-{tags}.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            packed.writestr(path, text)
    list_in_index(folder, name, f"{name}-*.whl")
    return wheel


def list_in_index(folder: Path, name: str, pattern: str) -> None:
    """Write a page of a package index, as PyPI has it: links with hashes."""
    page = folder / "simple" / name / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    links = [
        f'<a href="../../{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a><br>\n'
        for wheel in folder.glob(pattern)
    ]
    page.write_text(f"<!DOCTYPE html><html><body>\n{''.join(links)}</body></html>\n")


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def lock(folder: Path, index: str, wanted: Mapping[str, str], env: Mapping[str, str], python: str = "3.9") -> None:
    """Write `pyproject.toml`, and `uv.lock` with uv from an index, which is a URL."""
    needs = ", ".join(f'"{name}=={version}"' for name, version in wanted.items())
    (folder / "pyproject.toml").write_text(
        f'[project]\nname = "lab"\nversion = "0"\nrequires-python = ">={python}"\ndependencies = [{needs}]\n'
        f'[[tool.uv.index]]\nname = "lab"\nurl = "{index}"\ndefault = true\n'
    )
    uv = find_program("uv")
    assert uv is not None
    command = [uv, "lock", "--python", sys.executable]
    subprocess.run(command, cwd=folder, env=dict(env), check=True, capture_output=True)


class Index:
    """A package index over HTTP on the head, which nodes reach; it asks for the key `user:key` if `is_private`."""

    def __init__(self, wheels: Path, address: str, *, is_private: bool = False) -> None:
        wanted = "Basic " + base64.b64encode(b"user:key").decode()

        class Handler(SimpleHTTPRequestHandler):
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments, directory=str(wheels))

            @override
            def do_GET(self) -> None:
                if is_private and self.headers.get("Authorization") != wanted:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", "Basic")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                seen.append((self.client_address[0], self.path))
                super().do_GET()

            @override
            def log_message(self, *_: Any) -> None: ...

        self.seen: list[tuple[str, str]] = []
        seen = self.seen
        self._server = ThreadingHTTPServer((address, 0), Handler)
        self.url = f"http://{address}:{self._server.server_address[1]}/simple"

    def __enter__(self) -> Index:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def make_conda_environment(folder: Path) -> Path:
    """Make a folder as conda makes it, with a Python and a program `greet`, in both of which is its own path."""
    made = folder / "llm"
    with tarfile.open(_archive_python(folder)) as archive:
        archive.extractall(folder)
    (folder / "python").rename(made)
    (made / "bin" / "greet").write_text(f"#!{made}/bin/python\nimport sys; print('hello from', sys.prefix)\n")
    (made / "bin" / "greet").chmod(0o755)
    (made / "conda-meta").mkdir()
    (made / "conda-meta" / "history").touch()
    version = "{}.{}.{}".format(*sys.version_info[:3])
    record = {"name": "python", "version": version, "url": "", "files": [], "link": {"source": "/gone", "type": 1}}
    (made / "conda-meta" / f"python-{version}-0.json").write_text(json.dumps(record))
    return made


def _archive_python(folder: Path) -> Path:
    source = Path(sys.base_prefix)
    archive = folder / "python.tar.gz"
    old = f"{source}/lib\0".encode()
    new = b"$ORIGIN/../lib".ljust(len(old), b"\0")
    with tarfile.open(archive, "w:gz", compresslevel=1) as packed:
        for top, folders, names in os.walk(source):
            folders[:] = [name for name in folders if name not in ("__pycache__", "test", "site-packages", "share")]
            for name in names:
                path = Path(top, name)
                entry = packed.gettarinfo(path, f"python/{path.relative_to(source)}")
                if not entry.isreg():
                    packed.addfile(entry)
                elif not name.endswith(".a"):
                    # The library's own place is written into the program, in a Python that is not made to be moved.
                    data = path.read_bytes()
                    packed.addfile(entry, io.BytesIO(data.replace(old, new) if data[:4] == b"\x7fELF" else data))
    return archive


def pack_python(folder: Path) -> dict[str, str]:
    """Pack the Python of the tests as uv's releases are packed; return the variables that let uv download it."""
    version, archive = sys.version_info, _archive_python(folder)
    key = f"cpython-{version.major}.{version.minor}.{version.micro}-linux-x86_64-gnu"
    told = {
        "name": "cpython",
        "arch": {"family": "x86_64", "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": version.major,
        "minor": version.minor,
        "patch": version.micro,
        "prerelease": "",
        "variant": None,
        "url": archive.as_uri(),
        "sha256": hashlib.sha256(archive.read_bytes()).hexdigest(),
        "build": "20260101",
    }
    (folder / "downloads.json").write_text(json.dumps({key: told}))
    return {
        "UV_PYTHON_DOWNLOADS_JSON_URL": str(folder / "downloads.json"),
        "UV_PYTHON_INSTALL_DIR": str(folder / "installed"),
    }
