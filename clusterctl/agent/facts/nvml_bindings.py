"""Imports NVIDIA's Python bindings and caches their bytecode.

The agent archive contains the bindings as source. Compiling their 8000 lines takes a fifth of a second at every start,
because Python keeps no bytecode for a zip archive. So the sources that a probe needs are unpacked once beside the
archive, into a folder where each Python version keeps its bytecode.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class NoBindingsError(Exception):
    """The module `pynvml` is neither in the archive nor in the job's environment."""


def load_bindings() -> Any:
    """Return the module `pynvml`.

    Raises:
        NoBindingsError: The module is missing.
    """
    if importlib.util.find_spec("pynvml") is None:
        raise NoBindingsError("nvidia-ml-py is neither in the bundle nor in the job's Python")
    imported = "ctypes.util" in sys.modules
    if not imported:
        # The bindings import a function that they never call, and with it half of the standard library, which doubles
        # their CPU time.
        spared = type(sys)("ctypes.util")
        spared.__dict__["find_library"] = None
        sys.modules["ctypes.util"] = spared
    try:
        return importlib.import_module("pynvml")
    finally:
        if not imported:
            del sys.modules["ctypes.util"]


def use_unpacked_sources(package: Any) -> None:
    """Import the modules of `package` (this one's) and `pynvml` from a folder beside their archive.

    Does nothing if they came from a folder, or if no such folder can be made.
    """
    loader = package.__loader__
    archive = getattr(loader, "archive", None)
    if archive is None:
        return
    place = archive + ".d"
    try:
        if not os.path.isdir(place):
            _unpack(loader, package.__path__[0], place)
        if os.stat(place).st_uid != os.getuid():
            return
    except OSError:
        return
    # Otherwise PYTHONDONTWRITEBYTECODE in a container would defeat the purpose.
    sys.dont_write_bytecode = False
    package.__path__.insert(0, os.path.join(place, "facts"))
    sys.path.insert(0, place)
    importlib.invalidate_caches()


def _unpack(loader: Any, prefix: str, place: str) -> None:
    """Write the sources completely or not at all, however many processes do it at once."""
    # Several nodes may share the home of the archive, so a pid is not unique.
    partial = f"{place}.{os.urandom(6).hex()}"
    inside = os.path.relpath(prefix, loader.archive)
    try:
        os.makedirs(os.path.join(partial, "facts"), mode=0o700)
        for name in MODULES:
            _write(os.path.join(partial, "facts", name + ".py"), loader.get_data(os.path.join(inside, name + ".py")))
        _write(os.path.join(partial, "pynvml.py"), loader.get_data("pynvml.py"))
        os.rename(partial, place)
    except OSError:
        _remove(partial)


def _remove(folder: str) -> None:
    """Remove files that another probe wrote first, or that do not fit on the disk (`shutil` is slow to import)."""
    for top, folders, files in os.walk(folder, topdown=False):
        for name in files:
            os.unlink(os.path.join(top, name))
        for name in folders:
            os.rmdir(os.path.join(top, name))
    os.rmdir(folder)


def _write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)


MODULES = (
    "amdgpu",
    "checkpoints",
    "child_tasks",
    "driver",
    "error_words",
    "gpu_library",
    "gpu_memory_wait",
    "gpu_processes",
    "hardware_errors",
    "host",
    "kernel_log",
    "network",
    "nvml",
    "processes",
    "sampler",
    "storage",
    "versions",
)
"""The modules in this folder; the loader of an archive cannot list them."""
