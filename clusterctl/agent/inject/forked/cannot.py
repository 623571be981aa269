"""Why no rank may be forked from this process: the reason is told, and the ranks start anew."""

from __future__ import annotations

import os
import sys
import sysconfig

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/accel")
"""What only a context of a device opens: the driver's library that counts GPUs does not."""
_MEASURES = ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG", "PYTHONINSPECT")
_STARTS_THREADS = ("jax", "tensorflow")
"""What is not seen to mean the same in a fork."""


class CannotForkError(Exception):
    """A rank cannot be forked; the text says why."""


def check_python() -> None:
    """See whether this Python can do it at all.

    Raises:
        CannotForkError: It cannot.
    """
    if sys.implementation.name != "cpython" or sys.version_info < (3, 9):
        raise CannotForkError(f"{sys.executable} is no CPython of version 3.9 or later")
    for name in _MEASURES:
        if os.environ.get(name):
            raise CannotForkError(f"{name} is set, which is for processes that start anew")


def check(place: str) -> None:
    """See whether what was imported may be shared by ranks.

    Args:
        place: Folder of our own modules.

    Raises:
        CannotForkError: It may not.
    """
    check_now()
    for name, file in _files():
        if not _is_installed(file) and not file.startswith(place + os.sep):
            raise CannotForkError(f"what was imported took in `{name}`, which is not installed: {file}")
    for name in _STARTS_THREADS:
        if name in sys.modules:
            raise CannotForkError(f"{name} was imported, which is not known to work in a fork")
    if sys.gettrace() is not None or sys.getprofile() is not None:
        raise CannotForkError("a tracer is at work")
    for target in _descriptors():
        if target.startswith(_DEVICES):
            raise CannotForkError(f"what was imported has opened {target}")
        if target.startswith("socket:"):
            raise CannotForkError("what was imported has opened a connection")
    _check_torch()


def check_now() -> None:
    """See what may change from one fork to the next.

    Raises:
        CannotForkError: A fork would lose something, or share what must not be shared.
    """
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise CannotForkError(f"what was imported runs {threads - 1} threads, which a fork would lose")
    try:
        ended, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        pass
    else:
        if not ended:
            raise CannotForkError("what was imported has started a process")
    shared = _shared_memory()
    if shared is not None:
        raise CannotForkError(f"what was imported shares memory with whoever forks: {shared}")


def _check_torch() -> None:
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        raise CannotForkError("what was imported has initialised CUDA")
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise CannotForkError("what was imported has opened a process group")


def _files() -> Iterator[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and os.path.isabs(file) and name not in ("__main__", "__mp_main__"):
            yield name, file


def _is_installed(file: str) -> bool:
    parts = file.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return any(file.startswith(folder + os.sep) for folder in standard_folders())


def standard_folders() -> set[str]:
    """Return where the standard library lies."""
    paths = sysconfig.get_paths()
    found = {paths["stdlib"], paths["platstdlib"], os.path.dirname(os.__file__)}
    return found | {os.path.realpath(path) for path in found}


def _descriptors() -> Iterator[str]:
    """Return what is open beyond the standard streams and our own connection."""
    from . import state

    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) != state.control:
            try:
                yield os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue


def _shared_memory() -> str | None:
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split(None, 5)
            if fields[1][1] == "w" and fields[1][3] == "s":
                return fields[5].strip() if len(fields) > 5 else "without a name"
    return None


def imported_files() -> dict[str, tuple[int, int]]:
    """Return time and size of every file that was imported, so that a change can be seen.

    Our own are written again by each start, as they are.
    """
    place = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    found = {}
    for _, file in _files():
        try:
            status = os.stat(file)
        except OSError:
            continue
        if file.startswith(place + os.sep):
            continue
        found[file] = (status.st_mtime_ns, status.st_size)
    return found
