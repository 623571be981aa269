"""JSON types of the commands of `commands.Command`: the arguments of each, and the answer of the node.

Only the type checker reads these classes. The head validates what arrives in `clusterctl.validation`, field by field.
An older agent may leave out the keys that are not required. The larger requests of a run are dataclasses (`requests`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.facts_types import FactsRequest
    from clusterctl.agent.protocol.process_types import SurvivingProcess


class GpuCount(TypedDict, total=False):
    """Which GPUs a machine has, as the kernel shows them: `count` is `None` where nobody can tell."""

    count: int | None
    indices: list[int]
    source: str
    vendor: str | None


class NetworkAddress(TypedDict, total=False):
    """One address of one interface."""

    interface: str
    address: str
    family: str
    up: bool
    loopback: bool


class Route(TypedDict):
    """By which address and interface packets to a peer leave."""

    source: str
    interface: str | None


class LogindSettings(TypedDict, total=False):
    """What logind does with the processes of a user who logs out."""

    linger: bool
    kill_user_processes: bool


class HelloAnswer(TypedDict, total=False):
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
    gpus: GpuCount | None
    addresses: list[NetworkAddress]
    reached_at: str | None
    rdma: bool
    logind: LogindSettings | None
    home_is_network: bool
    login: dict[str, str]


class NoArguments(TypedDict):
    """No arguments."""


class RunArguments(TypedDict):
    """A run, and which of its nodes this is."""

    run: str
    node: str


class RoutesArguments(TypedDict):
    """Addresses or names to which the way is wanted."""

    targets: list[str]


class ProbeArguments(TypedDict):
    """Run the facts as a worker would be run; `request` is what they read (`facts.Request`)."""

    python: str | None
    python_hint: NotRequired[str]
    prologue: str | None
    env: dict[str, str]
    cwd: str | None
    request: FactsRequest


class ListenArguments(TypedDict):
    """Wait `seconds` for peers that know the nonce, for `enough` of them; `payload` bytes are sent back to each."""

    port: int
    nonce: str
    seconds: float
    payload: NotRequired[int]
    enough: NotRequired[int]


class UnlistenArguments(TypedDict):
    """Free the port of the LISTEN with that nonce."""

    nonce: str


class ConnectArguments(TypedDict):
    """Reach a peer that listens; send `payload` bytes. `timeout` is in seconds."""

    address: str
    port: int
    nonce: str
    timeout: float
    payload: NotRequired[int]


class ManifestArguments(TypedDict):
    """Compare a workdir with the listing of `size` bytes that comes in `stream`; with `look` nothing is changed."""

    workdir: str
    run: str | None
    stream: int
    size: int
    look: NotRequired[bool]


class CopyArguments(TypedDict):
    """Files of the listing of `size` bytes in `stream` go to `target`, which is relative to `folder`.

    They go into it where it is a folder, or is to be one (`inside`); else it is the new name of the first part of
    their paths.
    """

    folder: str
    target: str
    inside: bool
    stream: int
    size: int


class ReceiveArguments(TypedDict):
    """Take in, from `stream`, the content of the files that the MANIFEST or COPY of that stream needed."""

    manifest: int
    stream: int


class FetchArguments(TypedDict):
    """Send the files that match, in `stream`; `links`: also those that links lead to.

    `of` is a run: files that have not changed since it began here are left out.
    """

    workdir: str
    pattern: str
    stream: int
    links: NotRequired[bool]
    of: NotRequired[RunArguments]


class CheckpointsArguments(TypedDict):
    """Name the complete checkpoints that match; `versions`: with time and size of every file.

    With `files` only that checkpoint is looked at, complete or not, and its files are named; `hashes`: with SHA-256.
    """

    workdir: str
    pattern: str | None
    versions: NotRequired[bool]
    files: NotRequired[str]
    hashes: NotRequired[bool]


class CodeArguments(TypedDict):
    """Hash what syncs brought to a workdir; `unsynced`: each source file there."""

    workdir: str
    unsynced: NotRequired[bool]


class ReadArguments(RunArguments):
    """A piece of a file of the run: `length` bytes from `offset` on."""

    file: str
    offset: int
    length: int


class ReplicatedArguments(RunArguments):
    """So many bytes of each file are safe on the head."""

    offsets: dict[str, int]


class CreditArguments(TypedDict):
    """So many more bytes of files may be sent."""

    bytes: int


class EvidenceArguments(RunArguments):
    """Look at the ranks, or at those named, for at most `deadline` seconds; the node keeps it under `name`."""

    name: str
    ranks: list[int] | None
    deadline: float


class FinishArguments(RunArguments):
    """The run has ended."""

    state: str
    exit_code: int


class ProgramArguments(TypedDict):
    """A program: `argv`, or `command` in a shell. Bytes of `stdin` that are no UTF-8 are escaped as surrogates.

    With `python_hint` it finds the programs beside the job's Python first (`Prepare` has the two).
    """

    argv: NotRequired[list[str]]
    command: NotRequired[str]
    env: NotRequired[dict[str, str]]
    cwd: NotRequired[str | None]
    prologue: NotRequired[str | None]
    python: NotRequired[str | None]
    python_hint: NotRequired[str]
    stdin: NotRequired[str]


class ExecArguments(ProgramArguments):
    """Run a program. What it writes comes in `stream`, and `stream` + 1; after `timeout` seconds it is ended."""

    timeout: NotRequired[float | None]
    stream: int


class TerminalArguments(ProgramArguments):
    """Run a program at a terminal of so many rows and columns; without `argv` the user's own shell.

    With `beside` it gets folder and environment of that rank, less what makes a process one of the run.
    """

    beside: NotRequired[RankArguments | None]
    term: str
    rows: int
    columns: int
    stream: int


class RankArguments(RunArguments):
    """A rank of the attempt that goes on."""

    rank: int


class ResizeArguments(TypedDict):
    """The terminal of that stream has another size."""

    stream: int
    rows: int
    columns: int


class TunnelArguments(TypedDict):
    """Connect to a port, as it is seen from the node."""

    host: str
    port: int
    stream: int


class TakenArguments(TypedDict):
    """So many more bytes may be sent in a stream that goes both ways."""

    stream: int
    bytes: int


class CancelArguments(TypedDict):
    """End the program that the EXEC of that id started."""

    id: int


class WorkerState(TypedDict, total=False):
    """A worker of the newest attempt, and whether its process lives."""

    rank: int
    local_rank: int
    pid: int
    start_time: int
    alive: bool


class StatusAnswer(TypedDict, total=False):
    """What a node knows of a run. `state` is that of its journal, `remaining` what could not be ended."""

    supervisor: bool
    epoch: int | None
    attempt: int
    state: str
    seq: int
    workers: list[WorkerState]
    remaining: list[SurvivingProcess]


class RunSummary(TypedDict, total=False):
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
    remaining: list[SurvivingProcess]


class RunsAnswer(TypedDict):
    """Every run of a node."""

    runs: list[RunSummary]


class RoutesAnswer(TypedDict):
    """The way to each address that was asked for; `None` where there is none."""

    routes: dict[str, Route | None]


class ListenAnswer(TypedDict):
    """The port on which a node now waits for its peers."""

    port: int


class ConnectAnswer(TypedDict, total=False):
    """Whether a peer was reached, and what went through: bytes, and for how many seconds nothing moved (`still`)."""

    ok: bool | None
    ms: float | None
    error: str | None
    source: str | None
    payload: int | None
    sent: int | None
    received: int | None
    still: float | None


class ManifestAnswer(TypedDict):
    """Numbers, in the manifest, of the files whose content a node lacks.

    Where it only looked, also how many files a sync would remove (`going`), the first of them (`gone`), and the live
    run under which all that would change.
    """

    need: list[int]
    going: NotRequired[int]
    gone: NotRequired[list[str]]
    user: NotRequired[str | None]


class CopyAnswer(ManifestAnswer):
    """The same of a listing that is copied into `folder`, with `name` as the first part of paths, where it is given."""

    folder: str
    name: str | None


class ReceiveAnswer(TypedDict, total=False):
    """What a node has written of the code, and the hash of all that is there now."""

    written: int
    hash: str | None


class FetchAnswer(TypedDict):
    """Path, size (bytes) and mode of each file that was sent."""

    files: list[tuple[str, int, int]]


class Checkpoint(TypedDict):
    """A complete checkpoint: `mtime` and `size` (bytes) are of its newest file."""

    path: str
    mtime: float
    size: int


class CheckpointFile(TypedDict):
    """A file of a checkpoint, named from the folder that holds the checkpoint; `sha256` is empty if not asked for."""

    name: str
    mtime: float
    size: int
    sha256: str


class CheckpointsAnswer(TypedDict, total=False):
    """Checkpoints that are complete, the newest first; where that was asked for time and size of every file.

    With these also whether other machines may see the files, by the kind of the file system (`network`). `files` are
    those of the one checkpoint that was asked for.
    """

    found: list[Checkpoint]
    versions: list[tuple[float, int]]
    network: bool
    files: list[CheckpointFile]


class CodeAnswer(TypedDict, total=False):
    """The hash of what syncs brought, or the hash of each source file that nobody synced."""

    hash: str | None
    files: dict[str, str]


class PrepareAnswer(TypedDict, total=False):
    """What an attempt has been given on a node."""

    ports: list[int]
    run_dir: str
    python: str | None


class ReadAnswer(TypedDict, total=False):
    """A piece of a file (`data` in base64), and how much of it there is."""

    offset: int
    size: int
    first_valid: int | None
    data: str


class CleanAnswer(TypedDict):
    """Bytes that were freed."""

    bytes: int


class ExecAnswer(TypedDict, total=False):
    """How a program ended, and whether its time was over."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
