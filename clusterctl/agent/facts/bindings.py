"""Finding NVIDIA's Python bindings, cheaply.

They travel in the bundle as source. Compiling their 8000 lines costs a fifth of a second at every start, because a zip
archive has no room for bytecode; so the source is laid beside the archive once, where Python caches the bytecode.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any


class NoBindingsError(Exception):
    """There is no `pynvml` in the bundle nor in the job's environment."""


def load() -> Any:
    """Return the module `pynvml`.

    Raises:
        NoBindingsError: It is not there.
    """
    spec = importlib.util.find_spec("pynvml")
    if spec is None or spec.loader is None:
        raise NoBindingsError("nvidia-ml-py is neither in the bundle nor in the job's Python")
    archive = getattr(spec.loader, "archive", None)
    if archive is not None:
        place = _unpacked(archive, spec.loader)
        if place is not None:
            sys.path.insert(0, place)
            importlib.invalidate_caches()
    import pynvml

    return pynvml


def _unpacked(archive: str, loader: Any) -> str | None:
    """Return a directory of this archive's own that holds `pynvml.py`, or `None` where none can be made."""
    place = archive + ".d"
    target = os.path.join(place, "pynvml.py")
    if os.path.exists(target):
        return place
    try:
        os.makedirs(place, mode=0o700, exist_ok=True)
        partial = f"{target}.{os.getpid()}"
        with open(partial, "w", encoding="utf-8") as file:
            file.write(loader.get_source("pynvml"))
        os.replace(partial, target)
    except OSError:
        return None
    return place
