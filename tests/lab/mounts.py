"""The file systems of a node, as its PID 1 makes them."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from tests.lab import cgroup_views, kernel

if TYPE_CHECKING:
    from tests.lab.places import PlaceSetup
    from tests.lab.setup import Setup


def mount_all(setup: Setup) -> None:
    """Make the node's own view of the disk, with its files in it."""
    kernel.private_mounts()
    # What must stay visible is opened before its parents are covered, and bound back from the descriptor.
    exposed = {path: os.open(path, os.O_PATH) for path in setup["expose"] if os.path.exists(path)}
    sources = {p["path"]: os.open(p["source"], os.O_PATH) for p in setup["places"] if p["source"] is not None}
    shared = os.open(setup["shared"], os.O_PATH)
    repository = os.getcwd()
    home, *temporary = setup["places"]
    kernel.mount("none", "/", flags=kernel.REMOUNT | kernel.BIND | kernel.RDONLY)
    _forget_networks()
    _mount_kernel_views(setup)
    tmpfs("/run", "755")
    for place in temporary:
        _mount_place(place, sources, 0)
    for path in ("/srv", "/mnt", "/home", "/root", repository, *setup["hide"]):
        tmpfs(path, "755")
    _bind_descriptor(shared, "/srv/shared")
    _mount_place(home, sources, setup["uid"])
    for path in exposed:
        # Now: on a server it might be refused.
        os.makedirs(path, exist_ok=True)
    os.mkdir("/run/sshd", 0o755)
    os.makedirs("/run/lab/etc")
    _change_programs(setup)
    _write_files(setup)
    _bind_text(setup["etc"] | {"/proc/sys/kernel/random/boot_id": setup["boot_id"] + "\n"})
    for place in setup["places"]:
        if place["client"] is not None:
            _mount_network(place["path"], *place["client"])
    _expose(exposed)
    for place in setup["places"]:
        if place["flags"]:
            kernel.mount("none", place["path"], flags=kernel.BIND | kernel.REMOUNT | place["flags"])
    for descriptor in (*exposed.values(), *sources.values(), shared):
        os.close(descriptor)


def _forget_networks() -> None:
    """Take away what the head has mounted from servers: it is the head's."""
    with open("/proc/self/mounts", encoding="utf-8") as file:
        mounts = [line.split() for line in file]
    for _, path, kind, *_ in mounts:
        if kind.startswith("fuse"):
            kernel.unmount(path)


def _mount_kernel_views(setup: Setup) -> None:
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if os.path.isdir("/sys/fs/cgroup") else None
    limited = cgroup_views.limits(setup["cgroups"])
    if setup["cgroups"]:
        # Else the mount table would still tell of the machine's hierarchies, at the same places.
        kernel.unmount("/sys/fs/cgroup")
    kernel.mount("proc", "/proc", "proc", options=setup["proc"])
    # A fresh sysfs shows the interfaces of this network namespace.
    kernel.mount("sysfs", "/sys", "sysfs")
    if setup["cgroups"]:
        cgroup_views.show(limited, setup["groups_shown"])
    elif groups is not None:
        _bind_descriptor(groups, "/sys/fs/cgroup", recursive=True)
        kernel.read_only_tree("/sys/fs/cgroup")
    kernel.mount("devpts", "/dev/pts", "devpts", options="newinstance,mode=620,gid=5,ptmxmode=666")


def tmpfs(path: str, mode: str, options: str = "size=4g") -> None:
    """Mount a tmpfs where there is a folder."""
    if os.path.isdir(path):
        kernel.mount("tmpfs", path, "tmpfs", kernel.NOSUID | kernel.NODEV, f"mode={mode},{options}")


def _mount_place(place: PlaceSetup, sources: dict[str, int], uid: int) -> None:
    path = place["path"]
    os.makedirs(path, exist_ok=True)
    if place["kept"] is not None:
        kernel.attach_mount(place["kept"], path)
        os.close(place["kept"])
        return
    if path in sources:
        _bind_descriptor(sources[path], path)
        os.chmod(path, int(place["mode"], 8))
    else:
        tmpfs(path, place["mode"], place["options"])
    os.chown(path, uid, uid)


def _mount_network(path: str, descriptor: int, kind: str, source: str) -> None:
    """Put the network's file system over the folder that its server has, in which the node's files are by now."""
    kernel.mount_fuse(descriptor, source, path, kind)
    os.close(descriptor)


def _expose(folders: dict[str, int]) -> None:
    for path, descriptor in folders.items():
        if not os.path.samestat(os.stat(path), os.fstat(descriptor)):
            _bind_descriptor(descriptor, path, read_only=True)


def _bind_descriptor(descriptor: int, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    if not os.path.isdir(target):
        os.makedirs(target)
    kernel.bind(f"/proc/self/fd/{descriptor}", target, read_only=read_only, recursive=recursive)


def _change_programs(setup: Setup) -> None:
    """Lay a writable layer over the folders of programs, so that some can be added and others be missing."""
    _overlay("/usr/local/bin")
    if setup["without_python"]:
        _overlay("/usr/bin")
        for folder in ("/usr/bin", "/usr/local/bin"):
            for name in os.listdir(folder):
                if name.startswith("python"):
                    os.unlink(f"{folder}/{name}")
    if setup["python"]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink("/usr/local/bin/python3")
        os.symlink(setup["python"], "/usr/local/bin/python3")


def _overlay(folder: str) -> None:
    layer = f"/run/lab/layers/{folder.replace('/', '-')}"
    os.makedirs(f"{layer}/upper")
    os.makedirs(f"{layer}/work")
    options = f"lowerdir={folder},upperdir={layer}/upper,workdir={layer}/work"
    kernel.mount("overlay", folder, "overlay", options=options)


def _write_files(setup: Setup) -> None:
    kept = tuple(f"{place['path']}/" for place in setup["places"] if place["kept"] is not None)
    for path, text, mode, uid in setup["files"]:
        if not path.startswith(kept):
            _write(path, text, mode, uid, home=setup["home"])


def _write(path: str, text: str, mode: int, uid: int, *, home: str) -> None:
    """Write a file; folders made on the way below the home belong to the file's owner."""
    missing = os.path.dirname(path)
    made: list[str] = []
    while not os.path.isdir(missing):
        made.append(missing)
        missing = os.path.dirname(missing)
    for folder in reversed(made):
        owner = uid if folder.startswith(home) else 0
        os.makedirs(folder, 0o700 if folder.endswith("/.ssh") else 0o755, exist_ok=True)
        os.chown(folder, owner, owner)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(path, mode)
    os.chown(path, uid, uid)


def _bind_text(files: dict[str, str]) -> None:
    for target, text in files.items():
        if not os.path.exists(target):
            continue
        mine = f"/run/lab/etc/{os.path.basename(target)}"
        with open(mine, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(mine, 0o640 if target == "/etc/shadow" else 0o444)
        kernel.bind(mine, target)
