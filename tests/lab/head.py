"""The head of a lab: the test process itself, in a network and a mount namespace that the lab makes.

Nothing of it is seen outside: the bridge, its addresses and the mounts live in those namespaces and end with the
last process in them, so two labs never meet and no cleaning is owed to a lab that was killed. No route
leads out of it: what a test starts reaches the nodes and the head, and nothing else.
"""

from __future__ import annotations

import os
import pwd
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.lab import kernel
from tests.lab.keys import make_key
from tests.lab.spec import SHARED

if TYPE_CHECKING:
    from collections.abc import Iterable

NETWORK: Final = "198.18.0"
"""The lab's /24, out of the range for benchmarks of RFC 2544."""
ADDRESS: Final = f"{NETWORK}.254"
NETWORK6: Final = "fd5a:c1c1:7357:1"
"""The lab's /64, with a prefix of RFC 4193."""
ADDRESS6: Final = f"{NETWORK6}::fe"
BRIDGE: Final = "lab0"
MAC: Final = "02:c1:00:00:00:fe"


_NAMES: Final = "# nodes of the lab\n"


class Head:
    """Namespaces, home and links of the head; `home` holds a `.ssh` that the system's ssh uses by itself."""

    def __init__(self, root: Path) -> None:
        self.home = root / "head"
        self.ssh_config = self.home / ".ssh" / "config"
        self.known_hosts = self.home / ".ssh" / "known_hosts"
        self.key = self.home / ".ssh" / "id_ed25519"
        self._root = root
        self._before: list[tuple[int, int]] = []

    def enter(self) -> None:
        """Make the home and move the calling process into the lab's namespaces."""
        (self.home / ".ssh").mkdir(parents=True, mode=0o700)
        make_key(self.key)
        for name, kind in (("net", kernel.NEWNET), ("mnt", kernel.NEWNS)):
            self._before.append((os.open(f"/proc/thread-self/ns/{name}", os.O_RDONLY), kind))
        kernel.unshare(kernel.NEWNET | kernel.NEWNS)
        kernel.private_mounts()
        kernel.mount("tmpfs", "/srv", "tmpfs", options="mode=755")
        os.mkdir(SHARED)
        kernel.bind(str(self._root / "shared"), SHARED)
        self._own_file("/etc/passwd", self._account())
        self._own_file("/etc/hosts", Path("/etc/hosts").read_text())
        ip(
            "link set lo up",
            # Without this the answers of 64 ports to one another would be counted, and multicast be kept track of.
            # An address of its own: else it has that of a node, and another one when that node dies.
            f"link add {BRIDGE} address {MAC} type bridge stp_state 0 forward_delay 0 mcast_snooping 0",
            f"link set {BRIDGE} addrgenmode none up",
            f"address add {ADDRESS}/24 broadcast + dev {BRIDGE}",
        )

    def use_ipv6(self) -> None:
        """Give the head an address on the lab's IPv6 network, too."""
        ip(f"address replace {ADDRESS6}/64 dev {BRIDGE} nodad")

    def leave(self) -> None:
        """Bring the calling thread back to where it was."""
        where = os.getcwd()
        # A thread that shares its working folder with others (NumPy starts some) may not change the mount namespace.
        kernel.unshare(kernel.FS)
        while self._before:
            descriptor, kind = self._before.pop()
            kernel.enter(descriptor, kind)
            os.close(descriptor)
        os.chdir(where)

    def _account(self) -> str:
        """Make `home` the account's home: the ssh client asks the account, not $HOME, where `~/.ssh` is."""
        mine = pwd.getpwuid(os.getuid())
        lines = Path("/etc/passwd").read_text().splitlines()
        entry = f"{mine.pw_name}:x:{mine.pw_uid}:{mine.pw_gid}::{self.home}:{mine.pw_shell}"
        return "\n".join(entry if line.startswith(f"{mine.pw_name}:") else line for line in lines) + "\n"

    def _own_file(self, path: str, text: str) -> None:
        own = self._root / os.path.basename(path)
        own.write_text(text)
        kernel.bind(str(own), path)

    def write_hosts(self, names: str) -> None:
        """Replace what /etc/hosts says beyond this machine."""
        path = self._root / "hosts"
        own, _, _ = path.read_text().partition(_NAMES)
        path.write_text(own + _NAMES + names)

    def cut(self) -> None:
        """Drop every packet between the head and the nodes; the nodes still reach each other."""
        self._filter(f"""
            chain in {{ type filter hook input priority 0; iifname "{BRIDGE}" drop; }}
            chain out {{ type filter hook output priority 0; oifname "{BRIDGE}" drop; }}""")

    def restore(self) -> None:
        """Undo `cut`; nothing happens where nothing was cut."""
        self._filter("")

    def _filter(self, chains: str) -> None:
        rules = f"table inet head\ndelete table inet head\ntable inet head {{{chains}\n}}"
        subprocess.run(["nft", "-f", "-"], input=rules, text=True, check=True)

    def write_ssh(self, hosts: Iterable[str], known: Iterable[str]) -> None:
        """Replace ssh_config's host blocks and known_hosts."""
        common = f"Host *\n    IdentityFile {self.key}\n    UserKnownHostsFile {self.known_hosts}\n"
        _replace(self.ssh_config, "\n".join([*hosts, common]))
        _replace(self.known_hosts, "".join(f"{line}\n" for line in known))

    def processes(self) -> list[int]:
        """Pids of what was started with this home and still runs, a controller in the background for one."""
        mark = f"HOME={self.home}".encode()
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if mark in _environ(pid)]


def ip(*commands: str) -> None:
    """Run iproute2 commands in one process."""
    subprocess.run(["ip", "-batch", "-"], input="\n".join(commands) + "\n", text=True, check=True)


def forget_links(names: Iterable[str]) -> None:
    """Delete interfaces now; the kernel may have done so already, with the network namespace of the other end."""
    commands = "".join(f"link delete {name}\n" for name in names)
    subprocess.run(["ip", "-force", "-batch", "-"], input=commands, text=True, stderr=subprocess.DEVNULL, check=False)


def _replace(path: Path, text: str) -> None:
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.chmod(0o600)
    new.replace(path)


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
