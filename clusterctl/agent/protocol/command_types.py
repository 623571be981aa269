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
    """The GPUs of a machine as the kernel shows them: `count` is `None` if they cannot be counted."""

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
    """The source address and interface of packets to a peer."""

    source: str
    interface: str | None


class LogindSettings(TypedDict, total=False):
    """Whether logind ends the processes of a user who logs out."""

    linger: bool
    kill_user_processes: bool


class HelloAnswer(TypedDict, total=False):
    """The facts of a machine and its user at the first contact. Memory is in bytes, clocks are in seconds."""

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
    """A run, and the name that this node has in it."""

    run: str
    node: str


class RoutesArguments(TypedDict):
    """Ask for the routes to these addresses or names."""

    targets: list[str]


class ProbeArguments(TypedDict):
    """Collect health facts in the environment of a worker; `request` says which (`FactsRequest`)."""

    python: str | None
    python_hint: NotRequired[str]
    prologue: str | None
    env: dict[str, str]
    cwd: str | None
    request: FactsRequest


class ListenArguments(TypedDict):
    """Wait `seconds` for `enough` peers that know the nonce; each gets `payload` bytes back."""

    port: int
    nonce: str
    seconds: float
    payload: NotRequired[int]
    enough: NotRequired[int]


class UnlistenArguments(TypedDict):
    """Free the port of the LISTEN with this nonce."""

    nonce: str


class ConnectArguments(TypedDict):
    """Connect to a peer that listens and send `payload` bytes. `timeout` is in seconds."""

    address: str
    port: int
    nonce: str
    timeout: float
    payload: NotRequired[int]


class ManifestArguments(TypedDict):
    """Compare a workdir with the listing of `size` bytes that comes in `stream`; `look` changes nothing."""

    workdir: str
    run: str | None
    stream: int
    size: int
    look: NotRequired[bool]


class CopyArguments(TypedDict):
    """Copy the files of the listing of `size` bytes in `stream` to `target`, a path relative to `folder`.

    If `target` is a folder, or should become one (`inside`), the files go into it. Otherwise it is the new name for the
    first part of their paths.
    """

    folder: str
    target: str
    inside: bool
    stream: int
    size: int


class ReceiveArguments(TypedDict):
    """Receive from `stream` the files that the MANIFEST or COPY with the stream `manifest` needs."""

    manifest: int
    stream: int


class FetchArguments(TypedDict):
    """Send the matching files in `stream`; `links`: also the targets of links.

    `of` is a run: files that have not changed since its start on this node are left out.
    """

    workdir: str
    pattern: str
    stream: int
    links: NotRequired[bool]
    of: NotRequired[RunArguments]


class CheckpointsArguments(TypedDict):
    """Find the complete checkpoints that match; `versions`: with time and size of every file.

    With `files` only the files of that checkpoint are listed, complete or not; `hashes`: with their SHA-256.
    """

    workdir: str
    pattern: str | None
    versions: NotRequired[bool]
    files: NotRequired[str]
    hashes: NotRequired[bool]


class CodeArguments(TypedDict):
    """Hash the code that syncs wrote to a workdir; `unsynced`: hash each source file in it."""

    workdir: str
    unsynced: NotRequired[bool]


class ReadArguments(RunArguments):
    """Read `length` bytes of a file of the run from `offset` on."""

    file: str
    offset: int
    length: int


class ReplicatedArguments(RunArguments):
    """Report how many bytes of each file the head has stored safely."""

    offsets: dict[str, int]


class CreditArguments(TypedDict):
    """Allow so many more bytes of output."""

    bytes: int


class EvidenceArguments(RunArguments):
    """Collect evidence of some or all ranks within `deadline` seconds; the node stores it under `name`."""

    name: str
    ranks: list[int] | None
    deadline: float


class FinishArguments(RunArguments):
    """Tell the node that the run has ended."""

    state: str
    exit_code: int


class ProgramArguments(TypedDict):
    """A program: `argv`, or `command` for a shell. Bytes of `stdin` that are not UTF-8 are escaped as surrogates.

    With `python_hint`, the folder of the job's Python comes first on PATH (see `Prepare`).
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
    """Run a program. Its output comes in `stream`, its errors in `stream` + 1; after `timeout` seconds it is ended."""

    timeout: NotRequired[float | None]
    stream: int


class ShellScriptArguments(ProgramArguments):
    """Write a script for a terminal, with folder and environment of the program; without `argv` the user's shell.

    With `rank`, folder and environment are those of that rank, without the marks of the run.
    """

    rank: NotRequired[RankArguments | None]


class ShellScriptAnswer(TypedDict):
    """The script on the node. It removes itself."""

    path: str


class RankArguments(RunArguments):
    """A rank of the current attempt."""

    rank: int


class CancelArguments(TypedDict):
    """End the program that the EXEC with this id started."""

    id: int


class WorkerState(TypedDict, total=False):
    """A worker of the newest attempt, and whether it lives."""

    rank: int
    local_rank: int
    pid: int
    start_time: int
    alive: bool


class StatusAnswer(TypedDict, total=False):
    """The state of a run on a node: `state` from its journal, `remaining` the processes that could not be ended."""

    supervisor: bool
    epoch: int | None
    attempt: int
    state: str
    seq: int
    workers: list[WorkerState]
    remaining: list[SurvivingProcess]


class RunSummary(TypedDict, total=False):
    """A run with files or processes on a node. Times are the node's wall clock (seconds), `grace` is in seconds."""

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
    """All runs of a node."""

    runs: list[RunSummary]


class RoutesAnswer(TypedDict):
    """The route to each requested address; `None` if there is none."""

    routes: dict[str, Route | None]


class ListenAnswer(TypedDict):
    """The port on which the node now listens."""

    port: int


class ConnectAnswer(TypedDict, total=False):
    """Whether a peer was reached, the bytes that went through, and the seconds without progress (`still`)."""

    ok: bool | None
    ms: float | None
    error: str | None
    source: str | None
    payload: int | None
    sent: int | None
    received: int | None
    still: float | None


class ManifestAnswer(TypedDict):
    """The numbers of the files in the manifest that the node needs.

    With `look` also how many files a sync would remove (`going`), the first of them (`gone`), and the live run that
    uses
    the workdir (`user`).
    """

    need: list[int]
    going: NotRequired[int]
    gone: NotRequired[list[str]]
    user: NotRequired[str | None]


class CopyAnswer(ManifestAnswer):
    """The same for a listing that is copied into `folder`; if `name` is given, it replaces the first part of paths."""

    folder: str
    name: str | None


class ReceiveAnswer(TypedDict, total=False):
    """The bytes that the node has written, and the hash of all the code that is there now."""

    written: int
    hash: str | None


class FetchAnswer(TypedDict):
    """Path, size (bytes) and mode of each file that was sent."""

    files: list[tuple[str, int, int]]


class Checkpoint(TypedDict):
    """A complete checkpoint: `mtime` and `size` (bytes) are those of its newest file."""

    path: str
    mtime: float
    size: int


class CheckpointFile(TypedDict):
    """A file of a checkpoint, relative to the folder that holds the checkpoint; `sha256` is empty if not requested."""

    name: str
    mtime: float
    size: int
    sha256: str


class CheckpointsAnswer(TypedDict, total=False):
    """The complete checkpoints, the newest first; `versions` are time and size of every file.

    `network` says whether other machines may see the files, judged by the file system. `files` are those of the one
    checkpoint that was requested.
    """

    found: list[Checkpoint]
    versions: list[tuple[float, int]]
    network: bool
    files: list[CheckpointFile]


class CodeAnswer(TypedDict, total=False):
    """The hash of the synced code, or the hash of each source file."""

    hash: str | None
    files: dict[str, str]


class PrepareAnswer(TypedDict, total=False):
    """The resources of a prepared attempt."""

    ports: list[int]
    run_dir: str
    python: str | None


class ReadAnswer(TypedDict, total=False):
    """A piece of a file (`data` in base64), and the size of the file."""

    offset: int
    size: int
    first_valid: int | None
    data: str


class CleanAnswer(TypedDict):
    """The bytes that were freed."""

    bytes: int


class ExecAnswer(TypedDict, total=False):
    """The exit of a program, and whether its time was over."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
