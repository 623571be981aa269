"""The kernel's mount table, and the types of network filesystems."""

from __future__ import annotations

import functools
import re

from clusterctl.agent.linux.syscalls import read_or_empty
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_MAX_TABLE_BYTES = 4 << 20
_OCTAL = rb"\\([0-3][0-7]{2})"


@frozen_dataclass(frozen=True)
class Mount:
    """An entry of the mount table; see fstab(5).

    Attributes:
        device: The device or remote path.
        mount_point: The folder, without the prefix `root`.
        fstype: The type of the filesystem.
        options: The kernel's option names, separated by commas.
    """

    device: str
    mount_point: str
    fstype: str
    options: str


def list_mounts(root: str = "") -> tuple[Mount, ...]:
    """Return all mounts, oldest first; nothing if the mount table cannot be read.

    Args:
        root: Prefix of /proc.
    """
    base = root.rstrip("/")
    table = read_or_empty(f"{base}/proc/self/mounts", _MAX_TABLE_BYTES) or read_or_empty(
        f"{base}/proc/mounts", _MAX_TABLE_BYTES
    )
    return _parse_mounts(table)


@functools.lru_cache(maxsize=1)
def _parse_mounts(table: bytes) -> tuple[Mount, ...]:
    # The cache helps because several callers in a row read the same table.
    lines = (line.split(b" ") for line in table.split(b"\n"))
    return tuple(Mount(*map(_decode_word, fields[:4])) for fields in lines if len(fields) >= 4)


def _decode_word(word: bytes) -> str:
    """Decode a word of the mount table, in which blanks, newlines and backslashes are octal numbers."""
    if b"\\" in word:
        word = re.sub(_OCTAL, lambda found: bytes([int(found[1], 8)]), word)
    return word.decode("utf-8", "surrogateescape")


def find_mount(path: str, table: Iterable[Mount]) -> Mount | None:
    """Return the mount that contains an absolute path without symbolic links, or `None`."""
    best = None
    for mount in table:
        inside = path == mount.mount_point or path.startswith(mount.mount_point.rstrip("/") + "/")
        # Of two mounts at the same mount point, the later mount hides the earlier mount.
        if inside and (best is None or len(mount.mount_point) >= len(best.mount_point)):
            best = mount
    return best


_KERNEL_NETWORK_FSTYPES = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "9p", "panfs"),
    *("pvfs2", "orangefs", "wekafs", "vastnfs", "quobyte", "ocfs2", "gfs2", "virtiofs", "vboxsf"),
)
_FUSE_NETWORK_NAMES = (
    *("ceph", "glusterfs", "sshfs", "juicefs", "s3fs", "gcsfuse", "mountpoint-s3", "rclone", "goofys", "mfs", "dfuse"),
    *("daos", "vmhgfs-fuse"),
)
NETWORK_FSTYPES = frozenset([*_KERNEL_NETWORK_FSTYPES, *(f"fuse.{name}" for name in _FUSE_NETWORK_NAMES)])
"""Types of filesystems that several machines may share."""
_LOCAL_FUSE_FSTYPES = frozenset({"fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse"})


def may_hang(fstype: str) -> bool:
    """Return whether accesses to a filesystem may hang, because another machine or a user program serves it."""
    return (
        fstype in NETWORK_FSTYPES
        or fstype == "fuse"
        or (fstype.startswith("fuse.") and fstype not in _LOCAL_FUSE_FSTYPES)
    )
