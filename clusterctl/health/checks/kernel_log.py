"""What the kernel complained about, apart from GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.health.check import View, node_check
from clusterctl.health.checks.kernel_reach import report_closed_log
from clusterctl.health.model import Action, Outcome, fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class _Complaint:
    """What a line means. `boot`: it is written once, at the boot, and holds as long as that lasts."""

    pattern: str
    words: str
    action: Action
    fatal: bool = False
    boot: bool = False


_COMPLAINTS = (
    _Complaint(
        r"Remounting filesystem read-only", "a file system was remounted read-only", Action.CHECK_MOUNT, fatal=True
    ),
    _Complaint(
        r"(?i)\[hardware error\].*(uncorrect|(?<!non-)(?<!non)fatal)",
        "uncorrected hardware error",
        Action.CONTACT_SUPPORT,
        fatal=True,
    ),
    # Without the brackets: `mce: CPU0: Thermal monitoring enabled` is a boot line of every Intel machine.
    _Complaint(r"\[Hardware Error\]", "hardware error", Action.CONTACT_SUPPORT),
    _Complaint(r"blocked for more than \d+ seconds", "a task was blocked in the kernel", Action.CHECK_MOUNT),
    _Complaint(r"soft lockup|hard LOCKUP", "a CPU was locked up", Action.REBOOT_NODE),
    _Complaint(
        r"Out of memory: Kill|Memory cgroup out of memory", "a process was killed for memory", Action.RESTART_APP
    ),
    # A drive without a disk in it and an image that is gone are no disks of a run.
    _Complaint(r"(I/O|medium) error, dev (?!fd|sr|loop|zram)", "a disk has errors", Action.CONTACT_SUPPORT),
    _Complaint(r"EXT4-fs error|XFS .*(shut down|Corruption)", "a file system has errors", Action.CHECK_MOUNT),
    _Complaint(r"not responding, (still trying|timed out)", "a file server did not respond", Action.CHECK_MOUNT),
    _Complaint(r"insufficient power on", "a PCIe card lacks power", Action.CHECK_POWER_COOLING, boot=True),
    _Complaint(r"High Temperature", "a network module is hot", Action.CHECK_POWER_COOLING),
)
_SERVER = "not responding"


def _witness(view: View) -> Outcome | None:
    return report_closed_log(view, gpus_speak=False)


@node_check(
    name="host.kernel_log",
    family="Kernel log",
    source="kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log)",
    threshold=(
        "no complaint within `lookback` seconds (lack of power is told once, at the boot, and counts as long as that "
        "lasts); FAIL for a read-only remount and uncorrected hardware errors"
    ),
    severity="FAIL",
    remedy="Read the kernel log of the node (`dmesg -T`) around it",
    group="kernel_log",
    root="it stays unread",
    witness=_witness,
    thresholds={"lookback": 86400.0},
)
def kernel_log(view: View) -> Iterator[Outcome]:
    """The kernel did not complain about disks, memory, lockups, file servers or power lately."""
    complaints: dict[_Complaint, list[str]] = {}
    for line in view.group().data.get("lines") or []:
        text, age = str(line.get("text", "")), line.get("age_s")
        which = next((c for c in _COMPLAINTS if re.search(c.pattern, text)), None)
        if which is not None and (which.boot or age is None or age <= view.limit("lookback")):
            complaints.setdefault(which, []).append(text)
    servers = _recovered(view)
    for which in _COMPLAINTS:
        lines = complaints.get(which, [])
        if not lines or (_SERVER in which.pattern and servers):
            continue
        say = fail if which.fatal else warn
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        yield say(f"{which.words}{times}: {lines[-1][:160]}", value=len(lines), action=which.action)
    if not complaints:
        yield ok("no complaint")
    elif servers and all(_SERVER in which.pattern for which in complaints):
        yield ok("a file server that did not respond came back")


def _recovered(view: View) -> bool:
    """Tell whether every server that was silent answered again afterwards."""
    silent: set[str] = set()
    for line in view.group().data.get("lines") or []:
        if match := re.search(r"server (\S+) not responding", str(line.get("text"))):
            silent.add(match.group(1))
        elif match := re.search(r"server (\S+) OK", str(line.get("text"))):
            silent.discard(match.group(1))
    return not silent


CHECKS = (kernel_log,)
