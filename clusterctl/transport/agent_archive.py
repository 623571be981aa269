"""Packs the agent into one archive, which every node runs. The hash of the content names the archive.

The same sources always give the same bytes: entries are sorted and contain no times.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import io
import os
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from clusterctl.agent.linux.syscalls import write_atomically

_PACKAGE = Path(__file__).resolve().parents[1]
_EPOCH = (1980, 1, 1, 0, 0, 0)
_FORMAT = 3
_PACKING = threading.Lock()
_MAIN = b"import sys\n\nfrom clusterctl.agent.__main__ import main\n\nsys.exit(main())\n"


@dataclass(frozen=True, slots=True)
class AgentArchive:
    """The archive of the agent.

    Attributes:
        data: Content of the archive.
        sha256: Hash of `data` in hexadecimal. Nodes use this hash as the name of the archive, and verify its content by
            the hash.
    """

    data: bytes
    sha256: str


def pack_files(files: dict[str, bytes]) -> AgentArchive:
    """Return the archive of `files` (name in the archive to content)."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as zip_file:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, _EPOCH)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            zip_file.writestr(info, files[name])
    data = stream.getvalue()
    return AgentArchive(data, hashlib.sha256(data).hexdigest())


def load_agent_archive() -> AgentArchive:
    """Return the agent archive of this installation, from the user's cache if the sources have not changed."""
    # Each node has a connecting thread. In Python 3.11, two threads that parse sources at the same time fail.
    with _PACKING:
        return _load_or_pack()


@functools.cache
def _load_or_pack() -> AgentArchive:
    sources = _list_sources()
    stats = [(name, str(p), (s := p.stat()).st_size, s.st_mtime_ns) for name, p in sorted(sources.items())]
    key = hashlib.sha256(repr((_FORMAT, _MAIN, stats)).encode()).hexdigest()[:32]
    cached = platformdirs.user_cache_path("clusterctl") / "bundles" / f"{key}.pyz"
    with contextlib.suppress(OSError):
        stored = cached.read_bytes()
        digest, data = stored[:32], stored[32:]
        if hashlib.sha256(data).digest() == digest:
            return AgentArchive(data, digest.hex())
    files = {name: path.read_bytes() for name, path in sources.items()}
    # zipimport does not support namespace packages: each folder must be a package.
    folders = {name.rpartition("/")[0] for name in files if "/" in name}
    archive = pack_files({**{f"{folder}/__init__.py": b"" for folder in folders}, **files, "__main__.py": _MAIN})
    _store(cached, archive.data)
    return archive


def _list_sources() -> dict[str, Path]:
    # Every command with a connection to a node lists all sources. Plain strings are faster than `Path` objects.
    agent: dict[str, Path] = {}
    for folder, _, files in os.walk(_PACKAGE / "agent"):
        inside = folder[len(str(_PACKAGE.parent)) + 1 :].replace(os.sep, "/")
        names = [name for name in files if name.endswith(".py")]
        agent |= {f"{inside}/{name}": Path(folder, name) for name in names}
    bindings = importlib.util.find_spec("pynvml")
    if bindings is None or bindings.origin is None:
        raise ModuleNotFoundError("`pynvml` is not installed, although clusterctl depends on it", name="pynvml")
    return {
        **agent,
        "clusterctl/__init__.py": _PACKAGE / "__init__.py",
        "clusterctl/_version.py": _PACKAGE / "_version.py",
        "pynvml.py": Path(bindings.origin),
    }


def _store(path: Path, data: bytes) -> None:
    """Store the archive for the next command. If storing fails, the next command packs the archive again."""
    with contextlib.suppress(OSError):
        # If this machine is a node, its agents are stored in the same folder. An agent is not loaded from a folder to
        # which other users can write.
        path.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        for old in path.parent.glob("*.pyz"):
            old.unlink(missing_ok=True)
        write_atomically(str(path), hashlib.sha256(data).digest() + data)
