"""Lines of this boot's kernel log that a judge reads. Stamps are taken since boot, so no clock or year can be wrong."""

from __future__ import annotations

import os
import re
import time

from clusterctl.agent.facts import children, paths
from clusterctl.agent.facts.children import AbsentError, DeniedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEEP = 200
"""Lines kept, the newest; the rest is counted."""

_RELEVANT = re.compile(
    r"NVRM|nvidia-nvswitch|blocked for more than|soft lockup|hard LOCKUP|Out of memory: Kill"
    r"|Memory cgroup out of memory|Remounting filesystem read-only|I/O error, dev"
    r"|not responding, (?:still trying|timed out)|nfs: server .* OK|Hardware Error|mce: "
    r"|insufficient power on|High Temperature|available PCIe bandwidth, limited by"
    r"|EXT4-fs error|XFS .*(?:shut down|Corruption)"
)
_STAMP = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)$")
_FILE = re.compile(r"^.*? kernel:\s*\[\s*(\d+\.\d+)\]\s*(.*)$")
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_TAIL = 4 << 20
_JOURNAL = re.compile(r"^\[\s*(\d+\.\d+)\]\s+\S+\s+kernel:\s*(.*)$")


def collect(root: str) -> dict[str, Any]:
    """Return the group `kernel_log`, from `dmesg`, else from the journal, else from what syslog has written of it.

    Raises:
        DeniedError: None may be read by this user.
        AbsentError: Neither program is there.
    """
    uptime = float((paths.text(root, "/proc/uptime") or str(time.monotonic())).split()[0])
    reasons, missing = [], 0
    for source, argv, pattern in (
        ("dmesg", ["dmesg"], _STAMP),
        ("journalctl", ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"], _JOURNAL),
    ):
        try:
            code, told, complaint = children.output(argv)
        except FileNotFoundError:
            missing += 1
            continue
        # A journal that holds no line at all is one that this user may not read.
        if code == 0 and told.strip():
            return {"source": source, "uptime": uptime, **_lines(told, pattern, uptime)}
        complaints = complaint.strip().splitlines()
        reasons.append(complaints[-1] if complaints else f"{source}: nothing to read")
    for name in _FILES:
        written = _this_boot(root, name, uptime)
        if written:
            return {"source": name, "uptime": uptime, **_lines(written, _FILE, uptime)}
    if missing == 2:
        raise AbsentError("neither `dmesg` nor `journalctl` is there")
    raise DeniedError("; ".join(reasons))


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
        found = _FILE.match(line)
        if not found:
            continue
        stamp = float(found.group(1))
        if stamp < last - 1.0:
            kept.clear()
        last = stamp
        kept.append(line)
    # A log that was last written to before this boot says nothing about it.
    return "\n".join(kept) if kept and last <= uptime else None


def _lines(output: str, pattern: re.Pattern[str], uptime: float) -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    for line in output.splitlines():
        if not _RELEVANT.search(line):
            continue
        found = pattern.match(line)
        stamp, text = (float(found.group(1)), found.group(2)) if found else (None, line)
        age = None if stamp is None else round(max(0.0, uptime - stamp), 1)
        kept.append({"age_s": age, "text": text[:400]})
    return {"lines": kept[-KEEP:], "dropped": max(0, len(kept) - KEEP)}
