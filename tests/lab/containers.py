"""Images made of files of this machine, and podman set up for nodes that have no registry."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

IMAGE: Final = "lab/tools:1"
MOUNTS: Final = ["/usr:ro", "/lib:ro", "/lib64:ro"]
"""The image has a shell and nothing else: its Python is this machine's."""
_APPLETS: Final = ("sh", "ls", "cat", "sleep", "bash", "setsid")
_CONF: Final = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
tmp_dir = "{place}/tmp"
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4000:4000"]
log_driver = "k8s-file"
"""
_STORAGE: Final = """\
[storage]
driver = "vfs"
graphroot = "{place}/images"
runroot = "{place}/run"
"""


def find_missing() -> str:
    """Return why no container can be started here, or ""."""
    missing = [name for name in ("podman", "runc", "busybox") if shutil.which(name) is None]
    if missing:
        return f"needs {', '.join(missing)} (`apt-get install podman runc busybox-static`)"
    return "" if os.geteuid() == 0 else "needs root"


@dataclass(frozen=True)
class Podman:
    """Podman with a store and settings of its own, as a node or the head has it.

    Attributes:
        place: The folder of the store, as the machine of this podman sees it.
    """

    place: str

    @property
    def env(self) -> dict[str, str]:
        return {
            "CONTAINERS_CONF": f"{self.place}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{self.place}/storage.conf",
        }

    @property
    def files(self) -> dict[str, str]:
        """The files that `env` names."""
        texts = {"containers.conf": _CONF, "storage.conf": _STORAGE}
        return {f"{self.place}/{name}": text.format(place=self.place) for name, text in texts.items()}

    def run(self, *words: str, stdin: bytes | None = None) -> str:
        """Run a command of podman on this machine."""
        done = subprocess.run(
            ["podman", *words], env={**os.environ, **self.env}, input=stdin, capture_output=True, check=True
        )
        return done.stdout.decode()


def make_head_podman(place: Path) -> Podman:
    """Return a podman of the head that has `IMAGE`."""
    made = Podman(str(place))
    place.mkdir(parents=True, exist_ok=True)
    for path, text in made.files.items():
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    made.run(
        "import", "--change", "ENV FROM_IMAGE=yes", "--change", 'ENTRYPOINT ["/missing"]', "-", IMAGE, stdin=_pack()
    )
    return made


def _pack() -> bytes:
    """Return the archive of the image's files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name in ("bin", "usr", "lib", "lib64", "etc", "tmp", "proc", "sys", "dev", "run", "root", "only-in-image"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(folder)
        archive.add(shutil.which("busybox") or "", "bin/busybox")
        for name in _APPLETS:
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            archive.addfile(link)
    return packed.getvalue()
