"""Saves the journals and evidence of a run in one file for support. Code, checkpoints and most output are left out."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.run.record.redaction import redact_bytes
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.saved_verdict import LIVE_EVIDENCE_FOLDER

_END_BYTES = 256 * 1024


def save_bundle(run: RunDir, target: Path, live_evidence: Mapping[str, RankEvidence], *, redact: bool) -> int:
    """Write the bundle of a run (tar, gzip); return its size in bytes.

    Args:
        run: The run.
        target: The file to create.
        live_evidence: New evidence of each rank, if the run has no stored evidence.
        redact: Replace secrets, addresses and names of home folders.

    Raises:
        OSError: The file cannot be written.
    """
    replacements: dict[bytes, bytes] = {}
    change: Callable[[bytes], bytes] = (lambda content: redact_bytes(content, replacements)) if redact else bytes
    with tarfile.open(target, "w:gz") as archive:
        for path, end in _list_files(run):
            content = change(_read_end(path, end))
            _add_file(archive, f"{run.run}/{path.relative_to(run.path)}", content, path.stat().st_mtime)
        for rank, seen in live_evidence.items():
            content = change(json.dumps({**seen, "rank": int(rank)}).encode())
            _add_file(archive, f"{run.run}/{LIVE_EVIDENCE_FOLDER}/rank-{rank}.json", content, time.time())
    return target.stat().st_size


def _add_file(archive: tarfile.TarFile, name: str, content: bytes, time_: float) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(content), 0o600, int(time_)
    archive.addfile(info, io.BytesIO(content))


def _list_files(run: RunDir) -> Iterator[tuple[Path, int | None]]:
    """Yield each file of the bundle, and how many bytes at the end of the file to save; `None` for all bytes."""
    for path in (run.spec, run.events, run.log, *sorted(run.path.glob("plan-*.json"))):
        if path.is_file():
            yield path, None
    for name in list_stall_folders(str(run.path)):
        yield from ((path, None) for path in sorted((run.path / name).iterdir()) if path.is_file())
    for path in sorted(run.node("").rglob("*")):
        if path.is_file():
            yield path, None if path.name == run_files.JOURNAL_FILE else _END_BYTES


def _read_end(path: Path, end: int | None) -> bytes:
    with path.open("rb") as file:
        if end is not None:
            file.seek(max(0, path.stat().st_size - end))
        return file.read()
