"""Lines of this boot's kernel log that a judge reads. Stamps are taken since boot, so no clock or year can be wrong."""

from __future__ import annotations

import os
import re
import time

from clusterctl.agent.facts import children
from clusterctl.agent.facts.children import AbsentError, DeniedError
from clusterctl.agent.facts.kernel_events import KernelEvents
from clusterctl.agent.linux import paths

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from clusterctl.agent.protocol.types.found import gpus as shapes

KEEP = 200
"""Lines kept, the newest; the rest is counted. Errors of GPUs are not among them: those are all counted."""
WHOLE_SECONDS = 60.0
"""A log that begins within so many seconds of the boot has lost nothing that matters."""
_JOURNAL_SECONDS = 1.5

_RELEVANT = re.compile(
    r"blocked for more than|soft lockup|hard LOCKUP|Out of memory: Kill"
    r"|Memory cgroup out of memory|Remounting filesystem read-only|(?:I/O|medium) error, dev"
    r"|not responding, (?:still trying|timed out)|nfs: server .* OK|\[Hardware Error\]"
    r"|insufficient power on|High Temperature"
    r"|EXT4-fs error|XFS .*(?:shut down|Corruption)"
)
_STAMP = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)$")
_FILE = re.compile(r"^.*? kernel:\s*\[\s*(\d+\.\d+)\]\s*(.*)$")
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_TAIL = 4 << 20
_JOURNAL = re.compile(r"^\[\s*(\d+\.\d+)\]\s+\S+\s+kernel:\s*(.*)$")
_PROGRAMS = (
    ("dmesg", ["dmesg"], _STAMP),
    ("journalctl", ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"], _JOURNAL),
)


def collect(root: str) -> shapes.KernelLog:
    """Return the group `kernel_log`, from `dmesg`, else from the journal, else from what syslog has written of it.

    Where the ring that `dmesg` reads has lost its beginning, the journal is asked, which may reach further back.

    Raises:
        DeniedError: None may be read by this user.
        AbsentError: Neither program is there.
    """
    uptime = float((paths.text(root, "/proc/uptime") or str(time.monotonic())).split()[0])
    best: shapes.KernelLog | None = None
    reasons: list[str] = []
    for source, argv, pattern in _PROGRAMS:
        output, reason = _ask(argv, None if best is None else _JOURNAL_SECONDS)
        if output is None:
            reasons.append(reason)
            continue
        seen: shapes.KernelLog = {"source": source, "uptime": uptime, **read(output, pattern, uptime)}
        best = seen if best is None or _reach(seen) > _reach(best) else best
        if _is_whole(best):
            break
    if best is not None:
        return best
    for name in _FILES:
        written = _this_boot(root, name, uptime)
        if written:
            return {"source": name, "uptime": uptime, **read(written, _FILE, uptime)}
    stated = [reason for reason in reasons if reason]
    if not stated:
        raise AbsentError("neither `dmesg` nor `journalctl` is there")
    raise DeniedError("; ".join(stated))


def _ask(argv: list[str], seconds: float | None) -> tuple[str | None, str]:
    """Return what a program tells, or `None` and why it does not; no reason where there is no such program."""
    try:
        code, output, complaint = children.output(argv, seconds)
    except FileNotFoundError:
        return None, ""
    # A journal that holds no line at all is one that this user may not read.
    if code == 0 and output.strip():
        return output, ""
    complaints = complaint.strip().splitlines()
    return None, complaints[-1] if complaints else f"{argv[0]}: nothing to read"


def _reach(seen: shapes.KernelLog) -> float:
    return float(seen["since_s"] or 0.0)


def _is_whole(seen: shapes.KernelLog) -> bool:
    return seen["since_s"] is None or bool(seen["uptime"] - seen["since_s"] <= WHOLE_SECONDS)


def _this_boot(root: str, name: str, uptime: float) -> str | None:
    """Return the lines of this boot at the end of a log file, or `None` where none can be told to be.

    Stamps since boot only rise; where one falls, a new boot began.
    """
    try:
        fd = os.open(paths.under(root, name), os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        tail = os.pread(fd, _TAIL, max(0, os.fstat(fd).st_size - _TAIL)).decode("utf-8", "replace")
    finally:
        os.close(fd)
    kept: list[str] = []
    last = 0.0
    for line in tail.splitlines():
        match = _FILE.match(line)
        if not match:
            continue
        stamp = float(match.group(1))
        if stamp < last - 1.0:
            kept.clear()
        last = stamp
        kept.append(line)
    # A log that was last written to before this boot says nothing about it.
    return "\n".join(kept) if kept and last <= uptime else None


def read(output: str, pattern: re.Pattern[str] = _STAMP, uptime: float = 0.0) -> shapes.KernelLog:
    """Return what matters of a kernel log's text, from its oldest line on (`clusterctl.agent.facts` has the shape)."""
    events = KernelEvents()
    kept: list[dict[str, Any]] = []
    since: float | None = None
    age: float | None = None
    for line in output.splitlines():
        match = pattern.match(line)
        # What has no stamp of its own goes on from the line before it.
        age = age if match is None else round(max(0.0, uptime - float(match.group(1))), 1)
        since = age if since is None else since
        text = line if match is None else match.group(2)
        if not events.take(text, age) and _RELEVANT.search(text):
            kept.append({"age_s": age, "text": text[:400]})
    return {
        "since_s": since,
        "events": events.counted(),
        "lines": kept[-KEEP:],
        "dropped": max(0, len(kept) - KEEP),
    }
