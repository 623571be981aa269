"""A second head with the same home: another machine that a user logs in to, with a network and processes of its own.

    with OtherHead(lab, "login2") as other:
        Head(folder, env, other.enter(folder)).run("ps")

Everything on disk is the same for both; /dev/shm, host name, boot id, addresses, pids and abstract sockets are not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab import kernel
from tests.lab.guards import REPOSITORY
from tests.lab.head import ADDRESS, BRIDGE, NETWORK, forget_links, ip

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tests.lab.lab import Lab
    from tests.lab.network import Mounted
    from tests.lab.places import Network

_LINK: Final = "head2"
OTHER_ADDRESS: Final = f"{NETWORK}.253"


class OtherHead:
    """The machine; a context manager. `mounts` has the network file systems that it has mounted, by path."""

    def __init__(self, lab: Lab, name: str, networks: Mapping[Path, Network] | None = None) -> None:
        self.name = name
        self.mounts: dict[Path, Mounted] = {p: lab.mounted(network) for p, network in (networks or {}).items()}
        self._init_pid = 0
        self._process: subprocess.Popen[str] | None = None

    def enter(self, folder: Path) -> list[str]:
        """What to put before a command that is to run there, in a folder."""
        return ["nsenter", "-t", str(self._init_pid), "-n", "-u", "-i", "-p", "-m", "-W", str(folder)]

    def __enter__(self) -> OtherHead:
        clients = {str(path): mounted.client for path, mounted in self.mounts.items()}
        kinds = ["--net", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child"]
        argv = [sys.executable, "-E", "-S", "-s", "-B", "-m", "tests.lab.other_head", self.name, json.dumps(clients)]
        self._process = subprocess.Popen(
            ["unshare", *kinds, *argv], cwd=REPOSITORY, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            pass_fds=[descriptor for descriptor, _, _ in clients.values()],
        )  # fmt: skip
        assert self._process.stdout is not None
        self._init_pid = int(self._process.stdout.readline())
        for mounted in self.mounts.values():
            mounted.let_go()
        ip(
            f"link add {_LINK} type veth peer name eth0 netns {self._init_pid}",
            f"link set {_LINK} addrgenmode none master {BRIDGE} up",
        )
        commands = ["link set lo up", "link set eth0 up", f"address add {OTHER_ADDRESS}/24 dev eth0",
                    f"route add default via {ADDRESS}"]  # fmt: skip
        inside = [*self.enter(Path("/")), "ip", "-batch", "-"]
        subprocess.run(inside, input="\n".join(commands), text=True, check=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        assert self._process is not None
        for mounted in self.mounts.values():
            mounted.end()
        self._process.kill()
        self._process.communicate()
        forget_links([_LINK])


def _be_head(name: str, clients: dict[str, tuple[int, str, str]]) -> None:
    # Until /proc is mounted anew it tells how the pid is seen from outside.
    outside = os.readlink("/proc/self")
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    socket.sethostname(name)
    kernel.mount("proc", "/proc", "proc")
    kernel.mount("tmpfs", "/dev/shm", "tmpfs", options="mode=1777")
    boot_id = Path("/dev/shm/boot_id")
    boot_id.write_text(f"{uuid.uuid4()}\n")
    kernel.bind(str(boot_id), "/proc/sys/kernel/random/boot_id")
    boot_id.unlink()
    for path, (descriptor, kind, source) in clients.items():
        kernel.mount_fuse(descriptor, source, path, kind)
        os.close(descriptor)
    os.setsid()
    sys.stdout.write(f"{outside}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    _be_head(sys.argv[1], json.loads(sys.argv[2]))
