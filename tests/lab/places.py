"""The places of a node that a machine may have mounted in its own way: the home, /tmp, /var/tmp, /dev/shm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypedDict

from tests.lab import kernel

if TYPE_CHECKING:
    from collections.abc import Mapping

HOME: Final = "~"
TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")
ON_DISK: Final = (HOME, "/var/tmp")
"""What a reboot keeps where nothing else is said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A file system that a server has and several machines mount, each with a client of its own.

    It behaves as NFS version 3: a file that another machine has removed or replaced is stale (ESTALE) for whoever has
    it open; one that the machine itself removes is renamed until it is closed.

    Attributes:
        export: Name of the server's folder; whoever names the same one shares it.
        kind: What the mount table calls it. The kernel lets it begin with `fuse.` only.
        cache_s: Seconds that a client believes what it has asked: attributes, names, names that are not there, and
            the lists of folders. Opening a file asks again, as NFS does; a file that is open shows its old size.
        locks: `shared`: flock works between machines. `local`: each machine has locks of its own. `ENOLCK`,
            `ENOSYS`: neither flock nor fcntl locks can be had.
        root_squash: To the server, root is nobody (65534).
    """

    export: str = "home"
    kind: str = "fuse.glusterfs"
    cache_s: float = 0.0
    locks: str = "shared"
    root_squash: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """How one place is mounted; the default is a tmpfs of the node's own.

    Attributes:
        size: Size of the tmpfs, and further options of it: `64k`, `1g,nr_inodes=100`.
        flags: `ro`, `noexec`; they come into force when the node's files are written.
        shared: Name of a folder that all nodes which name it have here in common, as containers of one machine do.
        network: A mounted network file system.
        survives: Whether a reboot keeps it; None: the home and /var/tmp are kept.
    """

    size: str = "4g"
    flags: tuple[str, ...] = ()
    shared: str | None = None
    network: Network | None = None
    survives: bool | None = None

    def kept(self, name: str) -> bool:
        """Whether what is in it is still there after a reboot, though this machine alone has it."""
        own = self.shared is None and self.network is None
        return own and (name in ON_DISK if self.survives is None else self.survives)


class PlaceSetup(TypedDict):
    """What PID 1 must know of a place.

    `source` is a folder to bind, `kept` the descriptor of the mount as it was before a reboot, `client` that of
    /dev/fuse with the type and the source to mount with.
    """

    path: str
    mode: str
    options: str
    source: str | None
    kept: int | None
    client: tuple[int, str, str] | None
    flags: int


_FLAGS: Final[Mapping[str, int]] = {"ro": kernel.RDONLY, "noexec": kernel.NOEXEC}


def setup(
    name: str,
    place: Place,
    home: str,
    source: str | None,
    kept: int | None,
    client: tuple[int, str, str] | None,
) -> PlaceSetup:
    """Return what PID 1 must know of a place."""
    return PlaceSetup(
        path=home if name == HOME else name,
        mode="755" if name == HOME else "1777",
        options=f"size={place.size}",
        source=source,
        kept=kept,
        client=client,
        flags=sum(_FLAGS[flag] for flag in place.flags),
    )
