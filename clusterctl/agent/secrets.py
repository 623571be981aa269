"""Secrets that a later attempt needs again: 0600 on a tmpfs, and only as long as the run lasts."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
from typing import TYPE_CHECKING

from clusterctl.agent import system

if TYPE_CHECKING:
    from clusterctl.agent.protocol import Start


def recall(path: str, start: Start) -> Start:
    """Keep the secrets of a start where a later attempt may need them; fill them in where this one brings none."""
    if start.secrets:
        if start.keep_secrets:
            system.write_json(path, start.secrets)
        return start
    known = system.read_json(path) if start.keep_secrets else None
    return start if known is None else dataclasses.replace(start, secrets={str(k): str(v) for k, v in known.items()})


def forget(path: str) -> None:
    """Remove them."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def remove_folder(path: str) -> None:
    """Remove what workers left on the tmpfs."""
    shutil.rmtree(path, ignore_errors=True)
