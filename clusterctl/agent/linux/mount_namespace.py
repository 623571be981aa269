"""Moves this process into the file system of a container. No call of a container runtime is necessary."""

from __future__ import annotations

import os

from clusterctl.agent.linux import syscalls


def enter_file_system(pid: int) -> None:
    """Give this process the file system that another process sees. The other namespaces and the user stay the same.

    Root joins the mount namespace. The owner of a rootless container joins the container's user namespace first. A user
    for whom a daemon of root has started the container can do neither (setns(2)), but may read `/proc/PID/root` of a
    process of the same user: in a user namespace of its own, this process makes that folder its root.

    Args:
        pid: A process of the container, with the user of this process. This process must have one thread.

    Raises:
        OSError: The process has ended, or the machine forbids user namespaces.
    """
    try:
        syscalls.join_namespace(f"/proc/{pid}/ns/mnt")
    except PermissionError:
        if os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"):
            syscalls.join_namespace(f"/proc/{pid}/ns/user")
            syscalls.join_namespace(f"/proc/{pid}/ns/mnt")
        else:
            root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_CLOEXEC)
            syscalls.make_user_namespace()
            os.fchdir(root)
            os.chroot(".")
            os.close(root)
    os.chdir("/")
