"""The check of the kernel log for problems of the whole machine, and texts about the log for other checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from clusterctl.formatting import describe_duration
from clusterctl.health.check import CheckedNode, node_check, remedy
from clusterctl.health.checks import gpu_facts
from clusterctl.health.findings import AMD, NVIDIA, Action, Outcome, fail, ok, skip_without_root, warn
from clusterctl.health.gpu_library_errors import ERROR_MEANINGS, UNSUPPORTED

_WHOLE_SECONDS = 60.0
"""A log counts as complete if it begins at most this number of seconds after the boot."""
_EVIDENCE_FIELDS = {
    NVIDIA: {"recovery_action": "recovery action", "ecc_unc": "ECC counters", "remapped": "remapped rows"},
    AMD: {"ecc_unc": "counts of errors", "bad_pages": "bad pages"},
}
"""Vendor to the values of a GPU that show hardware errors and that every user may read. Each value has a name for
messages."""


def describe_covered_time(node: CheckedNode) -> str:
    """Return the time that the kernel log covers, for messages. A full ring buffer drops its oldest lines."""
    log = node.group("kernel_log").facts
    since, uptime = log.get("since_s"), log.get("uptime")
    if since is None or uptime is None or uptime - since <= _WHOLE_SECONDS:
        return "since boot"
    return f"in the last {describe_duration(since)}; the kernel log has lost older lines"


def describe_occurrences(event: dict[str, Any]) -> str:
    """Return how often an event occurred in the kernel log, and how long ago, for messages: `, 3 times, 2h ago`."""
    times = f", {event['count']} times" if event["count"] > 1 else ""
    age = event["last_age_s"]
    return times if age is None else f"{times}, {describe_duration(age)} ago"


def report_unreadable_log(node: CheckedNode, evidence: str = "") -> Outcome | None:
    """Return the outcome of a check if the user cannot read the kernel log.

    Args:
        node: The node.
        evidence: Facts that show that the node is healthy, for the message.
    """
    why = "the kernel log needs root" if node.group("kernel_log").status == "denied" else "no program reads the log"
    user = node.group("host").facts.get("user") or "USER"
    hint = (
        f"`sudo usermod -aG adm {user}` (`systemd-journal` if there is no group `adm`) and a new login, or "
        "`sudo sysctl kernel.dmesg_restrict=0`, allows access to the kernel log"
    )
    return skip_without_root(f"{why}; {evidence}" if evidence else why, hint=hint)


def report_unreadable_gpu_log(node: CheckedNode) -> Outcome | None:
    """Return the outcome of `report_unreadable_log` with facts of the GPUs; `None` if a fact could not be read."""
    evidence = _list_evidence(node)
    return None if evidence is None else report_unreadable_log(node, evidence)


def _list_evidence(node: CheckedNode) -> str | None:
    """Return the names of the readable facts of the GPUs as evidence; `None` if a supported fact could not be read."""
    if gpu_facts.find_library_problem(node) is not None:
        return None
    speaking = _EVIDENCE_FIELDS[gpu_facts.find_gpu_vendor(node)]
    read: set[str] = set()
    for device in gpu_facts.list_used_gpus(node):
        for field in speaking:
            if gpu_facts.read_value(device, field) is not None:
                read.add(field)
            elif device.get("err", {}).get(field) not in (UNSUPPORTED, *ERROR_MEANINGS):
                return None
    names = [words for field, words in speaking.items() if field in read] + ["answers"]
    return f"evidence instead: {', '.join(names)} of {len(gpu_facts.list_used_gpus(node))} GPUs"


# --- Problems in the kernel log that do not concern GPUs


@dataclass(frozen=True, slots=True)
class _LogPattern:
    """A pattern of the kernel log and its meaning.

    Attributes:
        fatal: The problem is FAIL.
        once_per_boot: The kernel writes the line only at the boot, so the line counts until the next boot.
    """

    pattern: str
    description: str
    action: Action
    fatal: bool = False
    once_per_boot: bool = False


_LOG_PATTERNS = (
    _LogPattern(
        r"Remounting filesystem read-only", "a file system was remounted read-only", Action.CHECK_MOUNT, fatal=True
    ),
    _LogPattern(
        r"(?i)\[hardware error\].*(uncorrect|(?<!non-)(?<!non)fatal)",
        "uncorrected hardware error",
        Action.CONTACT_SUPPORT,
        fatal=True,
    ),
    # `mce:` without `[Hardware Error]` is no error: every Intel machine logs `mce: CPU0: Thermal monitoring enabled`.
    _LogPattern(r"\[Hardware Error\]", "hardware error", Action.CONTACT_SUPPORT),
    _LogPattern(r"blocked for more than \d+ seconds", "a task was blocked in the kernel", Action.CHECK_MOUNT),
    _LogPattern(r"soft lockup|hard LOCKUP", "a CPU was locked up", Action.REBOOT_NODE),
    _LogPattern(
        r"Out of memory: Kill|Memory cgroup out of memory", "a process was killed for memory", Action.RESTART_APP
    ),
    # Floppies, optical drives, loop devices and zram are no disks of a run.
    _LogPattern(r"(I/O|medium) error, dev (?!fd|sr|loop|zram)", "a disk has errors", Action.CONTACT_SUPPORT),
    _LogPattern(r"EXT4-fs error|XFS .*(shut down|Corruption)", "a file system has errors", Action.CHECK_MOUNT),
    _LogPattern(r"not responding, (still trying|timed out)", "a file server did not respond", Action.CHECK_MOUNT),
    _LogPattern(r"insufficient power on", "a PCIe card lacks power", Action.CHECK_POWER_COOLING, once_per_boot=True),
    _LogPattern(r"High Temperature", "a network module is hot", Action.CHECK_POWER_COOLING),
)
_SERVER = "not responding"


@remedy(Action.NONE, "Read the kernel log of the node at that time (`dmesg -T`)")
@node_check(
    "host.kernel_log",
    "Kernel log",
    group="kernel_log",
    without_root="the log stays unread",
    judge_without_source=report_unreadable_log,
    thresholds={"lookback": 86400.0},
)
def check_kernel_log(node: CheckedNode) -> Iterator[Outcome]:
    """The kernel reported no recent problem with disks, memory, lockups, file servers or power.

    Source: kernel log of this boot (`dmesg`, else `journalctl -k -b`, else /var/log)
    Healthy: no problem within `lookback` seconds. FAIL for a read-only remount and for uncorrected hardware errors. The
        kernel reports a lack of power only at the boot, so this message counts until the next boot
    """
    problems: dict[_LogPattern, list[str]] = {}
    for line in node.group().facts.get("lines") or []:
        text, age = str(line.get("text", "")), line.get("age_s")
        which = next((c for c in _LOG_PATTERNS if re.search(c.pattern, text)), None)
        if which is not None and (which.once_per_boot or age is None or age <= node.limit("lookback")):
            problems.setdefault(which, []).append(text)
    servers = _all_servers_answered(node)
    for which in _LOG_PATTERNS:
        lines = problems.get(which, [])
        if not lines or (_SERVER in which.pattern and servers):
            continue
        say = fail if which.fatal else warn
        times = f" ({len(lines)} times)" if len(lines) > 1 else ""
        yield say(f"{which.description}{times}: {lines[-1][:160]}", value=len(lines), action=which.action)
    if not problems:
        yield ok("no problem in the kernel log")
    elif servers and all(_SERVER in which.pattern for which in problems):
        yield ok("a file server did not respond, but has answered again")


def _all_servers_answered(node: CheckedNode) -> bool:
    """Return whether each file server that did not respond answered later."""
    silent: set[str] = set()
    for line in node.group().facts.get("lines") or []:
        if match := re.search(r"server (\S+) not responding", str(line.get("text"))):
            silent.add(match.group(1))
        elif match := re.search(r"server (\S+) OK", str(line.get("text"))):
            silent.discard(match.group(1))
    return not silent
