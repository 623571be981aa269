"""The shapes of what travels as JSON, for the type checker alone: nobody imports this file at run time.

What arrives is checked at the head's door (`clusterctl.door`), field by field; these are its shapes by name. Keys that
an older agent does not send are not required.
"""

from __future__ import annotations

from typing import Any, TypedDict


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


# --- answers, by the command that they are to (`Command`)


class WorkerFound(TypedDict, total=False):
    """A worker of the newest attempt, and whether its process lives."""

    rank: int
    local_rank: int
    pid: int
    start_time: int
    alive: bool


class Status(TypedDict, total=False):
    """What a node knows of a run. `state` is that of its journal, `remaining` what could not be ended."""

    supervisor: bool
    epoch: int | None
    attempt: int
    state: str
    seq: int
    workers: list[WorkerFound]
    remaining: list[dict[str, Any]]


class RunFound(TypedDict, total=False):
    """A run that a node has traces of. Times are the node's wall clock (seconds), `grace` is seconds."""

    run: str
    node: str
    name: str
    live: bool
    supervisor: bool
    state: str
    epoch: int | None
    attempt: int
    workdir: str | None
    grace: float | None
    gpus: list[int] | None
    started: float | None
    finished: float | None
    remaining: list[dict[str, Any]]


class Runs(TypedDict):
    """Every run of a node."""

    runs: list[RunFound]


class Routes(TypedDict):
    """The way to each address that was asked for; `None` where there is none."""

    routes: dict[str, Way | None]


class Listening(TypedDict):
    """The port on which a node now waits for its peers."""

    port: int


class Reached(TypedDict, total=False):
    """Whether a peer was reached, and what went through: bytes, and for how many seconds nothing moved (`still`)."""

    ok: bool | None
    ms: float | None
    error: str | None
    source: str | None
    payload: int | None
    sent: int | None
    received: int | None
    still: float | None


class Needed(TypedDict):
    """Numbers, in the manifest, of the files whose content a node lacks."""

    need: list[int]


class Received(TypedDict, total=False):
    """What a node has written of the code, and the hash of all that is there now."""

    written: int
    hash: str | None


class Fetched(TypedDict):
    """Path, size (bytes) and mode of each file that was sent."""

    files: list[tuple[str, int, int]]


class CheckpointFound(TypedDict):
    """A complete checkpoint: `mtime` and `size` (bytes) are of its newest file."""

    path: str
    mtime: float
    size: int


class Checkpoints(TypedDict, total=False):
    """Checkpoints that are complete, the newest first; time and size of every file, where that was asked for."""

    found: list[CheckpointFound]
    versions: list[tuple[float, int]]


class Code(TypedDict, total=False):
    """The hash of what syncs brought, or the hash of each source file that nobody synced."""

    hash: str | None
    files: dict[str, str]


class Ready(TypedDict, total=False):
    """What an attempt has been given on a node."""

    ports: list[int]
    run_dir: str
    python: str | None


class Piece(TypedDict, total=False):
    """A piece of a file (`data` in base64), and how much of it there is."""

    offset: int
    size: int
    first_valid: int | None
    data: str


class Evidence(TypedDict):
    """Where the ranks of a node are; see `agent.watch.evidence.collect`."""

    ranks: dict[str, dict[str, Any]]


class Cleaned(TypedDict):
    """Bytes that were freed."""

    bytes: int


class ProgramEnd(TypedDict, total=False):
    """How a program ended, and whether its time was over."""

    exit_code: int | None
    signal: int | None
    timed_out: bool


class Probed(TypedDict, total=False):
    """What a probe found, by group, and what was stuck."""

    groups: dict[str, dict[str, Any]]
    time: float
    stuck: list[dict[str, Any]]
