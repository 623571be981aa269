"""Lines of this boot's kernel log that a judge reads. Stamps are taken since boot, so no clock or year can be wrong."""

from __future__ import annotations

import re
import subprocess
import time
from typing import Any

from clusterctl.agent.facts import paths
from clusterctl.agent.facts.children import AbsentError, DeniedError

KEEP = 200
"""Lines kept, the newest; the rest is counted."""

_RELEVANT = re.compile(
    rb"NVRM|nvidia-nvswitch|blocked for more than|soft lockup|hard LOCKUP|Out of memory: Kill"
    rb"|Memory cgroup out of memory|Remounting filesystem read-only|I/O error, dev"
    rb"|not responding, (?:still trying|timed out)|nfs: server .* OK|Hardware Error|mce: "
    rb"|insufficient power on|High Temperature|available PCIe bandwidth, limited by"
    rb"|EXT4-fs error|XFS .*(?:shut down|Corruption)"
)
_STAMP = re.compile(rb"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)$")
_JOURNAL = re.compile(rb"^\[\s*(\d+\.\d+)\]\s+\S+\s+kernel:\s*(.*)$")


def collect(root: str, deadline: float) -> dict[str, Any]:
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
            done = subprocess.run(  # noqa: S603, RUF100
                argv, capture_output=True, check=False, timeout=max(0.1, deadline - time.monotonic() - 0.2)
            )
        except FileNotFoundError:
            missing += 1
            continue
        # A journal that holds no line at all is one that this user may not read.
        if done.returncode == 0 and done.stdout.strip():
            return {"source": source, "uptime": uptime, **_lines(done.stdout, pattern, uptime)}
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        reasons.append(complaint[-1] if complaint else f"{source}: nothing to read")
    if missing == 2:
        raise AbsentError("neither `dmesg` nor `journalctl` is there")
    raise DeniedError("; ".join(reasons))


def _lines(output: bytes, pattern: re.Pattern[bytes], uptime: float) -> dict[str, Any]:
    kept: list[dict[str, Any]] = []
    for line in output.splitlines():
        if not _RELEVANT.search(line):
            continue
        found = pattern.match(line)
        stamp, text = (float(found.group(1)), found.group(2)) if found else (None, line)
        age = None if stamp is None else round(max(0.0, uptime - stamp), 1)
        kept.append({"age_s": age, "text": text.decode(errors="replace")[:400]})
    return {"lines": kept[-KEEP:], "dropped": max(0, len(kept) - KEEP)}
