"""The command lines of container runtimes: docker, podman and apptainer. Pure.

Sources: podman-run(1), docker-run(1), `apptainer exec --help`; for GPUs the Container Device Interface of
nvidia-container-toolkit (podman), `--gpus` (docker), `--nv` and `--rocm` (apptainer).
"""

from __future__ import annotations

import os
import re
import zlib
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from clusterctl.agent.protocol.command_payload_types import Container

RUNTIMES = ("docker", "podman", "apptainer")
LABEL = "clusterctl"
_KEEP = 'exec 3<>"$0" 4<"$0" 3<&-; echo $$ >"$0.pid"; read -r line <&4'
"""The program of a keeper. It ends when no process has the FIFO `$0` open for writing. The shell opens the FIFO in both
directions first, because an open for reading would wait for a writer that has died.
"""
_AMD_DEVICES = ("--device", "/dev/kfd", "--device", "/dev/dri")
_GPU_OPTIONS: dict[tuple[str, str | None], tuple[str, ...]] = {
    ("docker", "nvidia"): ("--gpus", "all"),
    ("podman", "nvidia"): ("--device", "nvidia.com/gpu=all"),
    ("apptainer", "nvidia"): ("--nv",),
    ("docker", "amd"): _AMD_DEVICES,
    ("podman", "amd"): _AMD_DEVICES,
    ("apptainer", "amd"): ("--rocm",),
}


@frozen_dataclass(frozen=True)
class Mount:
    """A folder or file of the node that the container shows at `target`; `options` is "" or such as `ro`."""

    source: str
    target: str
    options: str = ""

    def format(self) -> str:
        """Return the mount as runtimes take it."""
        return ":".join(part for part in (self.source, self.target, self.options) if part)


def parse_mount(text: str, home: str) -> Mount:
    """Return the mount that a text of the cluster file names: `PATH`, `PATH:TARGET` or `PATH:TARGET:OPTIONS`."""
    source, _, rest = text.partition(":")
    target, _, options = rest.partition(":")
    if target in ("ro", "rw"):
        target, options = "", target
    source = re.sub(r"^~(?=/|$)", home, source)
    return Mount(source, re.sub(r"^~(?=/|$)", home, target) or source, options)


@frozen_dataclass(frozen=True)
class ContainerRun:
    """Everything that decides how a keeper is started.

    Attributes:
        runtime: One of `RUNTIMES`.
        image: The image: an id or a name, for apptainer a file.
        name: The name of the container.
        fifo: The FIFO that keeps the container alive.
        mounts: The mounts.
        args: Options of the cluster file for `run`, or for apptainer's `exec`.
        uid: The user.
        gid: The group.
        vendor: The vendor of the node's GPUs, or `None`.
    """

    runtime: str
    image: str
    name: str
    fifo: str
    mounts: Sequence[Mount]
    args: Sequence[str] = ()
    uid: int = 0
    gid: int = 0
    vendor: str | None = None


def build_run_command(run: ContainerRun) -> list[str]:
    """Return the command that starts a keeper and returns at once.

    Processes and network are those of the node, so that files such as `/proc` and `/etc/resolv.conf` fit to it.
    """
    gpus = _GPU_OPTIONS.get((run.runtime, run.vendor), ())
    if run.runtime == "apptainer":
        binds = [word for mount in run.mounts for word in ("--bind", mount.format())]
        words = [
            "apptainer",
            "exec",
            "--no-home",
            *gpus,
            *binds,
            *run.args,
            run.image,
            "/bin/sh",
            "-c",
            _KEEP,
            run.fifo,
        ]
        # Apptainer has no `--detach` for a program that decides itself when it ends.
        return ["sh", "-c", 'setsid "$@" </dev/null >"$0" 2>&1 &', f"{run.fifo}.err", *words]
    user = ["--user", f"{run.uid}:{run.gid}"]
    if run.runtime == "podman":
        user = ["--userns", "keep-id", *user] if run.uid else []
    elif run.uid == 0:
        user = ["--userns", "host"]
    return [
        *(run.runtime, "run", "--detach", "--rm", "--pull", "never", "--name", run.name, "--label", LABEL),
        *("--pid", "host", "--network", "host", "--security-opt", "label=disable"),
        *user,
        *gpus,
        *(word for mount in run.mounts for word in ("--volume", mount.format())),
        *run.args,
        *("--entrypoint", "/bin/sh", run.image, "-c", _KEEP, run.fifo),
    ]


def list_mounts(folders: Iterable[str], texts: Iterable[str], home: str) -> list[Mount]:
    """Return the mounts of a container: folders at their own paths (none inside another), then those of a file."""
    unique = sorted({folder.rstrip("/") or "/" for folder in folders})
    outer = [path for path in unique if not any(path.startswith(f"{other}/") for other in unique)]
    return [*(Mount(path, path) for path in outer), *(parse_mount(text, home) for text in texts)]


def build_remove_command(runtime: str, name: str) -> list[str] | None:
    """Return the command that ends and removes a container; `None` if the runtime keeps none."""
    return None if runtime == "apptainer" else [runtime, "rm", "--force", name]


def get_image_file(folder: str, image: str) -> str:
    """Return the path of an image of apptainer: in the folder of environments, or the path that the image names."""
    if image.startswith(("/", "~")):
        return os.path.expanduser(image)
    slug = re.sub(r"[^A-Za-z0-9.]+", "-", image)[-60:]
    return f"{folder}/images/{slug}-{zlib.crc32(image.encode()):08x}.sif"


def list_find_commands(runtime: str, image: str) -> list[list[str]]:
    """Return the commands of which the first success prints the id of an image of docker or podman.

    Podman gives an image without a registry the name `localhost/IMAGE`, and does not always find it by the short name.
    """
    names = [image, *([f"localhost/{image}"] if runtime == "podman" else [])]
    return [[runtime, "image", "inspect", "--format", "{{.Id}}", name] for name in names]


def build_pull_command(runtime: str, image: str, file: str) -> list[str]:
    """Return the command that pulls an image from its registry; apptainer writes it to a file."""
    if runtime == "apptainer":
        return ["apptainer", "pull", "--force", file, image if "://" in image else f"docker://{image}"]
    return [runtime, "pull", image]


def build_load_command(runtime: str, archive: str, file: str) -> list[str]:
    """Return the command that loads an archive of `docker save`; apptainer makes a file of it."""
    if runtime == "apptainer":
        return ["apptainer", "build", "--force", file, f"docker-archive:{archive}"]
    return [runtime, "load", "--input", archive]


def get_registry(image: str) -> tuple[str, int] | None:
    """Return host and port of the registry of an image; `None` if the name says that no registry has it."""
    name = image.partition("://")[2] or image
    first, slash, _ = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        return ("registry-1.docker.io", 443)
    host, _, port = first.partition(":")
    return None if first == "localhost" else (host, int(port) if port.isdigit() else 443)


def get_settings_key(container: Container, image_id: str) -> str:
    """Return a name for an image with everything of the cluster file that decides whether a container of it starts."""
    parts = [image_id, container["runtime"], *container["args"], *container["mounts"]]
    return f"{zlib.crc32(chr(0).join(parts).encode('utf-8', 'surrogateescape')):08x}"
