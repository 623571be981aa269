"""A machine at the first contact."""

from __future__ import annotations

from typing import TypedDict


class Gpus(TypedDict, total=False):
    """Which GPUs a machine has, as the kernel shows them: `count` is `None` where nobody can tell."""

    count: int | None
    indices: list[int]
    source: str
    vendor: str | None


class Address(TypedDict, total=False):
    """One address of one interface."""

    interface: str
    address: str
    family: str
    up: bool
    loopback: bool


class Way(TypedDict):
    """By which address and interface packets to a peer leave."""

    source: str
    interface: str | None


class Logind(TypedDict, total=False):
    """What logind does with the processes of a user who logs out."""

    linger: bool
    kill_user_processes: bool


class Hello(TypedDict, total=False):
    """A node at the first contact: facts of machine and user. Memory in bytes, clocks in seconds."""

    protocol: int
    version: str
    python: str
    python_version: str
    hostname: str
    boot_id: str
    pid_ns: str
    net_ns: str
    uid: int
    user: str
    home: str
    shell: str
    state_root: str
    mono: float
    wall: float
    cores: int
    memory: int
    machine: str
    kernel: str
    gpus: Gpus | None
    addresses: list[Address]
    reached_at: str | None
    rdma: bool
    logind: Logind | None
    home_is_network: bool
    login: dict[str, str]
