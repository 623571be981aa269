"""One node of a lab: what a test can do to it and see of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from tests.lab import cgroups, power, wire
from tests.lab.head import ADDRESS as HEAD_ADDRESS
from tests.lab.head import ADDRESS6 as HEAD_ADDRESS6
from tests.lab.head import BRIDGE, ip
from tests.lab.init import listens
from tests.lab.inside import Inside
from tests.lab.keys import make_key
from tests.lab.machine import CONFIG, HOST_KEY, sshd_argv, sshd_config
from tests.lab.places import HOME

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from tests.lab.network import Mounted
    from tests.lab.spec import NodeSpec


class Node(Inside):
    """A running node; `Lab.add` makes it.

    Attributes:
        number: The lab's own number for it, from 1; its address ends with it.
        address: Its address on the lab's bridge: IPv4, or IPv6 with `NodeSpec.ipv6_only`.
        door: Where the head reaches sshd, if not at its address and port: an address and a port.
        interface: The name of its network interface, another one on the next node.
        boot_id: What `/proc/sys/kernel/random/boot_id` says on it.
        mounts: The network file systems that it has mounted, by the names of the places.
        disks: Descriptors of what it keeps while it is without power, by the names of the places.
        uptime: What its clocks begin with at the next start, in seconds; None: with the machine's.
    """

    def __init__(self, spec: NodeSpec, *, name: str, number: int, boot: Callable[[Node], None]) -> None:
        super().__init__(spec, name)
        self.number = number
        self.address = wire.address(number, ipv6=spec.ipv6_only)
        self.door: tuple[str, int] | None = None
        self.interface = wire.interface(number)
        self.mounts: dict[str, Mounted] = {}
        self.disks: dict[str, int] = {}
        self.uptime = spec.uptime
        self.boot_id = ""
        self.link = ""
        self.log = Path()
        self._boot = boot
        self._guard: subprocess.Popen[str] | None = None
        self._skew = 0.0
        self._closed_ports: dict[int | str, str] = {}
        self._swallowed: dict[str, int] = {}
        self._blocked: set[str] = _addresses("head") if spec.via else set()

    def prepare(self, link_name: str, log: Path) -> None:
        """Be a machine that was not started yet: its boot id, its end of the wire and its log are new.

        A link's name is never used twice: the kernel takes the old interface away in its own time.
        """
        self.boot_id = str(uuid.uuid4())
        self.link = link_name
        self.log = log
        self._skew = 0.0

    @property
    def guard_pid(self) -> int:
        """Pid of the process around the node's PID 1; it holds the node's network namespace as well."""
        assert self._guard is not None
        return self._guard.pid

    @property
    def alive(self) -> bool:
        """Whether the node's PID 1 lives."""
        return self._guard is not None and self._guard.poll() is None

    # --- the node and its link ---------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the whole node at once, as a power cut does: not a packet leaves it, nothing is told to anyone."""
        if self.alive:
            ip(f"link set {self.link} down")
            self.disks = power.take_disks(self)
        self._end()

    def boot(self, uptime: float = 0.0) -> None:
        """Start a node that was killed, and return when sshd listens.

        It has its disks (`Place.survives`), its name and its addresses, and what `block` and `firewall` said; a new
        boot id, pids from 1 and clocks from `uptime` on, in seconds; memory, cgroups and what was configured in sshd
        are as at first.
        """
        self.uptime = uptime
        self._boot(self)

    def reboot(self, uptime: float = 0.0, *, orderly: bool = False) -> None:
        """Kill and boot; with `orderly` every process but sshd gets SIGTERM before, and 2 s to act on it."""
        if orderly:
            pids = [str(p.pid) for p in self.leftovers()]
            self.run(["/bin/kill", "-TERM", *pids])
            with contextlib.suppress(TimeoutError):
                self.wait_for(lambda: not self.leftovers(), 2.0)
        self.kill()
        self.boot(uptime)

    def discard(self, *, wait: bool = True) -> None:
        """End the node without caring what its peers see; returns when its PID 1 is gone, if told to wait."""
        self._end(wait=wait)
        self._close_disks()

    def _end(self, *, wait: bool = True) -> None:
        if self._guard is None:
            return
        # Whoever waits for a file system that hangs cannot be killed before it is gone.
        while self.mounts:
            self.mounts.popitem()[1].end()
        if self._guard.poll() is None:
            # Not the guard: it must stay to reap PID 1, or the machine's own init would, in its own time.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init_pid, signal.SIGKILL)
        if wait:
            self._guard.wait(timeout=30)

    def pause(self) -> None:
        """Stop the whole node, as its hypervisor can: nothing runs, no packet is answered; needs `NodeSpec.cgroup`.

        Its clocks go on, as if its hypervisor had set them when it goes on.
        """
        self.cut()
        cgroups.freeze(self.cgroups, frozen=True)

    def resume(self) -> None:
        """Undo `pause`."""
        cgroups.freeze(self.cgroups, frozen=False)
        self.restore()

    def next_pid(self, number: int) -> None:
        """Let the next process of the node have that pid, so that processes of several nodes have the same."""
        self.run(["sh", "-c", f"echo {number - 1} > /proc/sys/kernel/ns_last_pid"], check=True)

    def cut(self, *, carrier: bool = False) -> None:
        """Cut the node's link; packets vanish both ways, and with `carrier` both ends see the link go down."""
        ip(f"link set {self.link} down" if carrier else f"link set {self.link} nomaster")

    def restore(self) -> None:
        """Undo `cut`."""
        ip(f"link set {self.link} master {BRIDGE} up")

    def block(self, *others: Node | str) -> None:
        """Drop all packets between this node and others: nodes, or `head`."""
        self._blocked |= _addresses(*others)
        self.apply_firewall()

    def unblock(self, *others: Node | str) -> None:
        """Undo `block`, for all if none is named."""
        self._blocked -= _addresses(*others) or set(self._blocked)
        self.apply_firewall()

    def swallow(self, other: Node, *, above: int) -> None:
        """Drop packets from another node that are larger than so many bytes, and tell nobody; `open_firewall` undoes it."""
        self._swallowed[other.address] = above
        self.apply_firewall()

    def firewall(self, *ports: int | str, action: str = "drop") -> None:
        """Close TCP ports to everybody but the node itself: `drop`, or `reject with tcp reset`.

        A range (`"1024-2000"`) is closed to those who connect; connections that the node opens itself go on.
        """
        self._closed_ports |= dict.fromkeys(ports, action)
        self.apply_firewall()

    def open_firewall(self, *ports: int | str) -> None:
        """Undo `firewall`, for all ports if none is named, and `swallow`."""
        self._swallowed.clear()
        for port in ports or tuple(self._closed_ports):
            self._closed_ports.pop(port, None)
        self.apply_firewall()

    @property
    def has_rules(self) -> bool:
        """Whether `block`, `firewall`, `swallow` or the spec's `via` say anything."""
        return bool(self._blocked or self._closed_ports or self._swallowed)

    def apply_firewall(self) -> None:
        """Make the node's rules what `block`, `firewall`, `swallow` and the spec's `via` say."""
        incoming, outgoing = wire.drops(self._blocked)
        ports = [
            f'iifname != "lo" tcp dport {port} {"tcp flags & (syn|ack) == syn " * isinstance(port, str)}{action}'
            for port, action in self._closed_ports.items()
        ]
        family = "ip6" if self.spec.ipv6_only else "ip"
        large = [f"{family} saddr {peer} meta length > {above} drop" for peer, above in self._swallowed.items()]
        rules = f"""
            table inet lab
            delete table inet lab
            table inet lab {{
                chain in {{ type filter hook input priority 0; {"; ".join([*incoming, *ports, *large])}
                }}
                chain out {{ type filter hook output priority 0; {"; ".join(outgoing)}
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
        """SIGSTOP sshd and what Slurm has there for steps: connects are accepted by the kernel and answered by nobody."""
        self._signal_sshd(signal.SIGSTOP, sessions=sessions, steps=sessions)

    def cont_sshd(self) -> None:
        """Undo `stop_sshd`."""
        self._signal_sshd(signal.SIGCONT, sessions=True, steps=True)

    def restart_sshd(self) -> None:
        """End the listener if there is one, and start it with the present configuration; sessions live on."""
        if self.listens(self.spec.port):
            self.kill_sshd(sessions=False)
        self.run(sshd_argv(self.spec), check=True)
        self.wait_for(lambda: self.listens(self.spec.port), what="sshd to listen")

    def _signal_sshd(self, number: int, *, sessions: bool, steps: bool = False) -> None:
        pids = self.sshd_pids() if sessions else [self.sshd_listener()]
        if steps:
            # Not slurmd: whoever has brought it into the node stands still with it, and is not told to go on.
            pids += [p.pid for p in self.processes() if p.comm == "slurmstepd"]
        if pids:
            self.run(["/bin/kill", f"-{int(number)}", *map(str, pids)])

    def listens(self, port: int) -> bool:
        """Whether a socket of the node listens on a TCP port."""
        return listens(f"/proc/{self.init_pid}/net", port)

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
        size = next(place.size for name, place in self.spec.all_places.items() if self.where(name) == target)
        self.run(["mount", "-t", "tmpfs", "-o", f"remount,size={size}", "tmpfs", target], check=True)

    def where(self, place: str) -> str:
        """The path of a place on the node."""
        return self.spec.home if place == HOME else place

    def _mount_of(self, path: str | None) -> str:
        return path if path and path.startswith("/") else self.spec.home

    def _used(self, target: str) -> int:
        space = os.statvfs(self.path(target))
        return (space.f_blocks - space.f_bfree) * space.f_frsize

    # --- for the lab -------------------------------------------------------------------------------------------

    @property
    def descriptors(self) -> list[int]:
        """What PID 1 inherits: the disks it keeps, and /dev/fuse for what it mounts."""
        return [*self.disks.values(), *(m.descriptor for m in self.mounts.values() if m.descriptor is not None)]

    def attach(self, guard: subprocess.Popen[str], init_pid: int) -> None:
        """Take over the processes that are the node; what they have inherited is theirs."""
        self._guard = guard
        self.init_pid = init_pid
        self._close_disks()
        for mounted in self.mounts.values():
            mounted.let_go()

    def _close_disks(self) -> None:
        while self.disks:
            os.close(self.disks.popitem()[1])


def _addresses(*others: Node | str) -> set[str]:
    known = {"head": {HEAD_ADDRESS, HEAD_ADDRESS6}}
    return {
        address
        for other in others
        for address in ({other.address} if isinstance(other, Node) else known.get(other, {other}))
    }
