"""The program that becomes a node: a guard outside, and inside it PID 1.

Run as `python -m tests.lab.init`; it reads one JSON line (a `Setup`), makes the namespaces, prints the pid of
the node's PID 1, waits for `go` (the link is there), sets the machine up and prints `ready`.

The guard watches the process that owns the lab and kills the node when it ends, however it ends; PID 1 in
turn dies with the guard, and with PID 1 the kernel ends every process of the node and drops its namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, TypedDict

from tests.lab import kernel


class Setup(TypedDict):
    """Everything PID 1 must know; files are (path, text, mode, uid)."""

    owner: int
    hostname: str
    boot_id: str
    interface: str
    address: str
    gateway: str
    home: str
    uid: int
    disk: str
    shared: str
    shared_home: str | None
    etc: dict[str, str]
    expose: list[str]
    hide: list[str]
    without_python: bool
    python: str | None
    files: list[tuple[str, str, int, int]]
    sshd: list[str]
    cgroups: list[str]
    port: int


def main() -> None:
    setup: Setup = json.loads(sys.stdin.readline())
    owner = os.pidfd_open(setup["owner"])
    for folder in setup["cgroups"]:
        with open(f"{folder}/cgroup.procs", "w", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    kinds = kernel.NEWNET | kernel.NEWNS | kernel.NEWPID | kernel.NEWUTS | kernel.NEWIPC
    # A cgroup namespace takes the group that its first process is in as its root.
    kernel.unshare(kinds | (kernel.NEWCGROUP if setup["cgroups"] else 0))
    child = os.fork()
    if child == 0:
        kernel.die_with_parent(signal.SIGKILL)
        os.close(owner)
        _be_init(setup)
    _say(str(child))
    _silence(keep_stderr=False)
    _guard(owner, child)


def _guard(owner: int, child: int) -> None:
    inside = os.pidfd_open(child)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    poll.register(inside, select.POLLIN)
    poll.poll()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _be_init(setup: Setup) -> None:
    # PID 1 gets from inside only signals it has handlers for: without Python's own for SIGINT it cannot be killed.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    socket.sethostname(setup["hostname"])
    _mount_all(setup)
    if sys.stdin.readline() != "go\n":
        sys.exit("the lab went away")
    _bring_up_network(setup)
    start_sshd(setup["sshd"], setup["port"])
    os.setsid()
    os.chdir("/")
    _say("ready")
    _silence(keep_stderr=True)
    _reap_for_ever()


def _reap_for_ever() -> None:
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            continue


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _silence(*, keep_stderr: bool) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1) if keep_stderr else (0, 1, 2):
        os.dup2(null, descriptor)


def _mount_all(setup: Setup) -> None:
    kernel.private_mounts()
    # What must stay visible is opened before its parents are covered, and bound back from the descriptor.
    kept = {path: os.open(path, os.O_PATH) for path in setup["expose"] if os.path.exists(path)}
    shared = os.open(setup["shared"], os.O_PATH)
    home = os.open(setup["shared_home"], os.O_PATH) if setup["shared_home"] else None
    repository = os.getcwd()
    kernel.mount("none", "/", flags=kernel.REMOUNT | kernel.BIND | kernel.RDONLY)
    _mount_kernel_views(setup["cgroups"])
    _tmpfs("/run", "755")
    for path in ("/tmp", "/var/tmp", "/dev/shm"):
        _tmpfs(path, "1777")
    for path in ("/srv", "/mnt", "/home", "/root", repository, *setup["hide"]):
        _tmpfs(path, "755")
    _bind_descriptor(shared, "/srv/shared")
    _mount_home(setup, home)
    for path, descriptor in kept.items():
        if not (os.path.exists(path) and os.path.samestat(os.stat(path), os.fstat(descriptor))):
            _bind_descriptor(descriptor, path, read_only=True)
        os.close(descriptor)
    os.mkdir("/run/sshd", 0o755)
    os.makedirs("/run/lab/etc")
    _change_programs(setup)
    for path, text, mode, uid in setup["files"]:
        _write(path, text, mode, uid, home=setup["home"])
    _bind_text(setup["etc"] | {"/proc/sys/kernel/random/boot_id": setup["boot_id"] + "\n"})


def _mount_kernel_views(own_groups: list[str]) -> None:
    with_memory = any(os.path.exists(f"{folder}/memory.limit_in_bytes") for folder in own_groups)
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if os.path.isdir("/sys/fs/cgroup") else None
    kernel.mount("proc", "/proc", "proc")
    # A fresh sysfs shows the interfaces of this network namespace.
    kernel.mount("sysfs", "/sys", "sysfs")
    if own_groups:
        _mount_cgroups(memory=with_memory)
    elif groups is not None:
        _bind_descriptor(groups, "/sys/fs/cgroup", recursive=True)
        kernel.read_only_tree("/sys/fs/cgroup")
    kernel.mount("devpts", "/dev/pts", "devpts", options="newinstance,mode=620,gid=5,ptmxmode=666")


def _mount_cgroups(*, memory: bool) -> None:
    """Show the node's own groups where a machine has them: one hierarchy of version 2, or one beside version 1."""
    if not memory:
        kernel.mount("cgroup2", "/sys/fs/cgroup", "cgroup2")
        return
    _tmpfs("/sys/fs/cgroup", "755")
    for name in ("memory", "unified"):
        os.mkdir(f"/sys/fs/cgroup/{name}")
    kernel.mount("cgroup", "/sys/fs/cgroup/memory", "cgroup", options="memory")
    kernel.mount("cgroup2", "/sys/fs/cgroup/unified", "cgroup2")


def _mount_home(setup: Setup, shared_home: int | None) -> None:
    home = setup["home"]
    os.makedirs(home, exist_ok=True)
    if shared_home is not None:
        _bind_descriptor(shared_home, home)
    else:
        _tmpfs(home, "755", setup["disk"])
    os.chown(home, setup["uid"], setup["uid"])


def _tmpfs(path: str, mode: str, size: str = "4g") -> None:
    if os.path.isdir(path):
        kernel.mount("tmpfs", path, "tmpfs", kernel.NOSUID | kernel.NODEV, f"mode={mode},size={size}")


def _bind_descriptor(descriptor: int, target: str, *, read_only: bool = False, recursive: bool = False) -> None:
    os.makedirs(target, exist_ok=True)
    kernel.bind(f"/proc/self/fd/{descriptor}", target, read_only=read_only, recursive=recursive)


def _change_programs(setup: Setup) -> None:
    """Lay a writable layer over the folders of programs, so that some can be added and others be missing."""
    _overlay("/usr/local/bin")
    if setup["python"]:
        with contextlib.suppress(FileNotFoundError):
            os.unlink("/usr/local/bin/python3")
        os.symlink(setup["python"], "/usr/local/bin/python3")
    if setup["without_python"]:
        _overlay("/usr/bin")
        for folder in ("/usr/bin", "/usr/local/bin"):
            for name in os.listdir(folder):
                if name.startswith("python"):
                    os.unlink(f"{folder}/{name}")


def _overlay(folder: str) -> None:
    layer = f"/run/lab/layers/{folder.replace('/', '-')}"
    os.makedirs(f"{layer}/upper")
    os.makedirs(f"{layer}/work")
    options = f"lowerdir={folder},upperdir={layer}/upper,workdir={layer}/work"
    kernel.mount("overlay", folder, "overlay", options=options)


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


def _bring_up_network(setup: Setup) -> None:
    name = setup["interface"]
    commands = [
        "link set lo up",
        f"link set {name} addrgenmode none up",
        f"address add {setup['address']} broadcast + dev {name}",
        f"route add default via {setup['gateway']}",
    ]
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands), text=True, check=True)


def start_sshd(argv: list[str], port: int) -> None:
    """Start the listener (it goes to the background by itself) and return when it accepts connections."""
    subprocess.run(argv, check=True, stdin=subprocess.DEVNULL)
    end = time.monotonic() + 20
    while not listens("/proc/net/tcp", port):
        if time.monotonic() > end:
            raise TimeoutError(f"sshd does not listen on port {port}")
        time.sleep(0.002)


def listens(table: str, port: int) -> bool:
    """Whether a `/proc/net/tcp` table holds a listening socket (state 0A) on a port."""
    with open(table, encoding="utf-8") as file:
        rows: list[list[Any]] = [line.split() for line in file.readlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "0A" for row in rows)


if __name__ == "__main__":
    main()
