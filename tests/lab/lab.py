"""A lab: real sshd on many nodes of one machine, each with namespaces of its own.

    with Lab() as lab:
        first, second = lab.add(2)
        lab.ssh(first, "hostname")

While a lab is up, the process (its main thread, and all it starts) is the head: see `tests.lab.head`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

from tests.lab import cgroups, kernel
from tests.lab.head import ADDRESS, BRIDGE, NETWORK, Head, forget_links, ip
from tests.lab.init import Setup
from tests.lab.keys import certify, make_key, public
from tests.lab.machine import CONFIG, FAKETIME, HOST_KEY, etc, noise, sshd_argv, sshd_config
from tests.lab.node import Node
from tests.lab.spec import NodeSpec
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

PREFIX: Final = "clusterctl-lab-"
REPOSITORY: Final = Path(__file__).resolve().parents[2]
INTERFACES: Final = ("eth0", "ens7", "lan2", "enp3s0f1", "eno4", "em5", "wan6", "net7")
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
        for node in nodes:
            if node.spec.via:
                node.apply_firewall()
        self._write_ssh()
        return nodes

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
        taken = {int(node.address.rpartition(".")[2]) for node in self.nodes}
        free = [number for number in range(1, 251) if number not in taken]
        if len(free) < len(specs):
            raise ValueError("a lab holds at most 250 nodes")
        return [self._new_node(spec, number) for spec, number in zip(specs, free, strict=False)]

    def _new_node(self, spec: NodeSpec, number: int) -> Node:
        self._links += 1
        name = spec.name or f"n{number}"
        return Node(
            replace(spec, name=name),
            name=name,
            address=f"{NETWORK}.{number}",
            interface=INTERFACES[(number - 1) % len(INTERFACES)],
            boot_id=str(uuid.uuid4()),
            # A name is never used twice: the kernel takes the old interface away in its own time.
            link=f"v{self._links}",
            log=self.root / "logs" / f"{name}-{self._links}.log",
        )

    def _bring_up(self, nodes: list[Node]) -> None:
        deadline = time.monotonic() + START_DEADLINE
        guards = [_spawn(node, self._setup(node)) for node in nodes]
        try:
            for node, guard in zip(nodes, guards, strict=True):
                node.attach(guard, int(_line(node, guard, deadline)))
            ip(*[command for node in nodes for command in _link_commands(node)])
            for guard in guards:
                _tell(guard, "go")
            for node, guard in zip(nodes, guards, strict=True):
                if _line(node, guard, deadline) != "ready":
                    raise RuntimeError(f"{node.name} did not come up: {node.log.read_text()}")
        finally:
            for guard in guards:
                for pipe in (guard.stdin, guard.stdout):
                    if pipe is not None:
                        pipe.close()

    def _setup(self, node: Node) -> Setup:
        spec = node.spec
        prefixes = () if spec.python is None else (sys.prefix, sys.base_prefix)
        chosen = None if spec.python == "host" else spec.python
        return Setup(
            owner=os.getpid(),
            hostname=node.name,
            boot_id=node.boot_id,
            interface=node.interface,
            address=f"{node.address}/24",
            gateway=ADDRESS,
            home=spec.home,
            uid=spec.uid,
            disk=spec.disk,
            shared=str(self.shared),
            shared_home=str(self._shared_home()) if spec.shared_home else None,
            etc=etc(spec, node.name, node.boot_id),
            expose=[*prefixes, *([_prefix(chosen)] if chosen else []), *spec.expose],
            hide=list(spec.hide),
            without_python=spec.python is None,
            python=chosen,
            files=self._files(node),
            sshd=sshd_argv(spec),
            cgroups=self._cgroups(node),
            port=spec.port,
        )

    def _cgroups(self, node: Node) -> list[str]:
        if node.spec.cgroup:
            node.cgroups = cgroups.make(f"{self.root.name}/{node.link}", node.spec.memory)
        return node.cgroups

    def _shared_home(self) -> Path:
        home = self.root / "shared_home"
        home.mkdir(exist_ok=True)
        return home

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
        hosts = [_host_block(node) for node in self.nodes]
        known = [f"{_known_name(n)} {public(self._host_key(n))}" for n in self.nodes if _plainly_known(n)]
        authority = [f"@cert-authority n*,{NETWORK}.* {public(self.host_ca)}"]
        certified = any(node.spec.host_certificate and node.spec.known for node in self.nodes)
        self.head.write_ssh(hosts, known + (authority if certified else []))


def _prefix(python: str) -> str:
    return str(Path(os.path.realpath(python)).parents[1])


def _plainly_known(node: Node) -> bool:
    return node.spec.known and not node.spec.host_certificate


def _known_name(node: Node) -> str:
    names = (node.name, node.address)
    return ",".join(names if node.spec.port == 22 else (f"[{name}]:{node.spec.port}" for name in names))


def _host_block(node: Node) -> str:
    lines = [f"Host {node.name}", f"HostName {node.address}", f"User {node.spec.user}"]
    if node.spec.port != 22:
        lines.append(f"Port {node.spec.port}")
    if node.spec.via:
        lines.append(f"ProxyJump {node.spec.via}")
    return "\n    ".join(lines) + "\n"


def _link_commands(node: Node) -> list[str]:
    number = int(node.address.rpartition(".")[2])
    mac = f"02:c1:00:00:00:{number:02x}"
    guard = node.guard_pid
    return [
        f"link add {node.link} type veth peer name {node.interface} address {mac} netns {guard}",
        f"link set {node.link} addrgenmode none master {BRIDGE} up",
    ]


def _spawn(node: Node, setup: Setup) -> subprocess.Popen[str]:
    argv = [sys.executable, "-E", "-S", "-s", "-B", "-m", "tests.lab.init"]
    env = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
    with node.log.open("w") as log:
        guard = subprocess.Popen(
            argv, cwd=REPOSITORY, env=env, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
        )  # fmt: skip
    _tell(guard, json.dumps(setup))
    return guard


def _tell(guard: subprocess.Popen[str], line: str) -> None:
    assert guard.stdin is not None
    # A guard that is gone has no answer either, and that failure shows what it wrote. Written without Python's
    # buffer, which would fail once more when it is closed.
    with contextlib.suppress(BrokenPipeError):
        data = memoryview(f"{line}\n".encode())
        while data:
            data = data[os.write(guard.stdin.fileno(), data) :]


def _line(node: Node, guard: subprocess.Popen[str], deadline: float) -> str:
    assert guard.stdout is not None
    readable, _, _ = select.select([guard.stdout], [], [], max(0.0, deadline - time.monotonic()))
    line = guard.stdout.readline().strip() if readable else ""
    if not line:
        raise RuntimeError(f"{node.name} did not come up: {node.log.read_text() or 'no answer'}")
    return line


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
