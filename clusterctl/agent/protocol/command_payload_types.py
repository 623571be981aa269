"""JSON types of the commands in `command_messages.Command`: the arguments, and the answer of the node with its bounds.

The head derives the validators of answers from these classes; an agent never imports them at run time. An older agent
may omit the keys that are not required. `run_requests` has the arguments of PREPARE, START, STOP and FOLLOW.
"""

from typing import Annotated

from typing_extensions import NotRequired, Required, TypedDict

from clusterctl.agent.protocol import wire_types
from clusterctl.agent.protocol.command_messages import FIRST_AGENT_STREAM, LOGIN_VARIABLES, MAX_LOGIN_VALUE_CHARS
from clusterctl.agent.protocol.record_types import RankProfile, SurvivingProcesses
from clusterctl.agent.protocol.validators import MaxItems, integer, string


class GpuCount(TypedDict, total=False):
    """The GPUs of a machine that the kernel shows. `count` is `None` if the GPUs cannot be counted."""

    count: Annotated[int, integer(0, wire_types.MAX_DEVICES)] | None
    indices: Annotated[list[wire_types.GpuIndex], MaxItems(wire_types.MAX_DEVICES)]
    source: wire_types.Word
    vendor: wire_types.Word | None


class NetworkAddress(TypedDict, total=False):
    """An IP address of a network interface."""

    interface: Required[wire_types.ShortText]
    address: Required[wire_types.Address]
    family: wire_types.Word
    up: bool
    loopback: bool


class Route(TypedDict):
    """The source address and the interface of packets to a peer."""

    source: wire_types.Address
    interface: wire_types.ShortText | None


class LogindSettings(TypedDict, total=False):
    """The settings by which logind ends or keeps the processes of a user who logs out."""

    linger: bool
    kill_user_processes: bool


class HelloAnswer(TypedDict, total=False):
    """The facts about a machine and its user that the node sends in the handshake.

    `memory` is in bytes, `mono` and `wall` are in seconds.
    """

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
    libc: wire_types.Word
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
    """The Python that the bootstrap script reports before the first frame."""

    python: wire_types.Path
    version: wire_types.ShortText


class NoArguments(TypedDict):
    """The arguments of a command that needs none."""


class RunArguments(TypedDict):
    """The id of a run, and the name of this node in the run."""

    run: str
    node: str


class RoutesArguments(TypedDict):
    """ROUTES: find the route to each of these addresses or host names."""

    targets: list[str]


class FactsRequest(TypedDict, total=False):
    """The groups of facts to collect (`groups`; by default all), and the parameters of the collectors.

    Deadlines are in seconds.
    """

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


class Container(TypedDict):
    """A container of the workers (`environment.container`)."""

    image: str
    runtime: str
    args: list[str]
    mounts: list[str]


class ProbeArguments(TypedDict):
    """PROBE: collect the facts that `request` names, in the environment of a worker and in its container."""

    python: str | None
    python_hint: NotRequired[str]
    prologue: str | None
    env: dict[str, str]
    cwd: str | None
    request: FactsRequest
    container: NotRequired[Container | None]


class ListenArguments(TypedDict):
    """LISTEN: listen for `seconds`, or until `enough` peers have sent the nonce. Send `payload` bytes to each peer."""

    port: int
    nonce: str
    seconds: float
    payload: NotRequired[int]
    enough: NotRequired[int]


class UnlistenArguments(TypedDict):
    """UNLISTEN: end the LISTEN that has this nonce, and free the port."""

    nonce: str


class ConnectArguments(TypedDict):
    """CONNECT: connect to a peer that listens, and send `payload` bytes. `timeout` is in seconds."""

    address: str
    port: int
    nonce: str
    timeout: float
    payload: NotRequired[int]


class AnswersArguments(TypedDict):
    """ANSWERS: connect to a server, and send a GET for `http` if it is a path. `timeout` is in seconds."""

    address: str
    port: int
    http: str | None
    timeout: float


class ManifestArguments(TypedDict):
    """MANIFEST: compare a workdir with the file list of `size` bytes that follows in `stream`.

    With `look` the node only reports the differences, and neither reserves nor changes anything.
    """

    workdir: str
    run: str | None
    stream: int
    size: int
    look: NotRequired[bool]


class CopyArguments(TypedDict):
    """COPY: copy the files in the file list of `size` bytes in `stream` to `target`, a path relative to `folder`.

    If `target` is a folder, or `inside` asks for a folder, the node writes the files into `target`. Otherwise `target`
    replaces the first part of each path. With `look` the node only compares, and makes no folder.
    """

    folder: str
    target: str
    inside: bool
    stream: int
    size: int
    look: NotRequired[bool]


class ReceiveArguments(TypedDict):
    """RECEIVE: receive in `stream` the files that the MANIFEST or COPY with the stream `manifest` has asked for."""

    manifest: int
    stream: int


class CastArguments(TypedDict):
    """CAST: start a peer for the files that the MANIFEST or COPY with the stream `manifest` has compared.

    The plan of the cast (`CastPlan`) has `size` bytes and follows in `stream`. After the answer, `stream` carries the
    messages of `pieces` in both directions, and `stream` + 1 carries the reports of the peer (`PeerReport`).
    """

    manifest: int
    stream: int
    size: int


class ContentsArguments(TypedDict):
    """CONTENTS: hash the files that match `pattern`, relative to `workdir`. `stream` brings the answer's data."""

    workdir: str
    pattern: str
    stream: int


class FetchArguments(TypedDict):
    """FETCH: send in `stream` the files that match `pattern`; with `links` also the targets of symbolic links.

    With the run `of`, send only the files that have changed since the run started on this node.
    """

    workdir: str
    pattern: str
    stream: int
    links: NotRequired[bool]
    of: NotRequired[RunArguments]


class CheckpointsArguments(TypedDict):
    """CHECKPOINTS: find the complete checkpoints that match `pattern`.

    With `versions` also list the time and size of every file.

    With `files` list only the files of this checkpoint, even if it is incomplete. With `hashes` add each SHA-256.
    """

    workdir: str
    pattern: str | None
    versions: NotRequired[bool]
    files: NotRequired[str]
    hashes: NotRequired[bool]


class CodeArguments(TypedDict):
    """CODE: hash the files that syncs have written to a workdir."""

    workdir: str


class EnvironmentArguments(TypedDict):
    """ENVIRONMENT: look in the `folder` of environments for the entries `names`, and for a Python of version `python`.

    With `link`, let this name lead to the first entry. With `url`, also connect to its host. With `max_size`, first
    remove other entries beyond this size in bytes.
    """

    folder: str
    names: list[str]
    link: NotRequired[str]
    python: NotRequired[str]
    url: NotRequired[str]
    max_size: NotRequired[int]


class QueueArguments(RunArguments):
    """QUEUE: look at who holds GPUs and waits for them; with `number`, wait with this ticket; with `claim`, claim them.

    Without a number, the node removes the ticket and the claims of this session. `name` and `head` describe the run.
    """

    gpus: list[int]
    number: int | None
    claim: bool
    name: str
    head: str


class ReserveArguments(TypedDict):
    """RESERVE: hold GPUs for `seconds`, in place of the earlier reservations of this user and `head`; 0 ends these."""

    node: str
    gpus: list[int]
    seconds: float
    name: str
    head: str
    note: str


class ReadArguments(RunArguments):
    """READ: read `length` bytes of a file of the run, from `offset` on."""

    file: str
    offset: int
    length: int


class ReplicatedArguments(RunArguments):
    """REPLICATED: the number of bytes of each file that the head has stored on disk."""

    offsets: dict[str, int]


class CreditArguments(TypedDict):
    """CREDIT: allow the node to send `bytes` more bytes of output."""

    bytes: int


class EvidenceArguments(RunArguments):
    """EVIDENCE: collect the evidence of the ranks in `ranks` (`None`: of all ranks) within `deadline` seconds.

    The node stores the evidence in a folder called `name`.
    """

    name: str
    ranks: list[int] | None
    deadline: float


class ProfileArguments(RunArguments):
    """PROFILE: record what the ranks do for `seconds`."""

    ranks: list[int]
    seconds: float


class ProfileAnswer(TypedDict):
    """The profile of each rank; `folder` is the folder with the files on the node."""

    folder: wire_types.Path
    ranks: Annotated[dict[wire_types.Digits, RankProfile], MaxItems(4096)]


class FinishArguments(RunArguments):
    """FINISH: end the run on the node, and store the final state and exit code of the run."""

    state: str
    exit_code: int


class ProgramArguments(TypedDict):
    """A program: `argv`, or `command` for a shell. Bytes of `stdin` that are not UTF-8 are escaped as surrogates.

    With `python_hint`, the folder of the job's Python comes first on PATH (see `PrepareArguments`). With
    `agent_command`, the program is this command of the agent (see `clusterctl/agent/__main__.py`). With `container`, it
    runs in a container of its own.
    """

    argv: NotRequired[list[str]]
    command: NotRequired[str]
    env: NotRequired[dict[str, str]]
    cwd: NotRequired[str | None]
    prologue: NotRequired[str | None]
    python: NotRequired[str | None]
    python_hint: NotRequired[str]
    stdin: NotRequired[str]
    agent_command: NotRequired[str]
    container: NotRequired[Container | None]


class ExecArguments(ProgramArguments):
    """EXEC: run a program for at most `timeout` seconds. `stream` carries stdout, and `stream` + 1 carries stderr."""

    timeout: NotRequired[float | None]
    stream: int


class RankArguments(RunArguments):
    """A rank of the current attempt."""

    rank: int


class WriteScriptArguments(ProgramArguments):
    """SHELL_SCRIPT: write a script that runs the program in a terminal, in the folder `cwd` with the environment `env`.

    Without `argv` the script runs the user's shell. With `rank` the script uses the folder and the environment of this
    rank, without the marks of the run.
    """

    rank: NotRequired[RankArguments | None]


class ShellScriptAnswer(TypedDict):
    """The path of the script on the node. The script removes itself when it runs."""

    path: wire_types.WatchedPath


class CancelArguments(TypedDict):
    """CANCEL: end the program that the EXEC with this id started."""

    id: int


class WorkerState(TypedDict):
    """A worker of the newest attempt. `alive` is true if the process of the worker still runs."""

    rank: wire_types.Rank
    local_rank: NotRequired[wire_types.Rank]
    pid: wire_types.Pid
    start_time: wire_types.StartTime
    alive: bool


class StatusAnswer(TypedDict):
    """The state of a run on a node.

    `state` comes from the journal. `remaining` are the processes that the node could not end.
    """

    supervisor: bool
    epoch: wire_types.Epoch | None
    attempt: wire_types.Attempt
    state: wire_types.Word
    seq: NotRequired[wire_types.Seq]
    workers: Annotated[list[WorkerState], MaxItems(4096)]
    remaining: SurvivingProcesses


class RunSummary(TypedDict, total=False):
    """A run that has files or processes on a node.

    Times are on the node's wall clock (seconds), and `grace` is in seconds.
    """

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
    """All runs that have files or processes on a node."""

    runs: Annotated[list[RunSummary], MaxItems(100_000)]


class RoutesAnswer(TypedDict):
    """The route to each requested address, or `None` if the node has no route to this address."""

    routes: Annotated[dict[Annotated[str, string(256)], Route | None], MaxItems(65536)]


class FactGroup(TypedDict, total=False):
    """The facts of one group (`data`), the status of the collection, the reason of a failure, and the duration `ms`.

    If the collector hung, `pid`, `state` and `wchan` (kernel function) describe its process. `abandoned` is true if
    SIGKILL did not end this process.
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
    """A process of the probe that hangs and that SIGKILL did not end."""

    group: wire_types.Word
    pid: wire_types.Pid
    state: wire_types.ProcessFlags | None
    wchan: wire_types.Name | None


class Facts(TypedDict, total=False):
    """All groups of facts, and the processes that hang. `time` is the wall clock (seconds), `ms` is the duration."""

    schema: int
    ms: float
    groups: Required[Annotated[dict[wire_types.Word, FactGroup], MaxItems(256)]]
    time: float
    stuck: Annotated[list[StuckProcess], MaxItems(256)]


class ListenAnswer(TypedDict):
    """The port on which the node listens."""

    port: wire_types.Port


class ConnectAnswer(TypedDict, total=False):
    """The result of a connection to a peer: success, duration, the bytes sent and received.

    `still` are the seconds without progress before the end of the transfer.
    """

    ok: Required[bool | None]
    ms: float | None
    error: wire_types.LongText | None
    source: wire_types.Address | None
    payload: wire_types.Bytes | None
    sent: wire_types.Bytes | None
    received: wire_types.Bytes | None
    still: float | None


class AnswersAnswer(TypedDict):
    """Why the server does not answer; `None` if it does."""

    error: wire_types.LongText | None


class ManifestAnswer(TypedDict):
    """The files that the node needs, as indices in the file list.

    With `look`, `going` is the number of files that a sync would remove, `gone` has the first of these files, and
    `user` is the live run that uses the workdir. Without `look`, `edited` has the first files that this sync overwrites
    although they have changed on the node since the last sync.
    """

    need: Annotated[list[wire_types.FileNumber], MaxItems(1 << 22)]
    edited: NotRequired[Annotated[list[wire_types.Path], MaxItems(100)]]
    going: NotRequired[int]
    gone: NotRequired[Annotated[list[wire_types.Path], MaxItems(100)]]
    user: NotRequired[wire_types.Name | None]


class CopyAnswer(TypedDict):
    """The files that the node needs, as indices in the file list, and the folder into which the node writes them.

    `name`, if it is given, replaces the first part of each path.
    """

    need: Annotated[list[wire_types.FileNumber], MaxItems(1 << 22)]
    folder: wire_types.Path
    name: wire_types.Path | None


class ContentsAnswer(TypedDict):
    """The bytes of the file list in the stream. The SHA-256 of each piece of the contents follows the list."""

    listing: wire_types.Bytes


class CastAnswer(TypedDict):
    """The port of the peer (0: it does not listen), or in `busy` the id of another cast that uses the folder."""

    port: wire_types.Port
    busy: NotRequired[wire_types.Name]


class EnvironmentAnswer(TypedDict):
    """The complete entries among the requested ones, and the path of a Python of the requested version, or `None`.

    Nodes with the same `id` share the folder. `free`, `size` and `removed` are in bytes.
    """

    id: wire_types.ShortText
    made: Annotated[list[wire_types.Name], MaxItems(64)]
    python: wire_types.Path | None
    reachable: bool
    free: wire_types.Bytes
    size: wire_types.Bytes
    removed: wire_types.Bytes


class QueueAnswer(TypedDict):
    """The holders of wanted GPUs (sentences), the runs ahead in the line, and the highest number of all tickets."""

    holders: Annotated[list[wire_types.Name], MaxItems(1024)]
    ahead: Annotated[list[wire_types.Name], MaxItems(1024)]
    highest: wire_types.Count


class ReserveAnswer(TypedDict):
    """How many earlier reservations have ended."""

    ended: wire_types.Count


class ReceiveAnswer(TypedDict, total=False):
    """The number of bytes that the node has written, and the hash of all synced code after the transfer."""

    written: int
    hash: wire_types.Digest | None


class FetchAnswer(TypedDict):
    """The path, size (bytes) and mode of each file that the node has sent."""

    files: Annotated[
        list[tuple[wire_types.Path, wire_types.Bytes, Annotated[int, integer(0, 1 << 16)]]], MaxItems(1 << 20)
    ]


class Checkpoint(TypedDict):
    """A complete checkpoint, with the modification time and the size (bytes) of its newest file."""

    path: wire_types.Path
    mtime: float
    size: NotRequired[wire_types.Bytes]


class CheckpointFile(TypedDict):
    """A file of a checkpoint. `name` is relative to the parent folder; `sha256` is empty if no hash was requested."""

    name: wire_types.Path
    mtime: float
    size: wire_types.Bytes
    sha256: wire_types.Digest


class CheckpointsAnswer(TypedDict, total=False):
    """The complete checkpoints with the newest first, and in `versions` the time and size of every file.

    `network` is true if the files lie on a network file system, so other machines may see them. `files` has the files
    of the requested checkpoint.
    """

    found: Required[Annotated[list[Checkpoint], MaxItems(5000)]]
    versions: Annotated[list[tuple[float, wire_types.Bytes]], MaxItems(1 << 20)]
    network: bool
    files: Annotated[list[CheckpointFile], MaxItems(1 << 17)]


class CodeAnswer(TypedDict, total=False):
    """The hash of the synced code; without a sync, the hash of each source file."""

    hash: wire_types.Digest | None
    files: Annotated[dict[wire_types.Path, wire_types.Digest], MaxItems(1 << 18)]


class PrepareAnswer(TypedDict, total=False):
    """The ports, the run directory and the interpreter of a prepared attempt."""

    ports: Required[Annotated[list[wire_types.Port], MaxItems(1024)]]
    run_dir: wire_types.Path
    python: wire_types.Path | None


class ReadAnswer(TypedDict):
    """A part of a file (`data` in base64), and the size of the file."""

    offset: wire_types.Bytes
    size: wire_types.Bytes
    first_valid: NotRequired[wire_types.Bytes | None]
    data: wire_types.FileData


class CleanAnswer(TypedDict):
    """The number of bytes on disk that the node has freed."""

    bytes: wire_types.Bytes


class ExecAnswer(TypedDict):
    """The exit code or the signal of a program. `timed_out` is true if the time limit ended the program."""

    exit_code: wire_types.ProgramExitCode | None
    signal: wire_types.Signal | None
    timed_out: NotRequired[bool]


class EmptyAnswer(TypedDict):
    """An answer without fields."""


class ErrorAnswer(TypedDict):
    """The error that a node sends instead of an answer."""

    kind: wire_types.Word
    message: Annotated[str, string(1 << 20)]
    hint: NotRequired[Annotated[str, string(1 << 20)] | None]


class PeerReport(TypedDict, total=False):
    """News of a peer: the neighbours that it uses, cannot reach, or has caught with wrong bytes; bytes of pieces.

    With `installed`, the files are in place. With `error`, the peer has failed. With `ended`, its process is gone.
    """

    installed: bool
    ended: bool
    error: ErrorAnswer
    reached: Annotated[int, integer(0, 1 << 20)]
    unreached: Annotated[list[wire_types.FileNumber], MaxItems(1 << 16)]
    liars: Annotated[list[wire_types.FileNumber], MaxItems(1 << 16)]
    received: wire_types.Bytes
    sent: wire_types.Bytes


class HeartbeatAnswer(TypedDict):
    """The clocks of a node (seconds) and its boot id, in the answer to heartbeat number `beat`."""

    beat: int
    wall: float
    mono: float
    boot: wire_types.Word


class EventPush(TypedDict):
    """An event of a run's journal; the module `events` has the types of events."""

    run: wire_types.Name
    event: EmptyAnswer


class StreamPush(TypedDict):
    """The announcement that a stream of the agent carries a file of a run."""

    run: wire_types.Name
    file: wire_types.ShortText
    stream: Annotated[int, integer(FIRST_AGENT_STREAM, (FIRST_AGENT_STREAM << 1) - 1)]


class AttemptsSentPush(TypedDict):
    """The announcement that the node has sent all its data of the attempts below `before`."""

    run: wire_types.Name
    before: Annotated[int, integer(0, 1 << 31)]
