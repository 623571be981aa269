"""What the facts of a machine are asked for, and what they tell."""

from __future__ import annotations

from typing import Any, TypedDict


class Request(TypedDict, total=False):
    """What is looked at (`groups`; default all), and what the looks need to know. Deadlines are in seconds."""

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


class Group(TypedDict, total=False):
    """What one look has found (`data`, see `found`), how it went (`status`), why not (`reason`), how long it took.

    Of a look that took too long also its child: pid, state, where in the kernel, and whether SIGKILL did not end it.
    """

    status: str
    reason: str | None
    data: Any
    ms: float | None
    pid: int
    state: str | None
    wchan: str | None
    abandoned: bool


class Stuck(TypedDict, total=False):
    """A process of the probe that cannot be ended."""

    group: str
    pid: int
    state: str | None
    wchan: str | None


class Facts(TypedDict, total=False):
    """What a probe found, by group, and what was stuck; `time` is wall clock (seconds), `ms` how long it took."""

    schema: int
    ms: float

    groups: dict[str, Group]
    time: float
    stuck: list[Stuck]
