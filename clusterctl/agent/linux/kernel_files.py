"""Readers of small files in /proc, /sys and /dev. `root` is a prefix of all paths, "/" except in tests."""

from __future__ import annotations

import errno
import os

_CHUNK_BYTES = 1 << 16


def join_root(root: str, path: str) -> str:
    """Return an absolute `path` below `root`."""
    return path if root == "/" else root.rstrip("/") + path


def read_bytes_or_none(path: str) -> bytes | None:
    """Return the content of a small file, or `None` if it cannot be read."""
    try:
        return read_bytes(path)
    except OSError:
        return None


def read_bytes(path: str) -> bytes:
    """Return the content of a small file, without `open`, which would be much slower for hundreds of files.

    Raises:
        OSError: The file cannot be read.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, _CHUNK_BYTES)]
        # In /proc, only an empty read is the end of a file; a short read is not.
        while parts[-1]:
            parts.append(os.read(fd, _CHUNK_BYTES))
    finally:
        os.close(fd)
    return b"".join(parts)


def read_text(root: str, path: str) -> str | None:
    """Return the stripped text of a file, or `None` if it cannot be read."""
    data = read_bytes_or_none(join_root(root, path))
    return None if data is None else data.decode("utf-8", "replace").strip()


def read_int(root: str, path: str) -> int | None:
    """Return the integer at the start of a file (decimal, or hexadecimal with 0x), or `None`."""
    digits = read_text(root, path)
    if not digits:
        return None
    try:
        return int(digits.split()[0], 0)
    except ValueError:
        return None


def list_names(root: str, path: str) -> list[str]:
    """Return the sorted names in a folder; an empty list if the folder cannot be read."""
    try:
        return sorted(os.listdir(join_root(root, path)))
    except OSError:
        return []


def check_device_permission(root: str, path: str) -> str:
    """Return whether this user may read and write a device file, without opening it: `ok`, `absent` or `denied`."""
    place = join_root(root, path)
    if os.access(place, os.R_OK | os.W_OK):
        return "ok"
    return "denied" if os.path.exists(place) else "absent"


def probe_device_open(root: str, path: str) -> str:
    """Open a device file; return `ok`, `absent`, or the name of the error (`EPERM`: the device cgroup denies it)."""
    try:
        os.close(os.open(join_root(root, path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError:
        return "absent"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "ok"
