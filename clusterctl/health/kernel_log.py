"""What the kernel complained about, apart from GPUs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from clusterctl.health.check import View, node_check
from clusterctl.health.kernel_reach import closed_log
from clusterctl.health.model import Action, Outcome, failed, passed, warned

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATTERNS: tuple[tuple[str, str, bool, Action], ...] = (
    (r"Remounting filesystem read-only", "a file system was remounted read-only", True, Action.CHECK_MOUNT),
    (r"(?i)hardware error.*(uncorrect|fatal)", "uncorrected hardware error", True, Action.CONTACT_SUPPORT),
    (r"Hardware Error|mce: ", "hardware error", False, Action.CONTACT_SUPPORT),
    (r"blocked for more than \d+ seconds", "a task was blocked in the kernel", False, Action.CHECK_MOUNT),
    (r"soft lockup|hard LOCKUP", "a CPU was locked up", False, Action.REBOOT_NODE),
    (r"Out of memory: Kill|Memory cgroup out of memory", "a process was killed for memory", False, Action.RESTART_APP),
    (r"I/O error, dev", "a disk has I/O errors", False, Action.CONTACT_SUPPORT),
    (r"EXT4-fs error|XFS .*(shut down|Corruption)", "a file system has errors", False, Action.CHECK_MOUNT),
    (r"not responding, (still trying|timed out)", "a file server did not respond", False, Action.CHECK_MOUNT),
    (r"insufficient power on", "a PCIe card lacks power", False, Action.CHECK_POWER_COOLING),
    (r"High Temperature", "a network module is hot", False, Action.CHECK_POWER_COOLING),
    (r"available PCIe bandwidth, limited by", "a PCIe card has less bandwidth than it could", False, Action.CHECK_LINK),
)


def _witness(view: View) -> Outcome | None:
    return closed_log(view, gpus_speak=False)


@node_check(
    name="host.kernel_log",
    family="Kernel log",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log)",
    threshold=("no complaint within `lookback` seconds; FAIL for a read-only remount and uncorrected hardware errors"),
    severity="FAIL",
    remedy="Read the kernel log of the node (`dmesg -T`) around it",
    group="kernel_log",
    root="it stays unread",
    witness=_witness,
    thresholds={"lookback": 86400.0},
)
def kernel_log(view: View) -> Iterator[Outcome]:
    """The kernel did not complain about disks, memory, lockups, file servers or power lately."""
    found: dict[int, list[str]] = {}
    for line in view.group().data.get("lines") or []:
        age = line.get("age_s")
        if age is not None and age > view.limit("lookback"):
            continue
        text = str(line.get("text", ""))
        which = next((i for i, (pattern, *_) in enumerate(_PATTERNS) if re.search(pattern, text)), None)
        if which is not None:
            found.setdefault(which, []).append(text)
    servers = _recovered(view)
    for which, lines in sorted(found.items()):
        pattern, words, fatal, action = _PATTERNS[which]
        if "not responding" in pattern and servers:
            continue
        say = failed if fatal else warned
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        yield say(f"{words}{times}: {lines[-1][:160]}", value=len(lines), action=action)
    if not found:
        yield passed("no complaint")
    elif servers and all("not responding" in _PATTERNS[which][0] for which in found):
        yield passed("a file server that did not respond came back")


def _recovered(view: View) -> bool:
    """Tell whether every server that was silent answered again afterwards."""
    silent: set[str] = set()
    for line in view.group().data.get("lines") or []:
        if found := re.search(r"server (\S+) not responding", str(line.get("text"))):
            silent.add(found.group(1))
        elif found := re.search(r"server (\S+) OK", str(line.get("text"))):
            silent.discard(found.group(1))
    return not silent


CHECKS = (kernel_log,)
