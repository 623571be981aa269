"""A file system whose server takes every request and answers none but the first, as a dead one would.

Whoever asks it for anything sleeps in the kernel, from SIGKILL on in state D, until the server ends.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.node import Node

_PROGRAM: Final = """\
import ctypes, os, struct, sys
connection = os.open("/dev/fuse", os.O_RDWR)
options = f"fd={connection},rootmode=40000,user_id=0,group_id=0"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hung", sys.argv[1].encode(), b"fuse.hung", 0, options.encode()):
    sys.exit(os.strerror(ctypes.get_errno()))
first = os.read(connection, 1 << 20)
unique = struct.unpack_from("<IIQ", first)[2]
# struct fuse_init_out of linux/fuse.h, version 7.31
answer = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 0, 0, 0)
os.write(connection, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
while True:
    os.read(connection, 1 << 20)
    open("/run/asked", "w").close()
"""
"""For `python -c`, with the folder to mount on."""


def asked(node: Node) -> bool:
    """Whether somebody waits for the file system at /mnt."""
    return node.path("/run/asked").exists()


@contextlib.contextmanager
def on(node: Node) -> Iterator[None]:
    """Have such a file system at /mnt of a node."""
    server = node.start([sys.executable, "-c", _PROGRAM, "/mnt"])
    node.wait_for(lambda: "fuse.hung" in node.path("/proc/1/mounts").read_text(), what="the mount")
    try:
        yield
    finally:
        # With its server the mount ends, and whoever waits for it is told so.
        for pid in node.pids_of("/dev/fuse"):
            node.signal(pid, signal.SIGKILL)
        server.wait()
        node.run(["umount", "-l", "/mnt"], check=True)
