"""Claims on the GPUs of a machine, and the wait until the memory of GPUs is free.

Each run has a folder in /var/tmp with one locked file per claimed GPU.

On every machine, /var/tmp belongs to root and is sticky. Only root and the owner of a file can remove the file or lock
it for writing. A file claims a GPU only while a process of its owner holds the lock. Containers that share /var/tmp
share the claims, even if they have their own /proc and /sys.

A lock belongs to the open file, and lasts while a supervisor or a waiter of the run has a descriptor of that open file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import secrets
import stat
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from clusterctl.agent.facts.claim_files import (
    LOCK,
    MAX_NUMBER,
    MAX_RECORD_BYTES,
    PREFIX,
    RESERVATION,
    SHARED,
    WAITING,
    Record,
    Ticket,
    get_host_file_name,
    is_locked,
    list_gpu_file_names,
    name_unknown_gpu,
    open_claim,
    read_folder,
    read_record,
)
from clusterctl.agent.linux import helper_process, proc

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from clusterctl.agent.linux.event_loop import EventLoop

_ROOT = 0
_MAX_NAME_LENGTH = 100
_TRIES = 5
_PAUSE_S = 0.02


class GpuClaimError(Exception):
    """Another run holds a GPU, or a claim failed; the message is one line."""


class QueueView(NamedTuple):
    """What a run has to wait for on this machine.

    Attributes:
        holders: A sentence for each run or reservation that holds a wanted GPU.
        ahead: The runs that wait for a wanted GPU and come before this run, in their order.
        highest: The highest number of a ticket on this machine, for any GPU; 0 without tickets.
    """

    holders: list[str]
    ahead: list[str]
    highest: int


class GpuClaims:
    """The GPUs that a run has claimed on this node.

    Args:
        run: Name of the run, which messages of other runs show.
        node: Name of the node, which messages of other runs show.
        shared: Parent folder of the folders of all runs.
        waiters: Function that returns the pids of the run's waiters. Waiters hold the claims if the supervisor has
            died.
        root: Prefix of /dev, /proc and /sys.
        head: Host name of the head; the run may use what the same user has reserved from there.
    """

    def __init__(
        self,
        run: str,
        node: str,
        shared: str = SHARED,
        waiters: Callable[[], Iterable[int]] = tuple,
        root: str = "",
        head: str = "",
    ) -> None:
        self.head = head
        self._run, self._node, self._shared = run, node, shared
        self._waiter_pids, self._root = waiters, root
        self._locks: dict[str, int] = {}
        self._details: dict[str, object] = {}
        self._number: int | None = None
        self._folder = ""
        self._folder_locks: list[int] = []

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the locked files. Waiters inherit these descriptors and so hold the locks too."""
        return [*self._locks.values(), *self._folder_locks]

    @property
    def paths(self) -> list[str]:
        """Paths of the locked files."""
        return [os.path.join(self._folder, name) for name in self._locks]

    def claim(self, gpu_indices: Iterable[int]) -> set[str]:
        """Claim GPUs that this object has not claimed yet; return the names of the new claims, for `release`.

        Raises:
            GpuClaimError: Another run, or another node of this run, holds one of the GPUs, or waits for it before this
                run. All new claims are then released.
        """
        before = set(self._locks)
        try:
            for name, index in self._name_gpus(gpu_indices).items():
                if name not in self._locks:
                    self._claim_gpu(name, index)
        except BaseException as error:
            self.release(set(self._locks) - before)
            if isinstance(error, OSError):
                raise GpuClaimError(f"cannot claim GPUs in {self._shared}: {error.strerror}") from error
            raise
        return set(self._locks) - before

    def _name_gpus(self, gpu_indices: Iterable[int]) -> dict[str, int]:
        names = list_gpu_file_names(self._root)
        return {names.get(index) or name_unknown_gpu(index): index for index in gpu_indices}

    def _claim_gpu(self, name: str, index: int) -> None:
        """Lock a file of this run, then check the files of all other runs, so that at most one run gets the GPU."""
        _check_folder(self._shared)
        holder: str | None = None
        for tries in range(_TRIES):
            if not self._folder:
                self._make_folder()
            self._locks[name] = self._lock_file(os.path.join(self._folder, name))
            holder = self._find_holder(name, index)
            if holder is None:
                return
            self.release([name])
            # Two runs that claim a GPU at the same time refuse each other; the first run that retries gets the GPU.
            time.sleep(random.uniform(0, _PAUSE_S * (tries + 1)))
        raise GpuClaimError(holder)

    def _make_folder(self) -> None:
        """Make and lock the folder of this run. Other runs remove unlocked folders of ended runs."""
        name = f"{PREFIX}{secrets.token_hex(8)}"
        hidden, self._folder = os.path.join(self._shared, f".{name}"), os.path.join(self._shared, name)
        os.mkdir(hidden, 0o700)
        folder = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._folder_locks = [folder]
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        os.chmod(hidden, 0o711)
        os.rename(hidden, self._folder)

    def _lock_file(self, path: str) -> int:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT, 0o600)
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            with contextlib.suppress(OSError):
                self._write_record(fd, {})
            os.fchmod(fd, 0o644)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _write_record(self, fd: int, details: Mapping[str, object]) -> None:
        record = json.dumps({"run": self._run, "node": self._node, "pid": os.getpid(), **details}).encode()
        # All records have one size, so a reader never sees the end of an older, longer record.
        os.pwrite(fd, record.ljust(MAX_RECORD_BYTES), 0)

    def announce(self, details: Mapping[str, object]) -> None:
        """Describe this run to all users of the machine, also if it claims no GPU; a later call adds details.

        `who` shows the details: `kind` (`run`, `reservation` or `waiting`), `name`, `since`, `until`, `note`, `head`,
        `workers`, `step` and `step_at`. A run works without a description, so no error is raised.
        """
        with contextlib.suppress(OSError, GpuClaimError):
            self._describe_run(details)

    def _describe_run(self, details: Mapping[str, object]) -> None:
        name = get_host_file_name()
        self._details.update(details)
        if name not in self._locks:
            _check_folder(self._shared)
            if not self._folder:
                self._make_folder()
            self._locks[name] = self._lock_file(os.path.join(self._folder, name))
        self._write_record(self._locks[name], self._details)

    # --- the line of those who wait

    def take_ticket(self, number: int, gpu_indices: Iterable[int], details: Mapping[str, object]) -> None:
        """Wait in line for GPUs, and give back claims on them. The ticket lasts as long as this process.

        Raises:
            GpuClaimError: The ticket cannot be written.
        """
        self.release(set(self._locks) - {get_host_file_name()}, keep_folder=True)
        self._number = number
        wanted = [_strip_boot_id(name) for name in self._name_gpus(gpu_indices)]
        try:
            self._describe_run({**details, "kind": WAITING, "number": number, "wanted": wanted})
        except OSError as error:
            raise GpuClaimError(f"cannot wait in line in {self._shared}: {error.strerror}") from error

    def survey(self, gpu_indices: Iterable[int]) -> QueueView:
        """Return what this run has to wait for.

        Raises:
            GpuClaimError: Other users could remove claims in the folder, or another node of this run wants these GPUs.
        """
        _check_folder(self._shared)
        names = self._name_gpus(gpu_indices)
        holders: dict[str, str] = {}
        tickets: list[Ticket] = []
        granted: set[str] = set()
        for folder in self._list_other_folders():
            record = read_folder(folder)
            tickets += [ticket] if record is not None and (ticket := record.ticket) is not None else []
            for name, index in names.items():
                with open_claim(folder, name) as fd:
                    if fd is None or not is_locked(fd):
                        continue
                    if self._is_mine(record, fd):
                        granted.add(name)
                    else:
                        holders.setdefault(folder, _describe_holder(index, fd, folder, name))
        ahead = sorted(ticket for ticket in tickets if self._is_blocked_by(ticket, names.keys() - granted))
        if any((ticket.run, ticket.user) == (self._run, os.geteuid()) for ticket in ahead):
            raise GpuClaimError("another node of this run is on this machine, and wants the same GPUs")
        # A run takes the next number. Above the limit it would have no ticket, so it shares the highest number then.
        highest = min(max((ticket.number for ticket in tickets), default=0), MAX_NUMBER - 1)
        return QueueView([*holders.values()], [_describe_ticket(ticket) for ticket in ahead], highest)

    def _is_blocked_by(self, ticket: Ticket, names: Collection[str]) -> bool:
        return (
            ticket.is_waiting
            and (ticket.run, ticket.node, ticket.user) != (self._run, self._node, os.geteuid())
            and ticket.is_before(self._number, self._run, self._node)
            and any(_strip_boot_id(name) in ticket.wanted for name in names)
        )

    def _is_mine(self, record: Record | None, fd: int) -> bool:
        """Return whether this run holds a locked file, or may use it.

        After a restart of the supervisor, the waiters still hold locks. Before the first attempt, the session of a run
        that has waited in line holds them. A reservation is for the runs of the same user and head.
        """
        if any(_has_file_open(pid, fd) for pid in self._waiter_pids()):
            return True
        ticket = None if record is None else record.ticket
        is_session = ticket is not None and ticket[1:4] == (self._run, self._node, os.geteuid())
        return is_session or (record is not None and record.is_reservation_of(self.head))

    def _list_other_folders(self) -> Iterator[str]:
        """Yield the folders of the other runs; remove folders of the user's ended runs."""
        for entry in sorted(os.listdir(self._shared)):
            folder = os.path.join(self._shared, entry)
            if entry.startswith(PREFIX) and folder != self._folder and not _remove_if_unused(folder):
                yield folder

    def _find_holder(self, name: str, index: int) -> str | None:
        """Return a text about another run that has locked a GPU, or waits for it before this run; else `None`."""
        is_granted, ahead = False, None
        for folder in self._list_other_folders():
            record = read_folder(folder)
            with open_claim(folder, name) as fd:
                if fd is not None and is_locked(fd):
                    if not self._is_mine(record, fd):
                        return _describe_holder(index, fd, folder, name)
                    is_granted = True
            ticket = None if record is None else record.ticket
            if ticket is not None and self._is_blocked_by(ticket, [name]):
                ahead = f"{_describe_ticket(ticket)} waits for GPU {index}; with `--wait`, this run waits behind it"
        return None if is_granted else ahead

    def release(self, claim_names: Iterable[str] | None = None, *, keep_folder: bool = False) -> None:
        """Release claims, by default all. A waiter that has inherited the descriptor of a claim keeps the lock."""
        for name in set(self._locks if claim_names is None else claim_names):
            os.close(self._locks.pop(name))
            with open_claim(self._folder, name) as fd:
                if fd is not None and not is_locked(fd):
                    os.unlink(os.path.join(self._folder, name))
        if not self._locks and not keep_folder:
            self._close_folder()

    def _close_folder(self) -> None:
        while self._folder_locks:
            os.close(self._folder_locks.pop())
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)
        self._folder = ""


def _remove_if_unused(folder: str) -> bool:
    """Remove a claims folder of this user if no process has locked it; return whether it was removed."""
    with contextlib.suppress(OSError):
        info = os.lstat(folder)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            return False
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(fd):
                os.unlink(name, dir_fd=fd)
            os.rmdir(folder)
        finally:
            os.close(fd)
        return True
    return False


def _has_file_open(pid: int, fd: int) -> bool:
    """Return whether a process has the file of a descriptor open."""
    wanted, base = os.fstat(fd), f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(base):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"{base}/{name}"), wanted):
                    return True
    return False


def _strip_boot_id(name: str) -> str:
    return name[: -len(proc.read_boot_id()) - 1]


def _describe_ticket(ticket: Ticket) -> str:
    other = f" of {proc.find_user_name(ticket.user)}" if ticket.user != os.geteuid() else ""
    return f"run {_format_name(ticket.run)}{other}"


def _describe_holder(index: int, fd: int, folder: str, name: str) -> str:
    """Describe the holder of a GPU: the owner of the locked file, and the run or reservation that the folder names."""
    user, record, about = os.fstat(fd).st_uid, read_record(fd), read_folder(folder)
    owner = proc.find_user_name(user)
    if not record.get("run"):
        path = os.path.join(folder, name)
        return f"GPU {index} is locked by {owner}, whose claim names no run: as root, `fuser -k {path}` frees the GPU"
    if about is not None and about.fields.get("kind") == RESERVATION:
        until, note = about.fields.get("until"), _format_name(about.fields.get("note") or "")
        end = (
            time.strftime(" until %Y-%m-%d %H:%M", time.localtime(until))
            if type(until) is int and 0 < until < 1 << 40
            else ""
        )
        return f"GPU {index} is reserved by {owner}{end}" + (f": {note}" if note else "")
    node = f" (node {_format_name(record['node'])})" if record.get("node") else ""
    other = f" of {owner}" if user != os.geteuid() else ""
    return f"GPU {index} is held by run {_format_name(record['run'])}{other}{node}"


def _format_name(value: object) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(value)[:_MAX_NAME_LENGTH])


def _check_folder(folder: str) -> None:
    """Check that no other user can remove claims in a folder.

    Raises:
        GpuClaimError: Another user can remove claims in the folder.
    """
    info = os.lstat(folder)
    remedy = f"as root, `chown root {folder}; chmod 1777 {folder}` prevents that"
    if not stat.S_ISDIR(info.st_mode):
        raise GpuClaimError(f"{folder} is not a directory")
    if info.st_uid not in (_ROOT, os.getuid()):
        raise GpuClaimError(f"{folder} belongs to uid {info.st_uid}, who could remove claims: {remedy}")
    if info.st_mode & 0o022 and not info.st_mode & stat.S_ISVTX:
        raise GpuClaimError(f"every user could remove claims in {folder}: {remedy}")


# --- memory

_GPU_WAIT_S = 10.0
"""Maximum seconds of the wait until GPU memory is free."""
_FIRST_ANSWER_S = 6.0
"""Timeout in seconds for the GPU driver's first answer, which comes soon: the sampler keeps the driver loaded."""
_GPU_WAIT_SLACK_S = 5.0
_GIB = 1024**3


def wait_for_gpu_memory(
    loop: EventLoop,
    gpus: list[int],
    run: str,
    on_message: Callable[[str, int | None], None],
    on_done: Callable[[], None],
) -> None:
    """Wait until the memory of GPUs is free, in a child process because the GPU driver may hang.

    Args:
        loop: The event loop that calls `on_message` and `on_done`.
        gpus: Indices of the GPUs.
        run: The run that has used the GPUs.
        on_message: Called with a text and the GPU index for each GPU that is not free in time. If an error occurs, it
            is called with the text of the error and `None`.
        on_done: Called when the wait is over.
    """
    try:
        pid, fd = helper_process.start_agent_command("gpu-memory-wait", ",".join(map(str, gpus)), str(_GPU_WAIT_S), run)
    except OSError as error:
        on_message(f"cannot check whether GPU memory is free: {error.strerror}", None)
        on_done()
        return
    output = b""

    def end(messages: list[tuple[str, int | None]]) -> None:
        loop.remove_descriptor(fd)
        os.close(fd)
        for message, gpu in messages:
            on_message(message, gpu)
        on_done()

    def time_out() -> None:
        helper_process.kill_helper(pid)
        end([("cannot check whether GPU memory is free: the GPU driver does not answer", None)])

    timer = loop.call_later(_FIRST_ANSWER_S, time_out)

    def read() -> None:
        nonlocal output, timer
        data = os.read(fd, 65536)
        timer.cancel()
        output += data
        if data:
            timer = loop.call_later(_GPU_WAIT_S + _GPU_WAIT_SLACK_S, time_out)
        else:
            end(_parse_gpu_messages(output))

    loop.on_readable(fd, read)


def _parse_gpu_messages(output: bytes) -> list[tuple[str, int | None]]:
    try:
        answer = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        return [("cannot check whether GPU memory is free: the process that checks it has died", None)]
    if answer["status"] == "error":
        return [(f"cannot check whether GPU memory is free: {answer['reason']}", None)]
    return [(_format_gpu_message(gpu), int(gpu["gpu"])) for gpu in answer["gpus"]]


def _format_gpu_message(gpu: dict[str, Any]) -> str:
    sizes = f"{gpu['used'] / _GIB:.1f} of {gpu['total'] / _GIB:.0f} GiB still in use"
    if not gpu["procs"]:
        return f"{sizes}; the driver names no process that uses it"
    return f"{sizes}, held by {', '.join(map(_format_gpu_process, gpu['procs'][:4]))}"


def _format_gpu_process(process: dict[str, Any]) -> str:
    if not process["visible"]:
        return f"pid {process['pid']}, which is not visible here (in a container, or of another user)"
    run = f", run {process['run']}" if process["run"] else ""
    return f"pid {process['pid']} ({process['comm']}, {proc.find_user_name(process['user'])}{run})"
