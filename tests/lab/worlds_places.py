"""Worlds whose homes and temporary folders are not what a single machine has."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from tests.lab import temporary
from tests.lab.places import HOME, Network, Place
from tests.lab.spec import NodeSpec
from tests.lab.world import Scene, World, alike

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import ExitStack

    from tests.lab.lab import Lab
    from tests.lab.node import Node

CACHE_S: Final = 3.0
"""For how long NFS's clients believe at least what they know of a file (`acregmin`)."""
HANG_S: Final = 60.0
FIRST_PID: Final = 7000
TEMPORARY: Final = ("/tmp", "/var/tmp", "/dev/shm")


def no_fuse() -> str | None:
    """Why there can be no network file system, or None."""
    return None if os.path.exists("/dev/fuse") else "there is no /dev/fuse"


def with_home(network: Network | None = None, user: str = "train", **places: Place) -> NodeSpec:
    """Return the spec of a node whose home is on a server."""
    return NodeSpec(user=user, places={HOME: Place(network=network or Network()), **places})


def hardened(flag: str, *places: str) -> NodeSpec:
    """Return the spec of a node with a flag on the mounts of some places; the home is on a server."""
    return with_home(user="root", **{name: Place(flags=(flag,)) for name in places})


def home(
    name: str,
    sentence: str,
    network: Network | None = None,
    user: str = "train",
    file: Callable[[str], Mapping[str, Any]] = lambda _: {},
    **befall: Any,
) -> World:
    """Return a world whose homes are on a server."""
    make = alike(with_home(network, user), **befall)
    return World(name=name, sentence=sentence, make=make, unavailable=no_fuse, file=file)


def hang(node: Node, seconds: float | None = HANG_S) -> None:
    """Let the server of the home answer nothing for a time, or never again."""
    node.mounts[HOME].hang(seconds)


def open_keys(stack: ExitStack, node: Node) -> None:
    """Let anybody read which keys may log in: to the server, sshd is nobody."""
    keys = node.mounts[HOME].folder / ".ssh"
    keys.chmod(0o755)
    (keys / "authorized_keys").chmod(0o644)


def fill(stack: ExitStack, node: Node) -> None:
    """Leave not a byte free in /dev/shm."""
    node.run(["sh", "-c", "cat /dev/zero > /dev/shm/of-another-job"])


def shared(lab: Lab, stack: ExitStack, count: int) -> Scene:
    """Containers of one machine that do not know of each other."""
    places = {name: Place(shared=f"host{name.replace('/', '-')}") for name in TEMPORARY}
    nodes = lab.add([NodeSpec(places=places)] * count)
    for node in nodes:
        node.next_pid(FIRST_PID)
    return Scene(nodes=nodes)


PLACES: Final = [
    home("network home", "the home is on a server, the same for all nodes"),
    home(
        "network home, cached",
        f"what another node has done there is seen {CACHE_S:g} s later",
        Network(cache_s=CACHE_S),
    ),
    home("network home, no locks", "flock fails there with ENOLCK", Network(locks="ENOLCK")),
    home("network home, local locks", "flock there is heeded on the same node only", Network(locks="local")),
    home(
        "network home, root squashed",
        "whoever logs in is root and may not write there",
        Network(root_squash=True),
        "root",
        begin=open_keys,
        file=lambda name: {"defaults": {"workdir": f"/var/tmp/work/{name}"}},
    ),
    home(
        "network home, unlisted",
        "the mount table's type for it is on nobody's list",
        Network(kind="fuse.nfs"),
    ),
    home(
        "network home, forgetful",
        "its server forgets every file handle",
        each=lambda node: node.mounts[HOME].forget_handles(),
    ),
    home("network home, hanging", f"its server is silent for {HANG_S:g} s", each=hang),
    home("network home, dead", "its server never answers the first node again", first=lambda node: hang(node, None)),
    home(
        "network home, over quota",
        "it takes not a byte more",
        each=lambda node: node.mounts[HOME].refuse(WRITE="EDQUOT"),
    ),
    World(
        name="shared temporary folders",
        sentence="/tmp, /var/tmp and /dev/shm are the same on all nodes, whose processes have the same pids",
        make=shared,
    ),
    World(
        name="cleaned",
        sentence="/tmp and /var/tmp are cleaned as if nothing were touched for a month; the home is on a server",
        make=alike(with_home(), each=lambda node: temporary.clean(node, 31)),
        packages=("systemd",),
        unavailable=lambda: no_fuse() or temporary.unavailable(),
    ),
    World(
        name="read-only home",
        sentence="the home cannot be written",
        make=alike(NodeSpec(places={HOME: Place(flags=("ro",))})),
        refused=(
            6,
            r"n\[1-2\]: cannot keep state in /root/\S+: Read-only file system\nhint: the node says: set XDG_STATE_HOME",
        ),
    ),
    World(
        name="noexec home",
        sentence="no program runs in the home",
        make=alike(NodeSpec(places={HOME: Place(flags=("noexec",))})),
    ),
    World(
        name="noexec temporary folders",
        sentence="no program runs in /tmp, /var/tmp and /dev/shm; the home is on a server",
        make=alike(hardened("noexec", *TEMPORARY)),
        unavailable=no_fuse,
    ),
    World(
        name="read-only temporary folders",
        sentence="/tmp and /var/tmp cannot be written; the home is on a server",
        make=alike(hardened("ro", "/tmp", "/var/tmp")),
        refused=(
            6,
            r"n\[1-2\]: cannot keep state in /var/tmp/\S+: Read-only file system\nhint: the node says: set XDG_STATE_HOME",
        ),
        unavailable=no_fuse,
    ),
    World(
        name="read-only shared memory",
        sentence="/dev/shm cannot be written",
        make=alike(NodeSpec(places={"/dev/shm": Place(flags=("ro",))})),
    ),
    World(
        name="full shared memory",
        sentence="/dev/shm is full",
        make=alike(NodeSpec(places={"/dev/shm": Place(size="1m")}), begin=fill),
    ),
    World(
        name="tiny shared memory",
        sentence="/dev/shm holds 64 KiB",
        make=alike(NodeSpec(places={"/dev/shm": Place(size="64k")})),
    ),
]
