"""What a node answers, by the command that it is to (`Command`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.machine import Way
    from clusterctl.agent.protocol.types.records import Survivor


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
    remaining: list[Survivor]


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
    remaining: list[Survivor]


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
    """Numbers, in the manifest, of the files whose content a node lacks.

    Where it only looked, also how many files a sync would remove (`going`), the first of them (`gone`), and the live
    run under which all that would change.
    """

    need: list[int]
    going: NotRequired[int]
    gone: NotRequired[list[str]]
    user: NotRequired[str | None]


class Lacking(Needed):
    """The same of a listing that is copied into `folder`, with `name` as the first part of paths, where it is given."""

    folder: str
    name: str | None


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


class CheckpointFile(TypedDict):
    """A file of a checkpoint, named from the folder that holds the checkpoint; `sha256` is empty if not asked for."""

    name: str
    mtime: float
    size: int
    sha256: str


class Checkpoints(TypedDict, total=False):
    """Checkpoints that are complete, the newest first; where that was asked for time and size of every file.

    With these also whether other machines may see the files, by the kind of the file system (`network`). `files` are
    those of the one checkpoint that was asked for.
    """

    found: list[CheckpointFound]
    versions: list[tuple[float, int]]
    network: bool
    files: list[CheckpointFile]


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


class Cleaned(TypedDict):
    """Bytes that were freed."""

    bytes: int


class ProgramEnd(TypedDict, total=False):
    """How a program ended, and whether its time was over."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
