"""The folders with the evidence of stalls, and the content of the files in them."""

from __future__ import annotations

import json
import os
import re
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from clusterctl.agent.protocol.record_types import ProcessState, RankEvidence

FAULTHANDLER_SOURCES = ("shim", "signal")
"""The sources of stacks (`RankEvidence.source`) whose dumps have the format of faulthandler."""
_STALL = re.compile(r"stall-([1-9]\d*)")


def list_stall_folders(folder: str) -> list[str]:
    """Return the names of the stall folders (`stall-1`, …) in `folder`, oldest first."""
    try:
        matches = [match for match in map(_STALL.fullmatch, os.listdir(folder)) if match]
    except OSError:
        return []
    return [match[0] for match in sorted(matches, key=lambda match: int(match[1]))]


def format_rank_files(evidence: RankEvidence) -> dict[str, str]:
    """Return the content of the evidence files of one rank, by the suffix of the file name."""
    contents = {".json": json.dumps(evidence, indent=1) + "\n", ".txt": _format_text(evidence)}
    return {**contents, ".stacks": evidence["stacks"]} if evidence["stacks"] else contents


def _format_text(evidence: RankEvidence) -> str:
    node = f" on {evidence['node']}" if "node" in evidence else ""
    lines = [
        f"rank {evidence['rank']}{node}: {_format_process(evidence)}",
        f"stacks by: {evidence['source']}" + "".join(f"\n  not {reason}" for reason in evidence["why"]),
        *([f"error: {evidence['error']}"] if "error" in evidence else []),
        *(f"  child {_format_process(child)}" for child in evidence["children"]),
        "",
        "last output:",
        *(f"  {line}" for line in evidence["tail"]),
    ]
    if evidence["source"] in FAULTHANDLER_SOURCES:
        lines += ["", "stacks:", evidence["stacks"].rstrip("\n")]
    return "\n".join(lines) + "\n"


def _format_process(process: ProcessState) -> str:
    cpu, command = process.get("cpu", 0.0), process.get("command", "")
    where = f", in {process['wchan']}" if process["wchan"] else ""
    return f"pid {process['pid']}, state {process['state'] or 'unknown'}{where}, cpu {cpu:.0%}, {command}"


_FIRST_STALLS, _LAST_STALLS = 2, 8
"""The number of first stalls and the number of last stalls of a run whose evidence is kept."""


def remove_middle_stall_folders(folder: str) -> None:
    """Remove the evidence of all stalls except the first `_FIRST_STALLS` and the last `_LAST_STALLS`."""
    for name in list_stall_folders(folder)[_FIRST_STALLS:-_LAST_STALLS]:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
