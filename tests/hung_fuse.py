"""A file system whose server takes every request and answers none but the first, as a dead one would: this is the server.

Whoever asks it for anything sleeps in the kernel, from SIGKILL on in state D, until the server ends.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from pathlib import Path
from typing import Final

KIND: Final = "fuse.hung"


def argv(folder: str, asked: str) -> list[str]:
    """Starts a server, wherever this repository cannot be seen too: where to mount, and what appears when somebody waits."""
    return [sys.executable, "-c", Path(__file__).read_text(), folder, asked]


def serve(folder: str, asked: str) -> None:
    """Mount on a folder, and keep everybody waiting."""
    connection = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={connection},rootmode=40000,user_id=0,group_id=0"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hung", folder.encode(), KIND.encode(), 0, options.encode()):
        sys.exit(os.strerror(ctypes.get_errno()))
    first = os.read(connection, 1 << 20)
    unique = struct.unpack_from("<IIQ", first)[2]
    # struct fuse_init_out of linux/fuse.h, version 7.31
    answer = struct.pack("<IIIIHHIIHHI28x", 7, 31, 1 << 16, 0, 12, 9, 1 << 16, 1, 0, 0, 0)
    os.write(connection, struct.pack("<IiQ", 16 + len(answer), 0, unique) + answer)
    while True:
        os.read(connection, 1 << 20)
        Path(asked).touch()


if __name__ == "__main__":
    serve(*sys.argv[1:])
