"""What a test may ask of a lab node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tests.lab.places import HOME, TEMPORARY, Place

if TYPE_CHECKING:
    from collections.abc import Mapping

SHARED: Final = "/srv/shared"
"""Where the one shared directory is seen, on the head and on every node."""

NOISE: Final = "Welcome to the lab \u2603, \x1b[1mmotd\x1b[0m: do not panic"
"""What the start files of a noisy node print, once on stdout and once on stderr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpec:
    """One node; every default is a plain Debian machine that root reaches with a key.

    Attributes:
        name: Host name; default `n1`, `n2`, ... by the first free number.
        user: Account that ssh_config names; any other than root gets a home below /home.
        account: Uid and gid of such a user. Limits of processes count all that have one uid, on whatever node.
        shell: Login shell of that user and of root.
        noisy: The start files of bash, csh, fish and zsh print `NOISE` on both streams.
        python: `host`: the system's, and the interpreter of the tests at its own path. None: no Python
            anywhere. An absolute path: that interpreter is `/usr/local/bin/python3`, first on PATH.
        only_python: The interpreter of `python` is the only one on the node.
        env: What sshd's SetEnv gives every session.
        sshd: Lines put first in sshd_config, where the first value of a keyword wins.
        port: sshd's port.
        authorized: The lab's user key is in authorized_keys.
        password: The user's password; also turns password authentication on.
        user_ca: User certificates of the lab's user CA are accepted (`Lab.certify`).
        host_key: Type of the host key: ed25519, rsa or ecdsa.
        host_certificate: The host key carries a certificate and known_hosts has only the CA's line.
        known: The node's host key is in the head's known_hosts.
        via: Name of a node; the head reaches this one only through it (ProxyJump), its packets are dropped.
        disk: Size of the file system that holds the home, as tmpfs takes it.
        shared_home: The home is one directory shared by all nodes that ask for it; no disk of its own.
        places: How the home (`~`), /tmp, /var/tmp and /dev/shm are mounted, where not as usual.
        proc: Options of the mount of /proc: `hidepid=2`.
        uptime: For how many seconds the node has been up; None: as long as the machine that plays it.
        ipv6_only: The node has an IPv6 address on the lab's network and no other.
        names: Its /etc/hosts has the names and addresses of all nodes (and the head's has its own).
        limits: Resource limits of sshd and its sessions, in prlimit's words: `{"memlock": "65536"}`.
        programs: Scripts put into /usr/local/bin: name to text with its `#!` line.
        files: More files, owned by the user: path (below the home, or absolute in /tmp, /var/tmp, /run) to text.
        cgroup: The node has writable cgroups, whose root is its own (else it sees the machine's, read-only).
        memory: Limit for all of the node, its file systems included, as `memory.limit_in_bytes` takes it; needs
            `cgroup` and the memory controller of version 1.
        cpus: Limit of CPU time, in CPUs; needs `cgroup` and the cpu controller of version 1.
        cgroup_view: `own`, or `v2`: how the limits are shown, see `cgroup_views`.
        expose: Head paths that stay visible at the same place, read-only, where the node would hide them.
        hide: Further directories that are empty on the node.
    """

    name: str | None = None
    user: str = "root"
    account: int = 2000
    shell: str = "/bin/bash"
    noisy: bool = False
    python: str | None = "host"
    only_python: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    sshd: tuple[str, ...] = ()
    port: int = 22
    authorized: bool = True
    password: str | None = None
    user_ca: bool = False
    host_key: str = "ed25519"
    host_certificate: bool = False
    known: bool = True
    via: str | None = None
    disk: str = "8g"
    shared_home: bool = False
    places: Mapping[str, Place] = field(default_factory=dict)
    proc: str = ""
    uptime: float | None = None
    ipv6_only: bool = False
    names: bool = False
    limits: Mapping[str, str] = field(default_factory=dict)
    programs: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    cgroup: bool = False
    memory: str | None = None
    cpus: float | None = None
    cgroup_view: str = "own"
    expose: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()

    @property
    def home(self) -> str:
        return "/root" if self.user == "root" else f"/home/{self.user}"

    @property
    def uid(self) -> int:
        return 0 if self.user == "root" else self.account

    @property
    def all_places(self) -> dict[str, Place]:
        """Every place with how it is mounted, the home first."""
        home = Place(shared="home") if self.shared_home else Place(size=self.disk)
        return {HOME: home, **{name: Place() for name in TEMPORARY}} | dict(self.places)
