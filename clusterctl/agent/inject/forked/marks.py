"""By what a zygote is known as one of a run."""

from __future__ import annotations

import os
import resource

from . import image, late

# Not from `typing`: in a Python that is to be like a worker's, less is better.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_LIMITS = (10, resource.RLIMIT_RSS)
"""Limits that Linux does not enforce (the first is RLIMIT_LOCKS): one of them holds the tag of the run."""
_LEAST_TAG = 1 << 60
"""Far above any limit that a person would set."""


def title(of: str) -> list[bytes]:
    """Return the command line that everybody sees."""
    return [b"clusterctl-agent zygote " + os.fsencode(of)]


def untag() -> None:
    """Take off the tag."""
    for limit in _LIMITS:
        soft, hard = resource.getrlimit(limit)
        if soft >= _LEAST_TAG:
            resource.setrlimit(limit, (hard, hard))


def put_on(asked: dict[str, Any]) -> None:
    """Be of a run: `tag`, `cwd`, `title` and `env` are what a process has that is started for it."""
    untag()
    for limit in _LIMITS if asked["tag"] is not None else ():
        try:
            resource.setrlimit(limit, (asked["tag"], resource.getrlimit(limit)[1]))
        except (OSError, ValueError):
            continue
        break
    os.chdir(asked["cwd"])
    image.show(title(asked["title"]), late.of_text(asked["env"]))
