"""The few Linux calls that Python 3.10 does not offer: namespaces and mounts."""

from __future__ import annotations

import ctypes
import os
from typing import Final

# <linux/sched.h>
NEWTIME: Final = 0x80
FS: Final = 0x200
NEWNS: Final = 0x00020000
NEWCGROUP: Final = 0x02000000
NEWUTS: Final = 0x04000000
NEWIPC: Final = 0x08000000
NEWPID: Final = 0x20000000
NEWNET: Final = 0x40000000

# <sys/mount.h>
RDONLY: Final = 1
NOSUID: Final = 2
NODEV: Final = 4
NOEXEC: Final = 8
REMOUNT: Final = 32
BIND: Final = 4096
REC: Final = 16384
PRIVATE: Final = 1 << 18

_PR_SET_PDEATHSIG: Final = 1
# <asm-generic/unistd.h>, <linux/fcntl.h>, <linux/mount.h>
_OPEN_TREE: Final = 428
_MOVE_MOUNT: Final = 429
_MOUNT_SETATTR: Final = 442
_HERE: Final = -100
_MNT_DETACH: Final = 2
_OPEN_TREE_CLONE: Final = 1
_MOVE_MOUNT_F_EMPTY_PATH: Final = 4
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own (a new PID namespace only for its later children)."""
    _check(_libc.unshare(flags), f"unshare({flags:#x})")


def enter(descriptor: int, kind: int) -> None:
    """Move the calling thread into the namespace that a descriptor of `/proc/PID/ns/...` names."""
    _check(_libc.setns(descriptor, kind), f"setns({kind:#x})")


def die_with_parent(number: int) -> None:
    """Ask the kernel for a signal when the thread that forked this process ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0), "prctl(PR_SET_PDEATHSIG)")


def mount(source: str, target: str, kind: str = "none", flags: int = 0, options: str = "") -> None:
    """Mount, bind or remount, as mount(2) takes it.

    Raises:
        OSError: naming source and target.
    """
    result = _libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(result, f"mount {kind} {source} on {target}")


def unmount(path: str) -> None:
    """Take away a mount and all that is mounted below it, whoever uses it."""
    _check(_libc.umount2(path.encode(), _MNT_DETACH), f"unmount {path}")


def bind(source: str, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    """Make `source` visible at `target` as well; whether that can be written does not depend on `source`."""
    mount(source, target, flags=BIND | (REC if recursive else 0))
    mount("none", target, flags=BIND | REMOUNT | (RDONLY if read_only else 0))


class _MountAttr(ctypes.Structure):
    """`struct mount_attr` of <linux/mount.h>."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def read_only_tree(path: str) -> None:
    """Make a mount and every mount below it read-only (mount_setattr, Linux 5.12)."""
    attributes = _MountAttr(attr_set=RDONLY)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = _libc.syscall(_MOUNT_SETATTR, _HERE, path.encode(), 0x8000, ctypes.byref(attributes), size)
    _check(result, f"mount_setattr {path}")


def copy_mount(path: str) -> int:
    """Return a descriptor that keeps the file system mounted at `path`, whatever becomes of this namespace."""
    descriptor: int = _libc.syscall(_OPEN_TREE, _HERE, path.encode(), _OPEN_TREE_CLONE | os.O_CLOEXEC)
    _check(min(descriptor, 0), f"open_tree {path}")
    return descriptor


def attach_mount(descriptor: int, path: str) -> None:
    """Mount what `copy_mount` has kept."""
    result = _libc.syscall(_MOVE_MOUNT, descriptor, b"", _HERE, path.encode(), _MOVE_MOUNT_F_EMPTY_PATH)
    _check(result, f"move_mount to {path}")


def mount_fuse(descriptor: int, source: str, path: str, kind: str) -> None:
    """Mount a file system that whoever reads /dev/fuse from `descriptor` plays, for every user of the machine."""
    mount(source, path, kind, NOSUID | NODEV, f"fd={descriptor},rootmode=40000,user_id=0,group_id=0,allow_other")


def private_mounts() -> None:
    """Stop mounts of this namespace from spreading to the one it was copied from."""
    mount("none", "/", flags=REC | PRIVATE)
