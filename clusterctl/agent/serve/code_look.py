"""Code that nobody synced: the hashes of the source files under a folder, so that a change can be told."""

from __future__ import annotations

import hashlib
import os

from clusterctl.agent.linux.syscalls import read_bytes

_SOURCES = (".py", ".sh", ".pyx", ".cu", ".cpp", ".c", ".h")
_MOST_FILES = 2000
_MOST_BYTES = 1 << 20


def hashes(folder: str) -> dict[str, str]:
    """Return the SHA-256 of each source file by its path below `folder`; bounded, and blind to what is hidden.

    Folders of virtual environments, caches and hidden ones are left out, as is all beyond the first 2000 files.
    """
    by_path: dict[str, str] = {}
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_code(os.path.join(place, name)))
        for name in sorted(files):
            if name.endswith(_SOURCES) and not name.startswith("."):
                if len(by_path) >= _MOST_FILES:
                    return by_path
                path = os.path.join(place, name)
                by_path[os.path.relpath(path, folder)] = hashlib.sha256(read_bytes(path, _MOST_BYTES)).hexdigest()
    return by_path


def _is_code(folder: str) -> bool:
    name = os.path.basename(folder)
    hidden = name.startswith(".") or name in ("__pycache__", "node_modules", "site-packages")
    return not hidden and not os.path.exists(os.path.join(folder, "pyvenv.cfg"))
