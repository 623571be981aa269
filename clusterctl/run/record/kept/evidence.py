"""Evidence of stalls that is kept with a run."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from clusterctl.agent.protocol.evidence_files import list_stall_folders
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.validation import answers

if TYPE_CHECKING:
    from pathlib import Path

    from clusterctl.agent.protocol.process_types import RankEvidence
    from clusterctl.run.record.rundir import RunDir

LOOK = "look"
"""The folder of a bundle with what was seen of a run that nobody called stalled when it was made."""
_MOST_BYTES = 16 << 20


def _names(folder: Path) -> list[str]:
    """Return which files say something of a rank. There may be thousands: no paths are made of them."""
    try:
        return [name for name in os.listdir(folder) if name.startswith("rank-") and name.endswith(".json")]
    except OSError:
        return []


def _content(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # Room is made for all that is asked for.
        return os.read(file, min(_MOST_BYTES, os.fstat(file).st_size))
    finally:
        os.close(file)


def newest(run: RunDir) -> tuple[str | None, dict[str, RankEvidence]]:
    """Return the name of the folder with the newest evidence, and what it says of each rank; a bad file is left out."""
    names = list_stall_folders(str(run.path))
    if not names:
        return None, {}
    return names[-1], of_folder(run.path / names[-1])


def of_folder(folder: Path) -> dict[str, RankEvidence]:
    """Return what a folder says of each rank."""
    by_rank: dict[str, RankEvidence] = {}
    for name in sorted(_names(folder)):
        try:
            evidence = json.loads(_content(f"{folder}/{name}"))
            by_rank[str(int(evidence["rank"]))] = answers.validate_rank_evidence(evidence)
        except (OSError, ValueError, KeyError, TypeError, RecursionError, FrameError):
            continue
    return by_rank
