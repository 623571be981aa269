"""One node of a lab: what a test can do to it and see of it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from tests.lab.head import ADDRESS as HEAD_ADDRESS
from tests.lab.head import BRIDGE, ip
from tests.lab.init import listens
from tests.lab.keys import make_key
from tests.lab.machine import CONFIG, HOST_KEY, LOG, sshd_argv, sshd_config
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.lab.spec import NodeSpec

T = TypeVar("T")

PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Process:
    """A process as the node numbers it; `state` is the letter of /proc/PID/stat, `argv` empty for a zombie."""

    pid: int
    ppid: int
    uid: int
    state: str
    comm: str
    argv: tuple[str, ...]

    @property
    def command(self) -> str:
        return " ".join(self.argv) or f"[{self.comm}]"


class Node:
    """A running node; `Lab.add` makes it.

    Attributes:
        name: Its host name, and its name in ssh_config.
        address: Its IPv4 address on the lab's bridge.
        interface: The name of its network interface, another one on the next node.
        boot_id: What `/proc/sys/kernel/random/boot_id` says on it.
        spec: What was asked for.
        cgroups: Folders of its cgroups as this machine sees them, with `NodeSpec.cgroup`.
        init_pid: Pid of its PID 1 as this machine numbers it.
    """

    def __init__(
        self, spec: NodeSpec, *, name: str, address: str, interface: str, boot_id: str, link: str, log: Path
    ) -> None:
        self.spec = spec
        self.name = name
        self.address = address
        self.interface = interface
        self.boot_id = boot_id
        self.link = link
        self.log = log
        self.init_pid = 0
        self.cgroups: list[str] = []
        self._guard: subprocess.Popen[str] | None = None
        self._skew = 0.0
        self._closed_ports: dict[int, str] = {}
        self._blocked: set[str] = {HEAD_ADDRESS} if spec.via else set()

    @property
    def guard_pid(self) -> int:
        """Pid of the process around the node's PID 1; it holds the node's network namespace as well."""
        assert self._guard is not None
        return self._guard.pid

    @property
    def alive(self) -> bool:
        """Whether the node's PID 1 lives."""
        return self._guard is not None and self._guard.poll() is None

    # --- seen from outside -------------------------------------------------------------------------------------

    def path(self, path: str | Path) -> Path:
        """A path of the node (absolute, or below its home) as one that this process can open.

        Absolute symbolic links on the way are followed on the head, not on the node.
        """
        return Path(f"/proc/{self.init_pid}/root{os.path.join(self.spec.home, path)}")

    def processes(self) -> list[Process]:
        """Every process of the node but its PID 1, by pid; none if the node is dead."""
        try:
            pids = sorted(int(name) for name in os.listdir(self.path("/proc")) if name.isdigit())
        except OSError:
            return []
        found = (self._process(pid) for pid in pids if pid != 1)
        return [process for process in found if process is not None]

    def leftovers(self) -> list[Process]:
        """The processes that are neither PID 1 nor sshd's: on a clean node there are none (a zombie is gone)."""
        return [p for p in self.processes() if not p.comm.startswith("sshd") and p.state != "Z"]

    def _process(self, pid: int) -> Process | None:
        try:
            folder = self.path(f"/proc/{pid}")
            before, _, after = (folder / "stat").read_text(errors="replace").rpartition(")")
            argv = (folder / "cmdline").read_bytes().decode(errors="surrogateescape").rstrip("\0").split("\0")
            uid = folder.stat().st_uid
        except OSError:
            return None
        state, ppid = after.split()[:2]
        comm = before.partition("(")[2]
        return Process(pid, int(ppid), uid, state, comm, tuple(argv) if argv != [""] else ())

    def environ(self, pid: int) -> dict[str, str]:
        """The environment a process was started with; empty if it is gone."""
        try:
            raw = self.path(f"/proc/{pid}/environ").read_bytes().decode(errors="surrogateescape")
        except OSError:
            return {}
        return dict(entry.split("=", 1) for entry in raw.split("\0") if "=" in entry)

    def pids_of(self, pattern: str) -> list[int]:
        """Pids of the living processes whose command line (joined by blanks) matches, oldest first."""
        return [p.pid for p in self.processes() if p.state != "Z" and re.search(pattern, p.command)]

    def pid_of(self, pattern: str) -> int | None:
        """The first of `pids_of`, or None."""
        return next(iter(self.pids_of(pattern)), None)

    def wait_for(self, predicate: Callable[[], T | None], deadline: float = 15.0, what: str = "") -> T:
        """`waiting.wait_for`, with the node's name in the failure."""
        return wait_for(predicate, deadline, f"{what or predicate!r} on {self.name}")

    def sshd_log(self) -> str:
        """What sshd wrote (LogLevel VERBOSE)."""
        return self.path(LOG).read_text(errors="replace")

    # --- programs in the node ----------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str],
        *,
        user: str = "root",
        input: str | None = None,  # noqa: A002 (the name that subprocess.run has)
        env: Mapping[str, str] | None = None,
        check: bool = False,
        timeout: float = 30.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program inside the node, without ssh; works while the link is cut and sshd is dead.

        Args:
            argv: Looked up on the node's PATH.
            user: `root`, or the account of the node's spec.
            input: Text for its standard input, else /dev/null.
            env: Added to a login's plain environment.
            check: Raise on a status other than 0.
            timeout: Seconds until it is killed.
        """
        stdin = subprocess.DEVNULL if input is None else None
        return subprocess.run(
            self._inside(argv, user), env=self._environment(env), text=True, capture_output=True,
            check=check, timeout=timeout, **({"input": input} if input is not None else {"stdin": stdin}),
        )  # fmt: skip

    def start(
        self, argv: Sequence[str], *, user: str = "root", env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program inside the node and leave it running (a decoy, for one); its streams are /dev/null.

        The object stands for the program: to wait for it and to end it; its pid in the node is another one.
        """
        null = subprocess.DEVNULL
        inside = self._inside(argv, user)
        return subprocess.Popen(inside, env=self._environment(env), stdin=null, stdout=null, stderr=null)

    def _inside(self, argv: Sequence[str], user: str) -> list[str]:
        account = [] if user == "root" else ["-S", str(self.spec.uid), "-G", str(self.spec.uid)]
        home = self.spec.home if user == self.spec.user else "/"
        return ["nsenter", "-t", str(self.init_pid), "-m", "-u", "-i", "-n", "-p", "-W", home, *account, *argv]

    def _environment(self, env: Mapping[str, str] | None) -> dict[str, str]:
        mine = {"PATH": PATH, "HOME": self.spec.home, "USER": self.spec.user, "LANG": "C.UTF-8"}
        return mine | dict(env or {})

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process by its pid in the node; no error if it is gone."""
        self.run(["/bin/kill", f"-{int(number)}", str(pid)])

    # --- the node and its link ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the whole node at once, as a power cut does: not a packet leaves it, nothing is told to anyone."""
        if self.alive:
            ip(f"link set {self.link} down")
        self.discard()

    def discard(self, *, wait: bool = True) -> None:
        """End the node without caring what its peers see; returns when its PID 1 is gone, if told to wait."""
        if self._guard is None:
            return
        if self._guard.poll() is None:
            # Not the guard: it must stay to reap PID 1, or the machine's own init would, in its own time.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        if wait:
            self._guard.wait(timeout=30)

    def cut(self, *, carrier: bool = False) -> None:
        """Cut the node's link; packets vanish both ways, and with `carrier` both ends see the link go down."""
        ip(f"link set {self.link} down" if carrier else f"link set {self.link} nomaster")

    def restore(self) -> None:
        """Undo `cut`."""
        ip(f"link set {self.link} master {BRIDGE} up")

    def block(self, *others: Node | str) -> None:
        """Drop all packets between this node and others: nodes, or `head`."""
        self._blocked |= {_address(other) for other in others}
        self.apply_firewall()

    def unblock(self, *others: Node | str) -> None:
        """Undo `block`, for all if none is named."""
        self._blocked -= {_address(other) for other in others} or set(self._blocked)
        self.apply_firewall()

    def firewall(self, *ports: int, action: str = "drop") -> None:
        """Close TCP ports to everybody but the node itself: `drop`, or `reject with tcp reset`."""
        self._closed_ports |= dict.fromkeys(ports, action)
        self.apply_firewall()

    def open_firewall(self, *ports: int) -> None:
        """Undo `firewall`, for all ports if none is named."""
        for port in ports or tuple(self._closed_ports):
            self._closed_ports.pop(port, None)
        self.apply_firewall()

    def apply_firewall(self) -> None:
        """Make the node's rules what `block`, `firewall` and the spec's `via` say."""
        drops = [(f"ip saddr {address} drop", f"ip daddr {address} drop") for address in sorted(self._blocked)]
        ports = [f'iifname != "lo" tcp dport {port} {action}' for port, action in self._closed_ports.items()]
        incoming = "; ".join([*(drop[0] for drop in drops), *ports])
        outgoing = "; ".join(drop[1] for drop in drops)
        rules = f"""
            table inet lab
            delete table inet lab
            table inet lab {{
                chain in {{ type filter hook input priority 0; {incoming}
                }}
                chain out {{ type filter hook output priority 0; {outgoing}
                }}
            }}"""
        self.run(["nft", "-f", "-"], input=rules, check=True)

    # --- sshd --------------------------------------------------------------------------------------------------

    def sshd_pids(self) -> list[int]:
        """The listener and every session's sshd processes."""
        return [p.pid for p in self.processes() if p.comm.startswith("sshd") and p.state != "Z"]

    def sshd_listener(self) -> int:
        """The sshd that accepts connections, or did until it was killed."""
        return int(self.path("/run/sshd.pid").read_text())

    def kill_sshd(self, *, sessions: bool = True) -> None:
        """SIGKILL sshd, with its sessions unless told otherwise; what they had started stays."""
        self._signal_sshd(signal.SIGKILL, sessions=sessions)
        self.wait_for(lambda: not self.listens(self.spec.port), what="sshd to be gone")

    def stop_sshd(self, *, sessions: bool = True) -> None:
        """SIGSTOP sshd: connects are accepted by the kernel and answered by nobody."""
        self._signal_sshd(signal.SIGSTOP, sessions=sessions)

    def cont_sshd(self) -> None:
        """Undo `stop_sshd`."""
        self._signal_sshd(signal.SIGCONT, sessions=True)

    def restart_sshd(self) -> None:
        """End the listener if there is one, and start it with the present configuration; sessions live on."""
        if self.listens(self.spec.port):
            self.kill_sshd(sessions=False)
        self.run(sshd_argv(self.spec), check=True)
        self.wait_for(lambda: self.listens(self.spec.port), what="sshd to listen")

    def _signal_sshd(self, number: int, *, sessions: bool) -> None:
        pids = self.sshd_pids() if sessions else [self.sshd_listener()]
        if pids:
            self.run(["/bin/kill", f"-{int(number)}", *map(str, pids)])

    def listens(self, port: int) -> bool:
        """Whether a socket of the node listens on a TCP port (IPv4)."""
        return listens(f"/proc/{self.init_pid}/net/tcp", port)

    def new_host_key(self, kind: str = "ed25519") -> str:
        """Give sshd another host key than known_hosts has; returns its public line."""
        make_key(self.path(HOST_KEY + ".new"), kind)
        self.path(HOST_KEY + "-cert.pub").unlink(missing_ok=True)
        for end in ("", ".pub"):
            self.path(HOST_KEY + ".new" + end).replace(self.path(HOST_KEY + end))
        self.configure_sshd()
        return self.path(HOST_KEY + ".pub").read_text().strip()

    def configure_sshd(self, *lines: str) -> None:
        """Write sshd_config anew, with further lines put first, and restart the listener."""
        self.path(CONFIG).write_text(sshd_config(self.spec, self._skew, lines, HOST_KEY, self.path(HOST_KEY)))
        self.restart_sshd()

    # --- disk and clock ----------------------------------------------------------------------------------------

    def skew_clock(self, seconds: float) -> None:
        """Shift the wall clock that new ssh sessions and all they start see; the monotonic clock stays true."""
        self._skew = seconds
        self.configure_sshd()

    def fill_disk(self, path: str | None = None, *, leave: int = 0) -> None:
        """Leave no more than `leave` bytes free on the file system of a path: the home's, /tmp, /var/tmp, ...

        The file system shrinks to what is used on it, so that space freed later can be used again.
        """
        target = self._mount_of(path)
        end = time.monotonic() + 15
        while True:
            used = self._used(target)
            done = self.run(["mount", "-t", "tmpfs", "-o", f"remount,size={max(used + leave, 4096)}", "tmpfs", target])
            if done.returncode == 0 and os.statvfs(self.path(target)).f_bavail * 4096 <= leave + 4096:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"{target} of {self.name} does not fill up: {done.stderr}")

    def free_disk(self, path: str | None = None) -> None:
        """Undo `fill_disk`."""
        target = self._mount_of(path)
        size = self.spec.disk if target == self.spec.home else "4g"
        self.run(["mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", target], check=True)

    def _mount_of(self, path: str | None) -> str:
        return path if path and path.startswith("/") else self.spec.home

    def _used(self, target: str) -> int:
        space = os.statvfs(self.path(target))
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    # --- for the lab -------------------------------------------------------------------------------------------

    def attach(self, guard: subprocess.Popen[str], init_pid: int) -> None:
        """Take over the processes that are the node."""
        self._guard = guard
        self.init_pid = init_pid


def _address(other: Node | str) -> str:
    if isinstance(other, Node):
        return other.address
    return HEAD_ADDRESS if other == "head" else other
