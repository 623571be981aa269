"""The folder of environments on a node. The head decides what is made there; this module makes each entry once.

id             a random text: nodes that read the same id share the folder, as with a home on a file server
packages/      wheels, Pythons and tools that the head has sent
cache/         the cache of uv, which environments share by hard links
images/        images of apptainer, which are no entries
.locks/NAME    locked while an entry is made
.current/LINK  leads to the environment that the last `up` of a cluster file has made
NAME/          an entry: a virtual environment, a Python, or the record of a setup
NAME/.made     written last; an entry without this file is torn, and is made again
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import socket
import sys
from typing import TYPE_CHECKING

from clusterctl.agent.linux import syscalls
from clusterctl.agent.protocol import command_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clusterctl.agent.protocol.command_payload_types import EnvironmentAnswer, EnvironmentArguments

MARKER = ".made"
_KEY = re.compile(r"py[0-9a-f]{24}-")
"""The name of a cache that belongs to an environment: `recipe.compute_key` makes the key."""
_USUAL_FOLDERS = ("/usr/bin", "/usr/local/bin")
_REACH_TIMEOUT_S = 5.0


def describe_store(arguments: EnvironmentArguments, used: Iterable[str], caches: str) -> EnvironmentAnswer:
    """Return what a node has for an environment; remove entries beyond `max_size` (bytes) first.

    Args:
        arguments: The request.
        used: Pythons of live runs. Their entries are never removed.
        caches: The folder with the compiled code of each environment, which is removed with its environment.
    """
    folder = arguments["folder"]
    make_folder(folder)
    removed = 0
    if arguments.get("max_size") is not None:
        removed = _trim(folder, int(arguments["max_size"]), [*used, *(f"{folder}/{n}/" for n in arguments["names"])])
        removed += _remove_caches(folder, caches)
    made = [name for name in arguments["names"] if is_made(f"{folder}/{name}")]
    for name in made:
        with contextlib.suppress(OSError):
            os.utime(f"{folder}/{name}/{MARKER}")
    if made and "link" in arguments:
        _link(folder, arguments["link"], made[0])
    url = arguments.get("url")
    disk = os.statvfs(folder)
    return {
        "id": _read_id(folder),
        "made": made,
        "python": _find_python(arguments["python"]) if arguments.get("python") else None,
        "reachable": url is not None and _can_connect(url),
        "free": disk.f_bavail * disk.f_frsize,
        "size": sum(_measure_entries(folder).values()) if arguments.get("max_size") is not None else 0,
        "removed": removed,
    }


def make_folder(folder: str) -> None:
    """Make the folder of environments.

    Raises:
        RequestError: The folder cannot be made.
    """
    try:
        os.makedirs(f"{folder}/.locks", 0o700, exist_ok=True)
    except OSError as error:
        text = f"cannot make the folder of environments {folder}: {error.strerror or error}"
        raise command_messages.make_refused_error(text) from error


def _read_id(folder: str) -> str:
    """Return the id of the folder. The first node that needs it writes it; a link never replaces a file."""
    path, own = f"{folder}/id", f"{folder}/.locks/id-{os.urandom(8).hex()}"
    if not os.path.exists(path):
        syscalls.write_atomically(own, os.urandom(16).hex().encode())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)
        os.unlink(own)
    return syscalls.read_or_empty(path).decode("ascii", "replace")


def _link(folder: str, link: str, name: str) -> None:
    """Let a link lead to an entry. `exec --in-job`, `shell` and `health` use the link."""
    path, target = f"{folder}/.current/{link}", f"../{name}"
    with contextlib.suppress(OSError):
        if os.readlink(path) == target:
            return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = f"{path}.{os.urandom(6).hex()}"
    os.symlink(target, part)
    os.replace(part, path)


def is_made(place: str) -> bool:
    """Return whether an entry is complete, and its proof (see `maker.make_entry`) still exists."""
    made = syscalls.read_json(f"{place}/{MARKER}")
    return made is not None and os.path.exists(os.path.join(place, made.get("proof", "")))


def _find_python(version: str) -> str | None:
    """Return the path of an interpreter of this minor version. Scripts such as the shims of pyenv do not count."""
    candidates = [
        *([sys.executable] if version == "{}.{}".format(*sys.version_info[:2]) else []),
        *(f"{folder}/python{version}" for folder in [*os.environ.get("PATH", "").split(":"), *_USUAL_FOLDERS]),
        *sorted(glob.glob(os.path.expanduser(f"~/.local/share/uv/python/cpython-{version}.*/bin/python{version}"))),
    ]
    for path in candidates:
        if os.access(path, os.X_OK) and syscalls.read_or_empty(path, 4) == b"\x7fELF":
            return path
    return None


def _can_connect(url: str) -> bool:
    """Return whether the host of a URL accepts connections of this node."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.partition("/")[0].rpartition("@")[2].partition(":")
    try:
        with socket.create_connection((host, int(port or {"http": 80}.get(scheme, 443))), _REACH_TIMEOUT_S):
            return True
    except (OSError, ValueError):
        return False


def remove(place: str) -> None:
    """Remove an entry, its marker first: an entry that is removed in part is torn."""
    with contextlib.suppress(OSError):
        os.unlink(f"{place}/{MARKER}")
    shutil.rmtree(place, ignore_errors=True)


# --- size


def measure(place: str) -> int:
    """Return the bytes that the files in a folder take on the disk."""
    return sum(os.lstat(os.path.join(top, name)).st_blocks * 512 for top, _, names in os.walk(place) for name in names)


def _measure_entries(folder: str) -> dict[str, int]:
    """Return the size in bytes of each entry, also of torn ones, and of the packages."""
    names = [name for name in _list_names(folder) if os.path.isdir(f"{folder}/{name}") and not name.startswith(".")]
    names = [name for name in names if name != "images"]
    markers = {name: syscalls.read_json(f"{folder}/{name}/{MARKER}") for name in names if name != "cache"}
    return {
        name: measure(f"{folder}/{name}") if marker is None else int(marker.get("bytes", 0))
        for name, marker in markers.items()
    }


def _read_last_use(place: str) -> float:
    """Return the time of the last use of an entry; 0 for a torn one."""
    try:
        return os.stat(f"{place}/{MARKER}").st_mtime
    except OSError:
        return 0.0


def _trim(folder: str, max_bytes: int, used: Sequence[str]) -> int:
    """Remove the entries that were not used for longest, until at most `max_bytes` remain; return the removed bytes."""
    sizes = _measure_entries(folder)
    before = total = sum(sizes.values())
    order = sorted(sizes.keys() - {"packages"}, key=lambda name: _read_last_use(f"{folder}/{name}"))
    removable = [name for name in order if not any(path.startswith(f"{folder}/{name}/") for path in used)]
    while total > max_bytes and removable:
        name = removable.pop(0)
        needed = _list_needed(folder)
        if name in needed:
            continue
        with open(f"{folder}/.locks/{name}", "a") as lock, contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(f"{folder}/{name}")
        shutil.rmtree(f"{folder}/cache", ignore_errors=True)
        needed = _list_needed(folder)
        for package in _list_names(f"{folder}/packages"):
            if package not in needed:
                os.unlink(f"{folder}/packages/{package}")
        total = sum(_measure_entries(folder).values())
    return max(0, before - total)


def _remove_caches(folder: str, caches: str) -> int:
    """Remove the compiled code of removed environments; return its bytes. Other caches stay."""
    keys = {name: name.partition("-")[0] for name in _list_names(caches) if _KEY.match(name)}
    gone = [name for name, key in keys.items() if not is_made(f"{folder}/{key}")]
    removed = sum(measure(f"{caches}/{name}") for name in gone)
    for name in gone:
        remove(f"{caches}/{name}")
    return removed


def _list_needed(folder: str) -> set[str]:
    markers = (syscalls.read_json(f"{folder}/{name}/{MARKER}") or {} for name in _list_names(folder))
    return {name for marker in markers for name in marker.get("uses", ())}


def _list_names(folder: str) -> list[str]:
    return os.listdir(folder) if os.path.isdir(folder) else []
