"""What is told of processes: started, ended, or not to be ended."""

from __future__ import annotations

from typing import TypedDict


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


class Survivor(TypedDict):
    """A process that a node could not end, and why."""

    pid: int
    start_time: int
    command: str
    why: str


class Leftover(TypedDict):
    """A process of an attempt that was there when it should have been gone, and was ended.

    Attributes:
        rank: Whose it was, or `None` where that does not show.
        age_s: Seconds since it was started.
    """

    pid: int
    rank: int | None
    command: str
    age_s: float


class Remaining(TypedDict):
    """What may still be there of a run on a node; `None` where no process is known."""

    node: str
    pid: int | None
    start_time: int | None
    command: str | None
    why: str
