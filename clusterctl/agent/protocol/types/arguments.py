"""What a node is asked, by command; what a run asks of it are the dataclasses of `agent.protocol.requests`."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.facts import Request


class Nothing(TypedDict):
    """No arguments."""


class OfRun(TypedDict):
    """A run, and which of its nodes this is."""

    run: str
    node: str


class Routes(TypedDict):
    """Addresses or names to which the way is wanted."""

    targets: list[str]


class Probe(TypedDict):
    """Run the facts as a worker would be run; `request` is what they read (`facts.Request`)."""

    python: str | None
    python_hint: NotRequired[str]
    prologue: str | None
    env: dict[str, str]
    cwd: str | None
    request: Request


class Listen(TypedDict):
    """Wait `seconds` for peers that know the nonce, for `enough` of them; `payload` bytes are sent back to each."""

    port: int
    nonce: str
    seconds: float
    payload: NotRequired[int]
    enough: NotRequired[int]


class Unlisten(TypedDict):
    """Free the port of the LISTEN with that nonce."""

    nonce: str


class Connect(TypedDict):
    """Reach a peer that listens; send `payload` bytes. `timeout` is in seconds."""

    address: str
    port: int
    nonce: str
    timeout: float
    payload: NotRequired[int]


class Manifest(TypedDict):
    """Compare a workdir with the listing of `size` bytes that comes in `stream`; with `look` nothing is changed."""

    workdir: str
    run: str | None
    stream: int
    size: int
    look: NotRequired[bool]


class Copy(TypedDict):
    """Files of the listing of `size` bytes in `stream` go to `target`, which is relative to `folder`.

    They go into it where it is a folder, or is to be one (`inside`); else it is the new name of the first part of
    their paths.
    """

    folder: str
    target: str
    inside: bool
    stream: int
    size: int


class Receive(TypedDict):
    """Take in, from `stream`, the content of the files that the MANIFEST or COPY of that stream needed."""

    manifest: int
    stream: int


class Fetch(TypedDict):
    """Send the files that match, in `stream`; `links`: also those that links lead to.

    `of` is a run: files that have not changed since it began here are left out.
    """

    workdir: str
    pattern: str
    stream: int
    links: NotRequired[bool]
    of: NotRequired[OfRun]


class Checkpoints(TypedDict):
    """Name the complete checkpoints that match; `versions`: with time and size of every file.

    With `files` only that checkpoint is looked at, complete or not, and its files are named; `hashes`: with SHA-256.
    """

    workdir: str
    pattern: str | None
    versions: NotRequired[bool]
    files: NotRequired[str]
    hashes: NotRequired[bool]


class Code(TypedDict):
    """Hash what syncs brought to a workdir; `unsynced`: each source file there."""

    workdir: str
    unsynced: NotRequired[bool]


class Read(OfRun):
    """A piece of a file of the run: `length` bytes from `offset` on."""

    file: str
    offset: int
    length: int


class Replicated(OfRun):
    """So many bytes of each file are safe on the head."""

    offsets: dict[str, int]


class Credit(TypedDict):
    """So many more bytes of files may be sent."""

    bytes: int


class Evidence(OfRun):
    """Look at the ranks, or at those named, for at most `deadline` seconds; the node keeps it under `name`."""

    name: str
    ranks: list[int] | None
    deadline: float


class Finish(OfRun):
    """The run has ended."""

    state: str
    exit_code: int


class Program(TypedDict):
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


class Exec(Program):
    """Run a program. What it writes comes in `stream`, and `stream` + 1; after `timeout` seconds it is ended."""

    timeout: NotRequired[float | None]
    stream: int


class Terminal(Program):
    """Run a program at a terminal of so many rows and columns; without `argv` the user's own shell.

    With `beside` it gets folder and environment of that rank, less what makes a process one of the run.
    """

    beside: NotRequired[OfRank | None]
    term: str
    rows: int
    columns: int
    stream: int


class OfRank(OfRun):
    """A rank of the attempt that goes on."""

    rank: int


class Resize(TypedDict):
    """The terminal of that stream has another size."""

    stream: int
    rows: int
    columns: int


class Tunnel(TypedDict):
    """Connect to a port, as it is seen from the node."""

    host: str
    port: int
    stream: int


class Taken(TypedDict):
    """So many more bytes may be sent in a stream that goes both ways."""

    stream: int
    bytes: int


class Cancel(TypedDict):
    """End the program that the EXEC of that id started."""

    id: int
