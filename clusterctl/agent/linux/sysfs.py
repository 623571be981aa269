"""Reading small files of the kernel below a root prefix."""

from __future__ import annotations

import errno
import os

_CHUNK_BYTES = 1 << 16


def join_root(root: str, path: str) -> str:
    """Return an absolute `path` as it lies below `root`."""
    return path if root == "/" else root.rstrip("/") + path


def read_bytes_or_none(path: str) -> bytes | None:
    """Return what a small file holds, or `None` where it cannot be read.

    A look opens hundreds: Python's own files, with their buffers and questions, would cost it most of its time.
    """
    try:
        return read_bytes(path)
    except OSError:
        return None


def read_bytes(path: str) -> bytes:
    """Return what a small file holds.

    Raises:
        OSError: It cannot be read; files of a driver tell by the number what is wrong with the device.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(fd, _CHUNK_BYTES)]
        # Files of /proc end where a read says so, not where one was short.
        while parts[-1]:
            parts.append(os.read(fd, _CHUNK_BYTES))
    finally:
        os.close(fd)
    return b"".join(parts)


def read_text(root: str, path: str) -> str | None:
    """Return a file's text without the white space around it, or `None` where it cannot be read."""
    data = read_bytes_or_none(join_root(root, path))
    return None if data is None else data.decode("utf-8", "replace").strip()


def read_int(root: str, path: str) -> int | None:
    """Return a file's leading integer (decimal or 0x), or `None`."""
    digits = read_text(root, path)
    if not digits:
        return None
    try:
        return int(digits.split()[0], 0)
    except ValueError:
        return None


def list_names(root: str, path: str) -> list[str]:
    """Return the names in a directory, sorted; none where it cannot be read."""
    try:
        return sorted(os.listdir(join_root(root, path)))
    except OSError:
        return []


def check_access(root: str, path: str) -> str:
    """Tell whether this user may read and write a device node: `ok`, `absent`, `denied`. Nothing is opened."""
    place = join_root(root, path)
    if os.access(place, os.R_OK | os.W_OK):
        return "ok"
    return "denied" if os.path.exists(place) else "absent"


def check_open(root: str, path: str) -> str:
    """Tell how opening a device node ends: `ok`, `absent`, or the name of the error (`EPERM`: by the device cgroup)."""
    try:
        os.close(os.open(join_root(root, path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except FileNotFoundError:
        return "absent"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "ok"
