"""Kinds of file systems, as the mount table names them."""

from __future__ import annotations

_KERNEL = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "smbfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "afs",
    "9p",
    "panfs",
}
_KERNEL |= {"pvfs2", "orangefs", "wekafs", "vastnfs", "quobyte", "ocfs2", "gfs2", "virtiofs", "vboxsf"}
_FUSE = {
    "ceph",
    "glusterfs",
    "sshfs",
    "juicefs",
    "s3fs",
    "gcsfuse",
    "mountpoint-s3",
    "rclone",
    "goofys",
    "mfs",
    "dfuse",
}
_FUSE |= {"daos", "vmhgfs-fuse"}

NETWORK = frozenset(_KERNEL | {f"fuse.{name}" for name in _FUSE})
"""Those that other machines may see, too."""
_LOCAL_FUSE = frozenset({"fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse"})


def may_hang(kind: str) -> bool:
    """Whether a file system is served by something that may be dead: another machine, or a program."""
    return kind in NETWORK or kind == "fuse" or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
