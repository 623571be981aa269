"""The machine, and what it leaves a worker."""

from __future__ import annotations

import os

from clusterctl.agent.facts import environment, limits, memory, processors
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.found import host as shapes


def collect(root: str, salt: str = "") -> shapes.Host:
    """Return the group `host`. `salt` goes into the hashes of the environment."""
    return {
        "boot_id": paths.text(root, "/proc/sys/kernel/random/boot_id"),
        "machine_id": paths.text(root, "/etc/machine-id"),
        "netns": _link("/proc/self/ns/net"),
        "kernel": os.uname().release,
        "arch": os.uname().machine,
        "distro": _distro(root),
        "user": os.environ.get("USER") or str(os.getuid()),
        "uptime": processors.first_number(paths.text(root, "/proc/uptime")),
        **memory.collect(root),
        **processors.collect(root),
        **limits.collect(root),
        **environment.collect(root, salt),
    }


def _link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


def _distro(root: str) -> str | None:
    for line in (paths.text(root, "/etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return None
