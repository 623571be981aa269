"""Saves the journals and evidence of a run in one file for support. Code, checkpoints and most output are left out."""

from __future__ import annotations

import io
import ipaddress
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from clusterctl.agent.protocol import run_files
from clusterctl.agent.protocol.record_types import RankEvidence
from clusterctl.agent.protocol.stall_folders import list_stall_folders
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.saved_verdict import LIVE_EVIDENCE_FOLDER

_END_BYTES = 256 * 1024
_ADDRESS = re.compile(
    rb"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\d)"
    rb"|(?<![\w.:])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w.:])"
)
_TEST_NET_SIZE = 254
_BENCHMARK_NET = ipaddress.IPv4Address("198.18.0.0")
_HOME = re.compile(rb"/(?:home|Users)/[^/\s\"':]+")
_SECRET = re.compile(
    rb"(?i)([\w-]*(?:secret|token|passw|credential|api_?key|private)[\w-]*(?:\\?[\"'])?\s*[=:]\s*)"
    rb"(\\\"(?:[^\"\\]|\\(?!\"))*\\\"|\"[^\"]*\"|'[^']*'|[^\s,}\"'\\]+)"
)
"""Matches a name that looks like a secret, and its value: quoted, quoted within a JSON string, or bare."""
_SECRET_ARGUMENT = re.compile(
    rb"(?i)(--?[\w.-]*(?:secret|token|passw|credential|api[_-]?key|private)[\w.-]*)"
    rb"(?:(\"\s*,\s*\")((?:[^\"\\]|\\.)*)(?=\")|(\s+)(?!-)[^\s\"\\]+)"
)
"""Matches an option that looks like a secret, and the word after it, in a JSON list or in a shell command."""


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


def redact_bytes(content: bytes, replacements: dict[bytes, bytes] | None = None) -> bytes:
    """Return a text without secrets, addresses and names of home folders. Equal addresses stay equal.

    Args:
        content: The text.
        replacements: The replacement of each address. Several texts may share this dictionary.
    """
    replacements = {} if replacements is None else replacements

    def instead(match: re.Match[bytes]) -> bytes:
        try:
            address = ipaddress.ip_address(match[0].decode())
        except ValueError:
            return match[0]
        if address.is_loopback or address.is_unspecified:
            return match[0]
        return replacements.setdefault(address.compressed.encode(), _format_replacement(len(replacements) + 1))

    content = _SECRET.sub(_mask_value, content)
    content = _SECRET_ARGUMENT.sub(lambda found: found[1] + (found[2] or found[4]) + b"***", content)
    return _HOME.sub(b"/home/user", _ADDRESS.sub(instead, content))


def _format_replacement(number: int) -> bytes:
    """Return a reserved address that no machine has. Each number gives a different address."""
    return b"192.0.2.%d" % number if number <= _TEST_NET_SIZE else str(_BENCHMARK_NET + number).encode()


def _mask_value(match: re.Match[bytes]) -> bytes:
    """Return a matched name with stars in place of its value. Quotes around the value stay, for valid JSON."""
    value = match[2]
    quote = rb"\"" if value.startswith(rb"\"") else value[:1] if value[:1] in (b'"', b"'") else b""
    return match[1] + quote + b"***" + quote


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
