"""A lab: real sshd on many nodes of one machine, each with namespaces of its own.

    with Lab() as lab:
        first, second = lab.add(2)
        lab.ssh(first, "hostname")

While a lab is up, the process (its main thread, and all it starts) is the head: see `tests.lab.head`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from tests.lab import cgroups, guards, kernel, machine, places, ssh_files, wire
from tests.lab.head import ADDRESS, Head, forget_links, ip
from tests.lab.keys import certify, make_key, public
from tests.lab.machine import CONFIG, FAKETIME, HOST_KEY, etc, noise, sshd_argv, sshd_config
from tests.lab.network import Mounted
from tests.lab.node import Node
from tests.lab.setup import Setup
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.lab.places import Network

PREFIX: Final = "clusterctl-lab-"
REPOSITORY: Final = guards.REPOSITORY
NEEDED: Final = ("ip", "nft", "nsenter", "prlimit", "ssh", "ssh-keygen", "/usr/sbin/sshd")
START_DEADLINE: Final = 60.0


class Lab:
    """The head's side of a lab, and the nodes that are up.

    Attributes:
        head: Namespaces and home of the head.
        nodes: The nodes added and not removed, dead ones included.
        shared: The directory that every node and the head see at `/srv/shared`.
        user_ca, host_ca: Keys that sign user and host certificates.
    """

    def __init__(self) -> None:
        _remove_stale()
        self.root = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
        self._lock = _lock(self.root)
        self.root.chmod(0o755)
        self.head = Head(self.root)
        self.nodes: list[Node] = []
        self.shared = self.root / "shared"
        self.user_ca = self.root / "keys" / "user_ca"
        self.host_ca = self.root / "keys" / "host_ca"
        self._links = 0
        self._clients = 0
        self._mounts: list[Mounted] = []

    @staticmethod
    def unavailable() -> str | None:
        """Why no lab can run here, or None."""
        if sys.platform != "linux" or os.geteuid() != 0:
            return "the lab needs Linux and root: it makes namespaces, mounts and a bridge"
        missing = [name for name in NEEDED if shutil.which(name) is None]
        if missing or not os.path.exists(FAKETIME):
            return f"the lab needs {', '.join(missing) or FAKETIME}: run `make test`, which installs it"
        flags = kernel.NEWNET | kernel.NEWNS | kernel.NEWPID | kernel.NEWUTS | kernel.NEWIPC
        pid = os.fork()
        if pid == 0:
            try:
                kernel.unshare(flags)
            except OSError:
                os._exit(1)
            os._exit(0)
        if os.waitpid(pid, 0)[1] != 0:
            return "the lab needs network, PID, mount, UTS and IPC namespaces, which this machine refuses"
        return None

    def __enter__(self) -> Lab:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Make keys and folders, and move this process to the head's namespaces."""
        self.shared.mkdir()
        self.shared.chmod(0o1777)
        (self.root / "logs").mkdir()
        make_key(self.user_ca)
        make_key(self.host_ca)
        self.head.enter()
        self._write_ssh()

    def close(self) -> None:
        """End every node, everything started with the head's home, and leave the head's namespaces."""
        self.remove(list(self.nodes))
        self.end_head_processes()
        for mounted in self._mounts:
            mounted.end()
        self.head.leave()
        shutil.rmtree(self.root)
        self._lock.close()

    # --- the head ----------------------------------------------------------------------------------------------

    @property
    def head_home(self) -> Path:
        """HOME for what a test starts on the head; it has `.ssh/config`, `known_hosts` and `id_ed25519`."""
        return self.head.home

    @property
    def ssh_config(self) -> Path:
        """For `ssh -F`; inside the lab plain `ssh` finds it by itself."""
        return self.head.ssh_config

    @property
    def head_address(self) -> str:
        return ADDRESS

    def head_env(self, **more: str) -> dict[str, str]:
        """This process's environment with HOME and the XDG folders of the lab's head."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SSH_"))}
        return env | {"HOME": str(self.head_home), "XDG_STATE_HOME": str(self.head_home / ".local/state")} | more

    def cut_head(self) -> None:
        """Cut the head off from all nodes, while the nodes reach each other."""
        self.head.cut()

    def restore_head(self) -> None:
        """Undo `cut_head`."""
        self.head.restore()

    def end_head_processes(self) -> None:
        """SIGKILL what was started with the head's home (controllers, agents of ssh), until none is left."""

        def none_left() -> bool:
            for pid in self.head.processes():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            return not self.head.processes()

        wait_for(none_left, what="the head's processes to be gone")

    def ssh(
        self, node: Node | str, command: str, *options: str, timeout: float = 30.0, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node with the system's ssh client, as a user of the head would."""
        name = node if isinstance(node, str) else node.name
        argv = ["ssh", "-F", str(self.ssh_config), "-o", "BatchMode=yes", *options, name, command]
        return subprocess.run(
            argv, input=stdin, text=True, capture_output=True, timeout=timeout, env=self.head_env(), check=False
        )

    def certify(self, key: Path, principals: str = "root", validity: str = "-1d:+30d") -> Path:
        """Sign a user key with the CA that nodes with `user_ca` trust; returns the certificate's path."""
        return certify(self.user_ca, key, principals, validity=validity)

    def cluster_yaml(self, nodes: Sequence[Node] | None = None, gpus: int = 0, job: str = "script: train.py") -> str:
        """A cluster file over nodes (default: all)."""
        hosts = "".join(f"  {node.name}: {gpus}\n" for node in (self.nodes if nodes is None else nodes))
        return f"version: 1\nhosts:\n{hosts}job:\n  {job}\n"

    # --- nodes -------------------------------------------------------------------------------------------------

    def add(self, specs: int | Iterable[NodeSpec] = 1) -> list[Node]:
        """Start nodes, all at once, and return when sshd listens on each.

        Raises:
            RuntimeError: a node did not come up; carries what it wrote.
        """
        wanted = [NodeSpec()] * specs if isinstance(specs, int) else list(specs)
        nodes = self._new_nodes(wanted)
        self.nodes += nodes
        try:
            self._bring_up(nodes)
        except BaseException:
            self.remove(nodes)
            raise
        self._write_ssh()
        return nodes

    def boot(self, nodes: Sequence[Node]) -> None:
        """Start nodes that were killed, all at once; see `Node.boot`."""
        forget_links([node.link for node in nodes])
        self._bring_up(nodes)
        for other in self.nodes:
            if other.alive:
                other.run(["ip", "-batch", "-"], input=_forget_addresses(nodes))
        self._write_ssh()

    def mount(self, path: Path, network: Network) -> Mounted:
        """Mount a network file system on the head; it is there until the lab's end, or until `Mounted.end`."""
        mounted = self.mounted(network)
        mounted.mount(path)
        self._mounts.append(mounted)
        return mounted

    def forget_shared(self) -> None:
        """Remove what machines had in common on servers and in shared places; no node may be left."""
        for name in ("exports", "common"):
            shutil.rmtree(self.root / name, ignore_errors=True)

    def reach(self, node: Node, door: tuple[str, int] | None) -> None:
        """Let the head reach a node's sshd at another address and port, or at its own again."""
        node.door = door
        self._write_ssh()

    def remove(self, nodes: Sequence[Node]) -> None:
        """End nodes and forget them; their names and addresses are free again."""
        for node in nodes:
            node.discard(wait=False)
        for node in nodes:
            node.discard()
            cgroups.remove(node.cgroups)
        forget_links([node.link for node in nodes])
        self.nodes = [node for node in self.nodes if node not in nodes]
        self._write_ssh()

    def _new_nodes(self, specs: list[NodeSpec]) -> list[Node]:
        taken = {node.number for node in self.nodes}
        free = [number for number in range(1, 251) if number not in taken]
        if len(free) < len(specs):
            raise ValueError("a lab holds at most 250 nodes")
        return [self._new_node(spec, number) for spec, number in zip(specs, free, strict=False)]

    def _new_node(self, spec: NodeSpec, number: int) -> Node:
        if spec.ipv6_only:
            self.head.use_ipv6()
        name = spec.name or f"n{number}"
        return Node(replace(spec, name=name), name=name, number=number, boot=lambda node: self.boot([node]))

    def _bring_up(self, nodes: Sequence[Node]) -> None:
        deadline = time.monotonic() + START_DEADLINE
        for node in nodes:
            self._links += 1
            node.prepare(f"v{self._links}", self.root / "logs" / f"{node.name}-{self._links}.log")
        started = [guards.spawn(node, self._setup(node)) for node in nodes]
        try:
            for node, guard in zip(nodes, started, strict=True):
                node.attach(guard, int(guards.line(node, guard, deadline)))
            ip(*[command for node in nodes for command in wire.outside(node)])
            for guard in started:
                guards.tell(guard, "go")
            for node, guard in zip(nodes, started, strict=True):
                if guards.line(node, guard, deadline) != "ready":
                    raise RuntimeError(f"{node.name} did not come up: {node.log.read_text()}")
                if node.has_rules:
                    node.apply_firewall()
            ip(_forget_addresses(nodes))
        finally:
            for guard in started:
                guards.close(guard)

    def _setup(self, node: Node) -> Setup:
        spec = node.spec
        alone = spec.python is None or spec.only_python
        prefixes = () if alone else (sys.prefix, sys.base_prefix)
        chosen = None if spec.python == "host" else spec.python
        return Setup(
            owner=os.getpid(),
            hostname=node.name,
            boot_id=node.boot_id,
            network=wire.inside(node),
            home=spec.home,
            uid=spec.uid,
            places=[self._place(node, name, place) for name, place in spec.all_places.items()],
            shared=str(self.shared),
            etc=etc(spec, node.name, node.boot_id),
            expose=[*prefixes, *([_prefix(chosen)] if chosen else []), *spec.expose],
            hide=list(spec.hide),
            without_python=alone,
            python=chosen,
            files=self._files(node),
            sshd=sshd_argv(spec),
            cgroups=self._cgroups(node),
            groups_shown=spec.cgroup_view,
            proc=spec.proc,
            uptime=node.uptime,
            port=spec.port,
        )

    def _cgroups(self, node: Node) -> list[str]:
        if node.spec.cgroup and not node.cgroups:
            node.cgroups = cgroups.make(f"{self.root.name}/{node.link}", node.spec.memory, node.spec.cpus)
        return node.cgroups

    def _place(self, node: Node, name: str, place: places.Place) -> places.PlaceSetup:
        client = None
        source = None if place.shared is None else self.root / "common" / place.shared
        if place.network is not None:
            mounted = node.mounts[name] = self.mounted(place.network)
            source, client = mounted.folder, mounted.client
        if source is not None:
            source.mkdir(parents=True, exist_ok=True)
        return places.setup(
            name, place, node.spec.home, source=source and str(source), kept=node.disks.get(name), client=client
        )

    def mounted(self, network: Network) -> Mounted:
        """A client of a network file system, for whoever mounts it."""
        self._clients += 1
        return Mounted(network, self.root / "exports", self.root / "logs" / f"client-{self._clients}.json")

    def _files(self, node: Node) -> list[tuple[str, str, int, int]]:
        spec = node.spec
        key = self._host_key(node)
        files = [
            (HOST_KEY, key.read_text(), 0o600, 0),
            (HOST_KEY + ".pub", public(key) + "\n", 0o644, 0),
            (CONFIG, sshd_config(spec, 0, (), HOST_KEY), 0o644, 0),
            ("/run/lab/user_ca.pub", public(self.user_ca) + "\n", 0o644, 0),
        ]
        if spec.host_certificate:
            certificate = certify(self.host_ca, key, f"{node.name},{node.address}", host=True)
            files.append((HOST_KEY + "-cert.pub", certificate.read_text(), 0o644, 0))
        if spec.authorized:
            files.append((f"{spec.home}/.ssh/authorized_keys", public(self.head.key) + "\n", 0o600, spec.uid))
        files += [(f"/usr/local/bin/{name}", text, 0o755, 0) for name, text in spec.programs.items()]
        own = {**(noise() if spec.noisy else {}), **spec.files}
        files += [(os.path.join(spec.home, path), text, 0o644, spec.uid) for path, text in own.items()]
        return files

    def _host_key(self, node: Node) -> Path:
        return make_key(self.root / "keys" / f"host_{node.name}_{node.spec.host_key}", node.spec.host_key, node.name)

    def _write_ssh(self) -> None:
        hosts = [ssh_files.host_block(node) for node in self.nodes]
        plain = [node for node in self.nodes if ssh_files.plainly_known(node)]
        known = [f"{ssh_files.known_names(node)} {public(self._host_key(node))}" for node in plain]
        authority = [ssh_files.authority(public(self.host_ca))]
        certified = any(node.spec.host_certificate and node.spec.known for node in self.nodes)
        self.head.write_ssh(hosts, known + (authority if certified else []))
        self._write_names([node for node in self.nodes if node.spec.names])

    def _write_names(self, nodes: Sequence[Node]) -> None:
        names = "".join(f"{node.address}\t{node.name}\n" for node in nodes)
        self.head.write_hosts(names)
        for node in nodes:
            if node.alive:
                node.path("/run/lab/etc/hosts").write_text(machine.hosts(node.name, ipv6=node.spec.ipv6_only) + names)


def _forget_addresses(nodes: Sequence[Node]) -> str:
    """Commands after which whoever has asked for nodes in vain, as they were not there, asks anew."""
    return "".join(f"neigh flush to {node.address}\n" for node in nodes)


def _prefix(python: str) -> str:
    return str(Path(os.path.realpath(python)).parents[1])


def _lock(root: Path) -> IO[str]:
    file = (root / "lock").open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _remove_stale() -> None:
    """Take away the folders of labs whose process is gone; all else of them went with it."""
    for root in Path("/tmp").glob(f"{PREFIX}*"):
        try:
            with (root / "lock").open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(root, ignore_errors=True)
        except OSError:
            continue
    cgroups.remove_stale(PREFIX)
