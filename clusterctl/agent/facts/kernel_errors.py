"""Collects hardware errors since boot from the kernel log, and from counters of PCIe links and main memory.

PCIe: the counters of Advanced Error Reporting (kernel 4.19, `sysfs-bus-pci-devices-aer_stats`) of GPUs and network
cards, of the port above each card, and of its root port. Memory: the counters of EDAC (`sysfs-devices-edac`).

Kernel log: the relevant lines of this boot, and the number of each kind of GPU error in them.

Time stamps are relative to boot, so a wrong clock does not matter. The driver of a dead GPU may write thousands of
lines. Therefore GPU errors are counted while the log is read, with one entry for each kind and device. Other lines
cannot displace these entries.

    {"vendor": "nvidia", "kind": "xid" | "sxid", "device": PCI address, "code", "grade": "fatal" | "nonfatal" | "",
     "count", "first_age_s", "last_age_s", "ages": of the newest lines, "order": position of the last line,
     "text": of the last line}
    the same with "vendor": "amd", "code": 0, and one of these as "kind" and "grade":
        ras     errors that memory or engines could not correct; grade: the block of the GPU
        reset   grade: `begin`, `done` or `failed`
        hang    a work queue did not finish, and the driver could not recover it without a reset
        lost    the GPU is no longer on the bus
        worn    more memory pages are bad than the driver accepts
        init    the driver could not start the GPU

The messages of AMD's driver are in `amdgpu_ras.c`, `amdgpu_device.c`, `amdgpu_job.c` and `amdgpu_ras_eeprom.c`.
"""

from __future__ import annotations

import os
import re
import time

from clusterctl.agent.facts import kernel_gpu_facts
from clusterctl.agent.facts.child_tasks import AbsentError, DeniedError
from clusterctl.agent.linux import kernel_files, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    Event = Optional["tuple[str, str, str, str]"]
    Key = tuple[str, str, int, str]


_GPU_DRIVERS = ("nvidia", "amdgpu")
_NETWORK_CARD_FOLDERS = ("/sys/class/infiniband", "/sys/class/net")
_EDAC_FOLDER = "/sys/devices/system/edac/mc"


def collect_hardware_errors(root: str) -> dict[str, Any]:
    """Return the facts of the group `hardware`."""
    cards = [*_list_gpus(root), *_list_network_cards(root)]
    places: dict[str, str] = {}
    for place, what in cards:
        for port in _list_ports_above(place):
            places.setdefault(port, what if port == place else f"above {what}")
    devices: list[dict[str, Any]] = [
        {"address": os.path.basename(place), "of": what, **errors}
        for place, what in places.items()
        if (errors := _read_pcie_errors(place)) is not None
    ]
    memory = [
        {
            "controller": name,
            "corrected": kernel_files.read_int(root, f"{_EDAC_FOLDER}/{name}/ce_count"),
            "uncorrected": kernel_files.read_int(root, f"{_EDAC_FOLDER}/{name}/ue_count"),
            "seconds": kernel_files.read_int(root, f"{_EDAC_FOLDER}/{name}/seconds_since_reset"),
        }
        for name in kernel_files.list_names(root, _EDAC_FOLDER)
        if name.startswith("mc")
    ]
    return {"pcie": devices, "memory": memory}


def _list_gpus(root: str) -> list[tuple[str, str]]:
    bases = [f"/sys/bus/pci/drivers/{driver}" for driver in _GPU_DRIVERS]
    cards = [
        (base, name)
        for base in bases
        for name in kernel_files.list_names(root, base)
        if kernel_gpu_facts.is_pci_device(name)
    ]
    return [(os.path.realpath(kernel_files.join_root(root, f"{base}/{name}")), f"GPU {name}") for base, name in cards]


def _list_network_cards(root: str) -> list[tuple[str, str]]:
    versions: dict[str, str] = {}
    for base in _NETWORK_CARD_FOLDERS:
        for name in kernel_files.list_names(root, base):
            place = os.path.realpath(kernel_files.join_root(root, f"{base}/{name}/device"))
            if kernel_gpu_facts.is_pci_device(place):
                versions.setdefault(place, name)
    return list(versions.items())


def _list_ports_above(place: str) -> list[str]:
    """Return the paths of a card, of the port above the card, and of its root port."""
    ports = [place]
    while kernel_gpu_facts.is_pci_device(above := os.path.dirname(ports[-1])):
        ports.append(above)
    return [*ports[:2], *ports[2:][-1:]]


def _read_pcie_errors(place: str) -> dict[str, Any] | None:
    """Return `{correctable, nonfatal, fatal}` with counts by kind of error; `None` if the device has no counters."""
    texts = {
        grade: kernel_files.read_text("/", f"{place}/aer_dev_{grade}") for grade in ("correctable", "nonfatal", "fatal")
    }
    if all(text is None for text in texts.values()):
        return None
    counts: dict[str, dict[str, int]] = {}
    for grade, text in texts.items():
        pairs = (line.rpartition(" ")[::2] for line in (text or "").splitlines() if not line.startswith("TOTAL_"))
        counts[grade] = {kind.strip(): int(count) for kind, count in pairs if count.isdigit() and int(count)}
    return counts


_DEVICE = re.compile(r"amdgpu ([0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]): (?:amdgpu: )?")
_RAS = re.compile(r"\b(\d+) (?:new )?uncorrectable hardware errors detected in (?:total in )?(\w+) block")
"""The pattern needs a number, because the driver reports `no uncorrectable hardware errors` for a healthy GPU."""
BOGUS_RAS_COUNT = 1048560
"""An error count that is a multiple of this number is wrong. In a sleeping memory controller, all bits of the registers
are set. The driver adds these bits to the count at each query (as by rocm-smi on GPUs in runtime power management).
"""
_HANG = re.compile(r"\bring \S+ timeout(?!, but soft recovered)")
_OTHER_EVENTS = (
    ("reset", "failed", re.compile(r"GPU reset(?:\(\d+\))? failed|GPU reset end with ret|GPU Recovery Failed")),
    ("reset", "done", re.compile(r"GPU reset\(\d+\) succeeded")),
    ("reset", "begin", re.compile(r"GPU reset begin")),
    ("lost", "", re.compile(r"device lost from bus")),
    ("worn", "", re.compile(r"Saved bad pages \d+ reaches threshold")),
    ("init", "", re.compile(r"Fatal error during GPU init")),
)


def parse_amdgpu_line(text: str) -> Event:
    """Return `(kind, PCI address or "", grade, detail)` of the error in a line; `None` if the line has no error."""
    device = _DEVICE.search(text)
    address, detail = (device.group(1), text[device.end() :]) if device else ("", text)
    if ras := _RAS.search(detail):
        return ("ras", address, ras.group(2), detail) if int(ras.group(1)) % BOGUS_RAS_COUNT else None
    if _HANG.search(detail):
        return "hang", address, "", detail
    for kind, grade, pattern in _OTHER_EVENTS:
        if pattern.search(detail):
            return kind, address, grade, detail
    return None


_PCI = r"(?:PCI:)?([0-9a-fA-F:.]+)"
_XID = re.compile(rf"NVRM: Xid \({_PCI}(?: GPU-I:\d+)?(?: GPU-CI:\d+)?\)[^:]*: (\d+),\s*(.*)")
"""With MIG, the GPU instance follows the PCI address (`kernel_rc.c` of NVIDIA's open-gpu-kernel-modules)."""
_OFF_BUS = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]+): GPU has fallen off the bus")
_OFF_BUS_BEGINS = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]+)")
_OFF_BUS_ENDS = "fallen off the bus and is not responding"
_SXID = re.compile(r"nvidia-nvswitch\d*.*?: SXid \(PCI:([^)]+)\): (\d+),\s*(?:(Fatal|Non-fatal)\s*,)?\s*(.*)")
_GRADE = re.compile(r"\b(non-?)?fatal\b", re.IGNORECASE)
_OFF_BUS_CODE = 79
_OFF_BUS_LINES = 3
"""The driver reports a dead GPU in several lines. `_OFF_BUS_ENDS` is at most so many lines after the first.
"""
_XIDS_WITH_GRADE = range(144, 151)
"""The XIDs of NVLink 5, whose lines contain `fatal` or `nonfatal` (NVIDIA, XID catalogue)."""
_MAX_AGES = 5
_MAX_TEXT_CHARS = 200
_MAX_ENTRIES = 512
"""The maximum number of entries. Fewer error codes exist, so only a damaged log can exceed this number."""


class GpuErrorCounter:
    """Counts the GPU errors in the lines of a kernel log. Lines must be added in their order, with the oldest first."""

    def __init__(self) -> None:
        self.entries: dict[Key, dict[str, Any]] = {}
        self._lines = 0
        self._gpu_in_report: tuple[str, int] | None = None

    def add_line(self, text: str, age: float | None) -> bool:
        """Count the GPU error in a line, and return whether the line has one. `age` is the line's age in seconds."""
        self._lines += 1
        if "NVRM" in text:
            return self._count_xid(text, age)
        if "amdgpu" in text:
            event = parse_amdgpu_line(text)
            if event is not None:
                kind, device, grade, detail = event
                self._count((kind, device, 0, grade), detail, age, "amd")
            return event is not None
        match = _SXID.search(text) if "SXid" in text else None
        if match is None:
            return False
        device, code, word, detail = match.groups()
        grade = "" if word is None else "fatal" if word == "Fatal" else "nonfatal"
        self._count(("sxid", device.lower(), int(code), grade), detail, age)
        return True

    def _count_xid(self, text: str, age: float | None) -> bool:
        if match := _XID.search(text):
            device, code, detail = match.group(1).lower(), int(match.group(2)), match.group(3)
            word = _GRADE.search(detail) if code in _XIDS_WITH_GRADE else None
            grade = "" if word is None else "nonfatal" if word.group(1) else "fatal"
            self._count(("xid", device, code, grade), detail, age)
            return True
        device = self._find_lost_gpu(text)
        if device is not None:
            # The driver reports a lost GPU twice: with the XID and without it. Some of these lines have the PCI address
            # without the function number.
            counted = [key[1].split(".")[0] for key in self.entries if key[2] == _OFF_BUS_CODE]
            if device.split(".")[0] not in counted:
                self._count(("xid", device, _OFF_BUS_CODE, ""), "GPU has fallen off the bus", age)
        return device is not None

    def _find_lost_gpu(self, text: str) -> str | None:
        """Return the PCI address of a GPU that this line reports as lost, alone or together with earlier lines."""
        if match := _OFF_BUS.search(text):
            return match.group(1).lower()
        if match := _OFF_BUS_BEGINS.search(text):
            self._gpu_in_report = (match.group(1).lower(), self._lines)
        if _OFF_BUS_ENDS in text and self._gpu_in_report is not None:
            device, line = self._gpu_in_report
            self._gpu_in_report = None
            return device if self._lines - line <= _OFF_BUS_LINES else None
        return None

    def _count(self, key: Key, text: str, age: float | None, vendor: str = "nvidia") -> None:
        kind, device, code, grade = key
        entry = self.entries.get(key)
        if entry is None:
            if len(self.entries) >= _MAX_ENTRIES:
                return
            entry = {"vendor": vendor, "kind": kind, "device": device, "code": code, "grade": grade, "count": 0}
            entry.update({"first_age_s": age, "ages": []})
            self.entries[key] = entry
        entry["count"] += 1
        entry.update({"last_age_s": age, "order": self._lines, "text": text[:_MAX_TEXT_CHARS]})
        if age is not None:
            entry["ages"] = [*entry["ages"], age][-_MAX_AGES:]


MAX_LINES = 200
"""The maximum number of lines of the kernel log in the facts. GPU errors are counted separately."""
COMPLETE_WITHIN_S = 60.0
"""A log counts as complete if it begins within so many seconds after boot."""
_JOURNAL_TIMEOUT_S = 1.5

_RELEVANT = re.compile(
    r"blocked for more than|soft lockup|hard LOCKUP|Out of memory: Kill"
    r"|Memory cgroup out of memory|Remounting filesystem read-only|(?:I/O|medium) error, dev"
    r"|not responding, (?:still trying|timed out)|nfs: server .* OK|\[Hardware Error\]"
    r"|insufficient power on|High Temperature"
    r"|EXT4-fs error|XFS .*(?:shut down|Corruption)"
)
_DMESG_LINE = re.compile(r"^(?:<\d+>)?\[\s*(\d+\.\d+)\]\s*(.*)$")
_LOG_FILE_LINE = re.compile(r"^.*? kernel:\s*\[\s*(\d+\.\d+)\]\s*(.*)$")
_LOG_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_TAIL_BYTES = 4 << 20
_JOURNAL_LINE = re.compile(r"^\[\s*(\d+\.\d+)\]\s+\S+\s+kernel:\s*(.*)$")
_PROGRAMS = (
    ("dmesg", ["dmesg"], _DMESG_LINE),
    ("journalctl", ["journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q"], _JOURNAL_LINE),
)


def collect_kernel_log(root: str) -> dict[str, Any]:
    """Return the facts of the group `kernel_log`, from `dmesg`, else from the journal, else from the files of syslog.

    If `dmesg` has lost the beginning of this boot, the journal is read too, and the longer log is used.

    Raises:
        DeniedError: This user may read none of these logs.
        AbsentError: Neither `dmesg` nor `journalctl` is installed.
    """
    uptime = float((kernel_files.read_text(root, "/proc/uptime") or str(time.monotonic())).split()[0])
    best: dict[str, Any] | None = None
    reasons: list[str] = []
    for source, argv, pattern in _PROGRAMS:
        output, reason = _run_reader(argv, None if best is None else _JOURNAL_TIMEOUT_S)
        if output is None:
            reasons.append(reason)
            continue
        log: dict[str, Any] = {"source": source, "uptime": uptime, **filter_kernel_log(output, pattern, uptime)}
        best = log if best is None or (log["since_s"] or 0.0) > (best["since_s"] or 0.0) else best
        if best["since_s"] is None or uptime - best["since_s"] <= COMPLETE_WITHIN_S:
            break
    if best is not None:
        return best
    for name in _LOG_FILES:
        written = _read_lines_of_this_boot(root, name, uptime)
        if written:
            return {"source": name, "uptime": uptime, **filter_kernel_log(written, _LOG_FILE_LINE, uptime)}
    stated = [reason for reason in reasons if reason]
    if not stated:
        raise AbsentError("neither `dmesg` nor `journalctl` is installed")
    raise DeniedError("; ".join(stated))


def _run_reader(argv: list[str], seconds: float | None) -> tuple[str | None, str]:
    """Return the output of a program, or `None` and the reason. The reason is empty if the program is not installed."""
    try:
        code, output, complaint = syscalls.run_program(argv, seconds)
    except FileNotFoundError:
        return None, ""
    # `journalctl` prints no line if this user may not read the journal.
    if code == 0 and output.strip():
        return output, ""
    complaints = complaint.strip().splitlines()
    return None, complaints[-1] if complaints else f"{argv[0]}: nothing to read"


def _read_lines_of_this_boot(root: str, name: str, uptime: float) -> str | None:
    """Return the lines of this boot at the end of a log file, or `None` if no line belongs to this boot.

    Time stamps count from boot, so the first line with a lower time stamp belongs to a new boot.
    """
    try:
        with open(kernel_files.join_root(root, name), "rb", buffering=0) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read(_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return None
    kept: list[str] = []
    last = 0.0
    for line in tail.splitlines():
        match = _LOG_FILE_LINE.match(line)
        if not match:
            continue
        stamp = float(match.group(1))
        if stamp < last - 1.0:
            kept.clear()
        last = stamp
        kept.append(line)
    # If the last time stamp is higher than the uptime, the log ends before this boot.
    return "\n".join(kept) if kept and last <= uptime else None


def filter_kernel_log(output: str, pattern: re.Pattern[str] = _DMESG_LINE, uptime: float = 0.0) -> dict[str, Any]:
    """Return the relevant lines and the GPU errors of a kernel log (`clusterctl.agent.facts` has the format)."""
    events = GpuErrorCounter()
    kept: list[dict[str, Any]] = []
    since: float | None = None
    age: float | None = None
    for line in output.splitlines():
        match = pattern.match(line)
        # A line without a time stamp continues the previous line.
        age = age if match is None else round(max(0.0, uptime - float(match.group(1))), 1)
        since = age if since is None else since
        text = line if match is None else match.group(2)
        if not events.add_line(text, age) and _RELEVANT.search(text):
            kept.append({"age_s": age, "text": text[:400]})
    return {
        "since_s": since,
        "events": sorted(events.entries.values(), key=lambda entry: int(entry["order"])),
        "lines": kept[-MAX_LINES:],
        "dropped": max(0, len(kept) - MAX_LINES),
    }
