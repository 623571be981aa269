"""What the lab tells the PID 1 of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from tests.lab.places import PlaceSetup


class Setup(TypedDict):
    """Everything PID 1 must know; files are (path, text, mode, uid), network are commands of iproute2."""

    owner: int
    hostname: str
    boot_id: str
    network: list[str]
    home: str
    uid: int
    places: list[PlaceSetup]
    shared: str
    etc: dict[str, str]
    expose: list[str]
    hide: list[str]
    without_python: bool
    python: str | None
    files: list[tuple[str, str, int, int]]
    sshd: list[str]
    cgroups: list[str]
    groups_shown: str
    proc: str
    uptime: float | None
    port: int
