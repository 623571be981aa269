"""JSON types of the commands of `commands.Command`: the arguments of each, and the answer of the node with its bounds.

The head derives the validators of answers from these classes; an agent never imports them. An older agent may leave out
the keys that are not required. The larger requests of a run are dataclasses (`requests`).
"""

from typing import Annotated

from typing_extensions import NotRequired, Required, TypedDict

from clusterctl.agent.protocol import wire_types
from clusterctl.agent.protocol.command_messages import FIRST_AGENT_STREAM, LOGIN_VARIABLES, MAX_LOGIN_VALUE_CHARS
from clusterctl.agent.protocol.record_types import SurvivingProcesses
from clusterctl.agent.protocol.validators import MaxItems, integer, string


class GpuCount(TypedDict, total=False):
    """The GPUs of a machine as the kernel shows them: `count` is `None` if they cannot be counted."""

    count: Annotated[int, integer(0, wire_types.MAX_DEVICES)] | None
    indices: Annotated[list[wire_types.GpuIndex], MaxItems(wire_types.MAX_DEVICES)]
    source: wire_types.Word
    vendor: wire_types.Word | None


class NetworkAddress(TypedDict, total=False):
    """One address of one interface."""

    interface: Required[wire_types.ShortText]
    address: Required[wire_types.Address]
    family: wire_types.Word
    up: bool
    loopback: bool


class Route(TypedDict):
    """The source address and interface of packets to a peer."""

    source: wire_types.Address
    interface: wire_types.ShortText | None


class LogindSettings(TypedDict, total=False):
    """Whether logind ends the processes of a user who logs out."""

    linger: bool
    kill_user_processes: bool


class HelloAnswer(TypedDict, total=False):
    """The facts of a machine and its user at the first contact. Memory is in bytes, clocks are in seconds."""

    protocol: Annotated[int, integer(0, 1 << 20)]
    version: wire_types.Word
    python: wire_types.Path | None
    python_version: wire_types.Word
    hostname: wire_types.Name
    boot_id: wire_types.Word
    pid_ns: wire_types.Word
    net_ns: wire_types.Word
    uid: Annotated[int, integer(0, 1 << 32)]
    user: wire_types.Name
    home: wire_types.Path | None
    shell: wire_types.Path | None
    state_root: wire_types.Path | None
    mono: float
    wall: float
    cores: Annotated[int, integer(1, 1 << 20)]
    memory: wire_types.Bytes
    machine: wire_types.Word
    kernel: wire_types.Word
    gpus: GpuCount | None
    addresses: Annotated[list[NetworkAddress], MaxItems(4096)]
    reached_at: wire_types.Address | None
    rdma: bool
    logind: LogindSettings | None
    home_is_network: bool
    login: Annotated[
        dict[wire_types.ShortText, Annotated[str, string(MAX_LOGIN_VALUE_CHARS)]], MaxItems(len(LOGIN_VARIABLES))
    ]


class Preamble(TypedDict):
    """What the bootstrap script reports before the first frame."""

    python: wire_types.Path
    version: wire_types.ShortText


class NoArguments(TypedDict):
    """No arguments."""


class RunArguments(TypedDict):
    """A run, and the name that this node has in it."""

    run: str
    node: str


class RoutesArguments(TypedDict):
    """Ask for the routes to these addresses or names."""

    targets: list[str]


class FactsRequest(TypedDict, total=False):
    """The facts to collect (`groups`; default all), and what the collectors must know. Deadlines are in seconds."""

    groups: list[str] | None
    deadline: float
    deadlines: dict[str, float]
    workdir: str | None
    mounts: list[str]
    peers: dict[str, str]
    ports: list[int]
    expect_gpus: bool
    checkpoints: str | None
    node: str
    run: str | None
    salt: str
    root: str
    paths: list[str]


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
    """Hash the code that syncs wrote to a workdir."""

    workdir: str


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


class RankArguments(RunArguments):
    """A rank of the current attempt."""

    rank: int


class ShellScriptArguments(ProgramArguments):
    """Write a script for a terminal, with folder and environment of the program; without `argv` the user's shell.

    With `rank`, folder and environment are those of that rank, without the marks of the run.
    """

    rank: NotRequired[RankArguments | None]


class ShellScriptAnswer(TypedDict):
    """The script on the node. It removes itself."""

    path: wire_types.WatchedPath


class CancelArguments(TypedDict):
    """End the program that the EXEC with this id started."""

    id: int


class WorkerState(TypedDict):
    """A worker of the newest attempt, and whether it lives."""

    rank: wire_types.Rank
    local_rank: NotRequired[wire_types.Rank]
    pid: wire_types.Pid
    start_time: wire_types.StartTime
    alive: bool


class StatusAnswer(TypedDict):
    """The state of a run on a node: `state` from its journal, `remaining` the processes that could not be ended."""

    supervisor: bool
    epoch: wire_types.Epoch | None
    attempt: wire_types.Attempt
    state: wire_types.Word
    seq: NotRequired[wire_types.Seq]
    workers: Annotated[list[WorkerState], MaxItems(4096)]
    remaining: SurvivingProcesses


class RunSummary(TypedDict, total=False):
    """A run with files or processes on a node. Times are the node's wall clock (seconds), `grace` is in seconds."""

    run: Required[wire_types.Name]
    node: wire_types.Name
    name: wire_types.Name
    live: Required[bool]
    supervisor: bool
    state: wire_types.Word
    epoch: wire_types.Epoch | None
    attempt: wire_types.Attempt
    workdir: wire_types.Path | None
    grace: wire_types.NonNegative | None
    gpus: Annotated[list[wire_types.GpuIndex], MaxItems(wire_types.MAX_DEVICES)] | None
    started: float | None
    finished: float | None
    remaining: SurvivingProcesses


class RunsAnswer(TypedDict):
    """All runs of a node."""

    runs: Annotated[list[RunSummary], MaxItems(100_000)]


class RoutesAnswer(TypedDict):
    """The route to each requested address; `None` if there is none."""

    routes: Annotated[dict[Annotated[str, string(256)], Route | None], MaxItems(65536)]


class FactGroup(TypedDict, total=False):
    """One group of facts: `data`, the `status` of its collection, the `reason` of a failure, and the duration `ms`.

    If the collector hung, also its process: pid, state, kernel function, and whether even SIGKILL did not end it.
    """

    status: Required[wire_types.Word]
    reason: wire_types.Reason | None
    data: wire_types.Data
    ms: float | None
    pid: wire_types.Pid
    state: wire_types.ProcessFlags | None
    wchan: wire_types.Name | None
    abandoned: bool


class StuckProcess(TypedDict, total=False):
    """A process of the probe that cannot be ended."""

    group: wire_types.Word
    pid: wire_types.Pid
    state: wire_types.ProcessFlags | None
    wchan: wire_types.Name | None


class Facts(TypedDict, total=False):
    """All groups of facts, and the processes that hang; `time` is the wall clock (seconds), `ms` the duration."""

    schema: int
    ms: float
    groups: Required[Annotated[dict[wire_types.Word, FactGroup], MaxItems(256)]]
    time: float
    stuck: Annotated[list[StuckProcess], MaxItems(256)]


class ListenAnswer(TypedDict):
    """The port on which the node now listens."""

    port: wire_types.Port


class ConnectAnswer(TypedDict, total=False):
    """Whether a peer was reached, the bytes that went through, and the seconds without progress (`still`)."""

    ok: Required[bool | None]
    ms: float | None
    error: wire_types.LongText | None
    source: wire_types.Address | None
    payload: wire_types.Bytes | None
    sent: wire_types.Bytes | None
    received: wire_types.Bytes | None
    still: float | None


class ManifestAnswer(TypedDict):
    """The numbers of the files in the manifest that the node needs.

    With `look` also how many files a sync would remove (`going`), the first of them (`gone`), and the live run that
    uses the workdir (`user`). Without it the first needed files that something on the node has changed (`edited`).
    """

    need: Annotated[list[wire_types.FileNumber], MaxItems(1 << 22)]
    edited: NotRequired[Annotated[list[wire_types.Path], MaxItems(100)]]
    going: NotRequired[int]
    gone: NotRequired[Annotated[list[wire_types.Path], MaxItems(100)]]
    user: NotRequired[wire_types.Name | None]


class CopyAnswer(TypedDict):
    """The numbers of the files in the listing that the node needs, and the folder that gets them.

    If `name` is given, it replaces the first part of each path.
    """

    need: Annotated[list[wire_types.FileNumber], MaxItems(1 << 22)]
    folder: wire_types.Path
    name: wire_types.Path | None


class ReceiveAnswer(TypedDict, total=False):
    """The bytes that the node has written, and the hash of all the code that is there now."""

    written: int
    hash: wire_types.Digest | None


class FetchAnswer(TypedDict):
    """Path, size (bytes) and mode of each file that was sent."""

    files: Annotated[
        list[tuple[wire_types.Path, wire_types.Bytes, Annotated[int, integer(0, 1 << 16)]]], MaxItems(1 << 20)
    ]


class Checkpoint(TypedDict):
    """A complete checkpoint: `mtime` and `size` (bytes) are those of its newest file."""

    path: wire_types.Path
    mtime: float
    size: NotRequired[wire_types.Bytes]


class CheckpointFile(TypedDict):
    """A file of a checkpoint, relative to the folder that holds the checkpoint; `sha256` is empty if not requested."""

    name: wire_types.Path
    mtime: float
    size: wire_types.Bytes
    sha256: wire_types.Digest


class CheckpointsAnswer(TypedDict, total=False):
    """The complete checkpoints, the newest first; `versions` are time and size of every file.

    `network` says whether other machines may see the files, judged by the file system. `files` are those of the one
    checkpoint that was requested.
    """

    found: Required[Annotated[list[Checkpoint], MaxItems(5000)]]
    versions: Annotated[list[tuple[float, wire_types.Bytes]], MaxItems(1 << 20)]
    network: bool
    files: Annotated[list[CheckpointFile], MaxItems(1 << 17)]


class CodeAnswer(TypedDict, total=False):
    """The hash of the synced code, or the hash of each source file."""

    hash: wire_types.Digest | None
    files: Annotated[dict[wire_types.Path, wire_types.Digest], MaxItems(1 << 18)]


class PrepareAnswer(TypedDict, total=False):
    """The resources of a prepared attempt."""

    ports: Required[Annotated[list[wire_types.Port], MaxItems(1024)]]
    run_dir: wire_types.Path
    python: wire_types.Path | None


class ReadAnswer(TypedDict):
    """A piece of a file (`data` in base64), and the size of the file."""

    offset: wire_types.Bytes
    size: wire_types.Bytes
    first_valid: NotRequired[wire_types.Bytes | None]
    data: wire_types.FileData


class CleanAnswer(TypedDict):
    """The bytes that were freed."""

    bytes: wire_types.Bytes


class ExecAnswer(TypedDict):
    """The exit of a program, and whether its time was over."""

    exit_code: wire_types.ProgramExitCode | None
    signal: wire_types.Signal | None
    timed_out: NotRequired[bool]


class NoAnswer(TypedDict):
    """An answer without values."""


class ErrorAnswer(TypedDict):
    """The error with which a node refuses a command."""

    kind: wire_types.Word
    message: Annotated[str, string(1 << 20)]
    hint: NotRequired[Annotated[str, string(1 << 20)] | None]


class HeartbeatAnswer(TypedDict):
    """The clocks of a node (seconds) and its boot id, for the heartbeat of this number."""

    beat: int
    wall: float
    mono: float
    boot: wire_types.Word


class EventPush(TypedDict):
    """An event of a run's journal; `events` has its types."""

    run: wire_types.Name
    event: NoAnswer


class StreamPush(TypedDict):
    """The file of a run that a stream of the agent carries."""

    run: wire_types.Name
    file: wire_types.ShortText
    stream: Annotated[int, integer(FIRST_AGENT_STREAM, (FIRST_AGENT_STREAM << 1) - 1)]


class AttemptsReplicatedPush(TypedDict):
    """The head has everything of the attempts below `before`."""

    run: wire_types.Name
    before: Annotated[int, integer(0, 1 << 31)]
