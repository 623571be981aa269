"""Where the ranks of a node are: processes, stacks and what they wrote last."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

from typing_extensions import NotRequired

if TYPE_CHECKING:
    from clusterctl.agent.protocol.types.worker_status import Inside


class ProcessFound(TypedDict):
    """A process; `cpu` is its share of one core over a quarter of a second."""

    pid: int
    state: str | None
    wchan: str | None
    name: NotRequired[str]
    cpu: NotRequired[float]
    command: NotRequired[str]


class Subject(TypedDict):
    """A process to look at: the one that was started as a rank, and the file that its output goes to."""

    rank: int
    pid: int
    start_time: int
    output: str | None


class Recorded(TypedDict):
    """An entry of the flight recorder: the collective or message of that number in a group; `done`: it has ended."""

    group: str
    number: int
    op: str
    sizes: str
    dtypes: str
    done: bool
    p2p: bool


class SocketFound(TypedDict):
    """A TCP connection of a rank.

    `unacked` and `unread` are bytes on their way out and in, `lost` how often the newest of them was sent again without
    an answer; `awaited`: the main thread waits to read from it.
    """

    address: str
    port: int
    peer: str
    peer_port: int
    state: str
    unacked: int
    unread: int
    lost: int
    awaited: bool


class OfRank(ProcessFound):
    """Evidence of one rank.

    `source` is how the stacks were had (`signal`, `py-spy`, `proc`), `why` what the rungs above said, `stacks` the text
    as dumped, `tail` the last lines of its output. `error` tells why there is nothing. `node` is told by the head.
    """

    rank: int
    threads: NotRequired[int]
    source: str
    why: list[str]
    stacks: str
    main_thread: int | None
    inside: Inside | None
    children: list[ProcessFound]
    tail: list[str]
    recorded: NotRequired[list[Recorded] | None]
    sockets: NotRequired[list[SocketFound]]
    error: NotRequired[str]
    node: NotRequired[str]


class Evidence(TypedDict, total=False):
    """Evidence of the ranks of a node, by rank; `took_s` is how many seconds it took."""

    took_s: float
    ranks: dict[str, OfRank]
