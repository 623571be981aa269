"""The files by which runs and reservations claim GPUs of a machine, and announce themselves to all its users.

`clusterctl.agent.supervisor.gpu_claims` writes these files. Each run has a folder in /var/tmp with a locked file for
each claimed GPU, and a locked file that describes the run (`get_host_file_name`). Each user may read the files of all
users, but not list the folder of another user, so this module opens the files by name.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import struct
from typing import Any, NamedTuple

from clusterctl.agent.linux import gpu_devices, proc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = "/var/tmp"  # noqa: S108, RUF100
PREFIX = "clusterctl-gpus-"
LOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
MAX_RECORD_BYTES = 4096
WAITING, RESERVATION = "waiting", "reservation"
MAX_NUMBER = 1_000_000_000
"""The highest number of a ticket. Tickets with equal numbers have an order too."""
_MAX_VALUE = 1e11
_MAX_CLAIMS_OF_USER = 64
"""The most listed claims of one user, so that nobody can hide the claims of others behind many of his own."""
_MAX_UNKNOWN_GPUS = 8
_TEXTS, _NUMBERS = ("run", "node", "kind", "name", "note", "head"), ("since", "until", "workers", "step", "step_at")


def get_host_file_name() -> str:
    """Return the name of the file that describes a run. Several machines may share a folder of claims."""
    return f"host-{proc.read_boot_id()}"


def list_gpu_file_names(root: str = "") -> dict[int, str]:
    """Return the name of the claim file of each GPU, by index; `root` is the prefix of /dev, /proc and /sys."""
    return {
        index: f"{name}-{proc.read_boot_id()}" for index, name in gpu_devices.list_machine_wide_gpu_names(root).items()
    }


def name_unknown_gpu(index: int) -> str:
    """Return the name of the claim file of a GPU whose address is unknown, because no driver is loaded."""
    return f"gpu-{index}-{proc.read_boot_id()}"


def collect_claims(root: str = "", shared: str = SHARED) -> dict[str, Any]:
    """Return the facts of the group `claims`.

    Args:
        root: Prefix of /dev, /proc and /sys.
        shared: Parent folder of the folders of all runs.
    """
    names = list_gpu_file_names("" if root == "/" else root)
    names = names or {index: name_unknown_gpu(index) for index in range(_MAX_UNKNOWN_GPUS)}
    claims: list[dict[str, Any]] = []
    counts: dict[int, int] = {}
    for entry in sorted(os.listdir(shared)):
        folder = os.path.join(shared, entry)
        if not entry.startswith(PREFIX):
            continue
        files = [(None, get_host_file_name()), *names.items()]
        found = [(gpu, info) for gpu, name in files if (info := _read_locked(folder, name)) is not None]
        if not found:
            continue
        user = found[0][1][0]
        counts[user] = counts.get(user, 0) + 1
        if counts[user] <= _MAX_CLAIMS_OF_USER:
            gpus = [gpu for gpu, _ in found if gpu is not None]
            claims.append({"user": user, "user_name": proc.find_user_name(user), "gpus": gpus, **found[0][1][1]})
    return {"claims": claims, "left_out": sum(counts.values()) - len(claims)}


def _read_locked(folder: str, name: str) -> tuple[int, dict[str, Any]] | None:
    """Return the owner and the known, cleaned fields of a claim file; `None` if no process holds its lock."""
    with open_claim(folder, name) as fd:
        if fd is None or not is_locked(fd):
            return None
        record = read_record(fd)
        fields: dict[str, Any] = {key: proc.sanitize_name(str(record[key])) for key in _TEXTS if record.get(key)}
        numbers = {key: record[key] for key in _NUMBERS if type(record.get(key)) in (int, float)}
        fields.update((key, number) for key, number in numbers.items() if 0 <= number < _MAX_VALUE)
        return os.fstat(fd).st_uid, fields


class Ticket(NamedTuple):
    """The place of a run in the line for GPUs of this machine.

    Attributes:
        number: Tickets with lower numbers come first; tickets with equal numbers come in the order of run and node.
        user: The uid of the owner.
        is_waiting: Whether the run still waits. If not, it holds its GPUs, and starts.
        wanted: Names of the GPUs' claim files, without the boot id.
    """

    number: int
    run: str
    node: str
    user: int
    is_waiting: bool
    wanted: frozenset[str]

    def is_before(self, number: int | None, run: str, node: str) -> bool:
        """Return whether this ticket comes before another one; a run without a number comes last."""
        return number is None or (self.number, self.run, self.node) < (number, run, node)


class Record(NamedTuple):
    """The description of a run or reservation that its folder of claims contains, and the uid of its owner."""

    folder: str
    user: int
    fields: dict[str, Any]

    def is_reservation_of(self, head: str) -> bool:
        """Return whether this user reserved the GPUs from this head."""
        mine = self.user == os.geteuid() and self.fields.get("head") == head != ""
        return mine and self.fields.get("kind") == RESERVATION

    @property
    def ticket(self) -> Ticket | None:
        """The ticket, if the run has waited in line."""
        number, wanted = self.fields.get("number"), self.fields.get("wanted")
        if type(number) is not int or not 0 < number <= MAX_NUMBER or not isinstance(wanted, list):
            return None
        names = str(self.fields.get("run")), str(self.fields.get("node"))
        is_waiting = self.fields.get("kind") == WAITING
        return Ticket(number, *names, self.user, is_waiting, frozenset(map(str, wanted)))


def read_folder(folder: str) -> Record | None:
    """Return the description in a folder of claims; `None` if there is none, or if its process is gone."""
    with open_claim(folder, get_host_file_name()) as fd:
        return None if fd is None or not is_locked(fd) else Record(folder, os.fstat(fd).st_uid, read_record(fd))


def list_records(shared: str = SHARED) -> list[Record]:
    """Return the descriptions of all runs and reservations of this machine."""
    folders = [os.path.join(shared, name) for name in sorted(os.listdir(shared)) if name.startswith(PREFIX)]
    return [record for folder in folders if (record := read_folder(folder)) is not None]


@contextlib.contextmanager
def open_claim(folder: str, name: str) -> Iterator[int | None]:
    """Open a claim file; yield `None` if it is unreadable, is no plain file, or has another owner than its folder."""
    try:
        fd = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        file, above = os.fstat(fd), os.lstat(folder)
        plain = stat.S_ISREG(file.st_mode) and stat.S_ISDIR(above.st_mode) and file.st_uid == above.st_uid
        yield fd if plain else None
    finally:
        os.close(fd)


def is_locked(fd: int) -> bool:
    """Return whether a process holds the write lock of a file; only the owner of the file can take this lock."""
    query = LOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = LOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, query))[0]
    return kind != fcntl.F_UNLCK


def read_record(fd: int) -> dict[str, Any]:
    """Return the JSON object in a claim file; empty if there is none."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(os.pread(fd, MAX_RECORD_BYTES, 0))
        if isinstance(value, dict):
            return value
    return {}
