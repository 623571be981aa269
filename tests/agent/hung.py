"""A hung file system (`tests.hung_fuse`) on this machine."""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from tests import hung_fuse
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator


class Hung:
    """Such a mount on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked_file = folder, folder.with_suffix(".asked")
        folder.mkdir()
        self._server = subprocess.Popen(hung_fuse.argv(str(folder), str(self.asked_file)))
        wait_for(lambda: f" {folder} {hung_fuse.KIND} " in Path("/proc/self/mounts").read_text(), what="the mount")

    def asked(self) -> bool:
        """Whether somebody waits for it."""
        return self.asked_file.exists()

    def end(self) -> None:
        """End the server: whoever waits is told that the file system is gone."""
        self._server.kill()
        self._server.wait()

    def unmount(self) -> None:
        """Take it away."""
        self.end()
        subprocess.run(["umount", "-l", self.folder], check=True)


@contextlib.contextmanager
def mounted(folder: Path) -> Iterator[Hung]:
    """Have such a file system on a new folder of this machine; needs root."""
    hung = Hung(folder)
    try:
        yield hung
    finally:
        hung.unmount()
