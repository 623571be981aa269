"""What some keys of a cluster file may say: one of a few words."""

from __future__ import annotations

from enum import Enum


class StartMethod(str, Enum):
    """How the workers of a node come to be."""

    SPAWN = "spawn"
    FORK = "fork"
    AUTO = "auto"


class Resume(str, Enum):
    """Which checkpoints an attempt may go on from."""

    NEVER = "never"
    THIS_RUN = "this run"
    ANY = "any"
