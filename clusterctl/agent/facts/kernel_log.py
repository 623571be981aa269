"""Lines of this boot's kernel log that a judge reads. Stamps are taken since boot, so no clock or year can be wrong."""

from __future__ import annotations

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
_JOURNAL = re.compile(r"^\[\s*(\d+\.\d+)\]\s+\S+\s+kernel:\s*(.*)$")


def collect(root: str) -> dict[str, Any]:
    """Return the group `kernel_log`, from `dmesg`, else from the journal.

    Raises:
        DeniedError: Neither may be read by this user.
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
    if missing == 2:
        raise AbsentError("neither `dmesg` nor `journalctl` is there")
    raise DeniedError("; ".join(reasons))


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
