"""What a worker tells of itself, in its status file and in samples of it."""

from __future__ import annotations

from typing import Any, TypedDict

from typing_extensions import NotRequired


class _Told(TypedDict):
    pid: int
    step: int | None
    source: str | None
    beats: int
    seq: dict[str, tuple[int, int]] | None
    backend: str | None
    timeout_s: float | None
    frameworks: list[str]
    facts: dict[str, Any]
    degraded: dict[str, str]
    looks: NotRequired[int]
    held: NotRequired[int]


class Phase(TypedDict):
    """A phase that the worker is in since a moment of the node's monotonic clock (seconds), and its limit (seconds)."""

    name: str
    since: float
    limit_s: float


class PhaseNow(TypedDict):
    """A phase, and for how many seconds the worker has been in it."""

    name: str
    age_s: float
    limit_s: float


class WorkerStatus(_Told):
    """The status file. Times are of the node's monotonic clock (seconds), `start_time` is in clock ticks since boot."""

    start_time: int
    tid: int
    time: float
    progress_time: float | None
    main_time: float | None
    phase: Phase | None


class Inside(_Told):
    """What becomes of it in a sample: ages in seconds. `unseen`: it is old because nobody is left to write it."""

    age_s: float
    progress_age_s: float | None
    main_age_s: float | None
    phase: PhaseNow | None
    unseen: NotRequired[bool]


class Announced(TypedDict):
    """What a shim has announced of itself: process, signal that dumps stacks, and the open file that they go to."""

    pid: int
    start_time: int
    signal: int
    fd: int
    dev: int
    ino: int
    main_thread: int
