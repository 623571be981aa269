"""Shared libraries as the loader would find them, without loading any."""

from __future__ import annotations

import os
import sys

from clusterctl.agent.linux import paths

_USUAL = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib")


def find(name: str, root: str = "/", *, prefix: str | None = None) -> str | None:
    """Return where a library lies: on LD_LIBRARY_PATH, below the Python, in the loader's cache, or where all lie."""
    listed = [place for place in os.environ.get("LD_LIBRARY_PATH", "").split(":") if place]
    own = os.path.join(sys.prefix if prefix is None else prefix, "lib")
    for place in [*listed, own]:
        if os.path.exists(paths.under(root, f"{place}/{name}")):
            return f"{place.rstrip('/')}/{name}"
    return _cached(name, root) or next(
        (f"{place}/{name}" for place in _USUAL if os.path.exists(paths.under(root, f"{place}/{name}"))), None
    )


def _cached(name: str, root: str) -> str | None:
    """Return the path that `/etc/ld.so.cache` has for a name; its strings end in a zero byte (ldconfig(8))."""
    data = paths.content(paths.under(root, "/etc/ld.so.cache")) or b""
    end = data.find(f"/{name}\0".encode())
    if end < 0:
        return None
    path = data[data.rfind(b"\0", 0, end) + 1 : data.index(b"\0", end)].decode("utf-8", "surrogateescape")
    return path if os.path.exists(paths.under(root, path)) else None
