"""The shapes of what travels as JSON, for the type checker alone: nobody imports this file at run time.

What arrives is checked at the head's door (`clusterctl.door`), field by field; these are its shapes by name. Keys that
an older agent does not send are not required.
"""

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


class Spawn(TypedDict, total=False):
    """What a waiter writes down before its worker may run. Start times are in clock ticks since boot."""

    pid: int
    start_time: int
    waiter_pid: int
    waiter_start_time: int
    boot: str
    pid_ns: str


class Exit(TypedDict, total=False):
    """How a worker ended: `exit_code`, or `signal`, or neither where nobody was left to see it.

    It was alive at `earliest` and gone at `mono`, both of the node's monotonic clock (seconds).
    """

    exit_code: int | None
    signal: int | None
    earliest: float
    mono: float
    fenced: bool


class CheckpointFound(TypedDict):
    """A complete checkpoint: `mtime` and `size` (bytes) are of its newest file."""

    path: str
    mtime: float
    size: int
