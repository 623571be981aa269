"""Information about processes from `/proc`: identity, state, user, environment, limits and command line."""

from __future__ import annotations

import errno
import functools
import os
import signal
import time

from clusterctl.agent.linux.syscalls import read_boot_time, read_or_empty
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@functools.lru_cache(maxsize=1)
def read_boot_id() -> str:
    """Return the id of this boot of the machine."""
    return read_or_empty("/proc/sys/kernel/random/boot_id").decode().strip()


@functools.lru_cache(maxsize=1)
def read_pid_namespace() -> str:
    """Return the id of this process's pid namespace, `pid:[…]`."""
    return read_namespace("pid")


def read_namespace(kind: str) -> str:
    """Return the id of a namespace of this process, or "" if it cannot be read; `kind` is `pid`, `net`, …."""
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@frozen_dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process; a later process with the same pid has another start time.

    Attributes:
        pid: The pid in the namespace of this process.
        start_time: Clock ticks from boot to the start of the process (`/proc/PID/stat`, field 22).
    """

    pid: int
    start_time: int


@frozen_dataclass(frozen=True)
class ProcessStat:
    """The fields of `/proc/PID/stat`; see proc_pid_stat(5)."""

    pid: int
    comm: str
    state: str
    ppid: int
    pgid: int
    sid: int
    flags: int
    ticks: int
    threads: int
    start_time: int
    faults: int = 0

    @property
    def identity(self) -> ProcessIdentity:
        """Pid and start time of the process."""
        return ProcessIdentity(self.pid, self.start_time)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended. A zombie with other running threads has not ended."""
        return self.state in "ZX" and self.threads <= 1

    @property
    def is_kernel_thread(self) -> bool:
        """Whether the process is a kernel thread."""
        return bool(self.flags & _PF_KTHREAD)


def parse_stat(data: bytes) -> ProcessStat | None:
    """Parse the content of `/proc/PID/stat`; `None` if it is incomplete."""
    head, bracket, tail = data.rpartition(b")")
    fields = tail.split()
    if not bracket or len(fields) < 20:
        return None
    pid, _, comm = head.partition(b" (")
    numbers = [int(field) for field in fields[1:20]]
    return ProcessStat(
        pid=int(pid),
        comm=sanitize_name(comm.decode("utf-8", "replace")),
        state=fields[0].decode(),
        ppid=numbers[0],
        pgid=numbers[1],
        sid=numbers[2],
        flags=numbers[5],
        ticks=numbers[10] + numbers[11],
        threads=numbers[16],
        start_time=numbers[18],
        faults=numbers[8],
    )


def sanitize_name(text: str) -> str:
    """Return at most 200 characters of a process name, with `?` for each unprintable character.

    Any user of a node can choose the name of a process, and a terminal on the head shows the name.
    """
    text = text[:200]
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)


def read_stat(pid: int, root: str = "") -> ProcessStat | None:
    """Return the fields of `/proc/PID/stat`, or `None` if no such process exists; `root` is the prefix of /proc.

    Raises:
        OSError: No descriptor is free, so it is unknown whether the process exists.
    """
    try:
        with open(f"{root.rstrip('/')}/proc/{pid}/stat", "rb", buffering=0) as file:
            return parse_stat(file.read())
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise
        return None


def read_identity(pid: int) -> ProcessIdentity | None:
    """Return the identity of the process that has the pid now, or `None`."""
    process = read_stat(pid)
    return None if process is None else process.identity


def is_alive(identity: ProcessIdentity) -> bool:
    """Return whether the process with this pid and start time still runs."""
    process = read_stat(identity.pid)
    return process is not None and process.start_time == identity.start_time and not process.is_gone


def list_pids() -> Iterator[int]:
    """Yield the pids of all processes in the pid namespace of this process."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def read_uid(pid: int) -> int | None:
    """Return the effective uid of a process."""
    words = read_status_field(f"/proc/{pid}", "Uid")
    return int(words[1]) if words else None


def read_status_field(folder: str, name: str) -> list[bytes]:
    """Return the words of a field in the file `status` of a process or thread; an empty list if it cannot be read."""
    lines = (line.split() for line in read_or_empty(f"{folder}/status").splitlines())
    return next((words[1:] for words in lines if words and words[0] == name.encode() + b":"), [])


def find_user_name(uid: int) -> str:
    """Return the name of a user from /etc/passwd, or a text such as `uid 1000`.

    `pwd.getpwuid` is not used, because it may query a directory service, which may hang.
    """
    for line in read_or_empty("/etc/passwd", 4 << 20).decode("utf-8", "replace").splitlines():
        name, _, rest = line.partition(":")
        if rest.split(":")[1:2] == [str(uid)] and name.isprintable():
            return name
    return f"uid {uid}"


def read_environment(pid: int) -> dict[bytes, bytes]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    pairs = (entry.partition(b"=") for entry in read_or_empty(f"/proc/{pid}/environ", 4 << 20).split(b"\0"))
    return {name: value for name, equals, value in pairs if equals}


def read_meminfo(root: str = "") -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes, by name; `root` is the prefix of /proc."""
    lines = (
        line.split()
        for line in read_or_empty(f"{root.rstrip('/')}/proc/meminfo").decode("ascii", "replace").splitlines()
    )
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[1:] and words[1].isdigit()}


def has_resource_limit(pid: int, value: int) -> bool:
    """Return whether any resource limit of a process has exactly this value."""
    return b"%d" % value in read_or_empty(f"/proc/{pid}/limits").split()


def read_command(pid: int) -> str:
    """Return the command line of a process as printable text of at most 200 characters."""
    line = read_or_empty(f"/proc/{pid}/cmdline", 4096).rstrip(b"\0").replace(b"\0", b" ")
    if not line:
        process = read_stat(pid)
        return "" if process is None else f"[{process.comm}]"
    return sanitize_name(line.decode("utf-8", "replace"))


def read_wait_channel(pid: int, root: str = "") -> str:
    """Return the kernel function in which a process waits, or "" if it is unknown; `root` is the prefix of /proc."""
    function = read_or_empty(f"{root.rstrip('/')}/proc/{pid}/wchan").decode("ascii", "replace").strip()
    return "" if function == "0" else function


def find_lock_holder(pid: int) -> int | None:
    """Return the process that took the lock of a file for which a process waits; `None` if it waits for none.

    The kernel names the process that took the lock, also if only a process that inherited the file still has it. It
    names only processes in the PID namespace of the agent. Source: `proc_locks(5)`.
    """
    holder = None
    for line in read_or_empty("/proc/locks").split(b"\n")[:-1]:  # Without a last line that is cut.
        words = line.split()
        if b"->" not in words:
            holder = int(words[4])
        elif int(words[5]) == pid:
            return holder if holder and holder > 0 else None
    return None


def is_exiting(stat: ProcessStat) -> bool:
    """Return whether the process is exiting: the kernel has begun to free its resources."""
    return bool(stat.flags & _PF_EXITING)


def is_exiting_unblocked(stat: ProcessStat) -> bool:
    """Return whether the process is exiting and no thread is in an uninterruptible wait, so that it will end."""
    base = f"/proc/{stat.pid}/task"
    try:
        names = os.listdir(base) if is_alive(stat.identity) else []
    except OSError:
        names = []
    threads = [thread for name in names if (thread := parse_stat(read_or_empty(f"{base}/{name}/stat"))) is not None]
    return all(thread.state in "ZX" or (is_exiting(thread) and thread.state != "D") for thread in threads)


def is_dying(identity: ProcessIdentity) -> bool:
    """Return whether a process has ended, is exiting, or has a pending SIGKILL.

    An exit can take long. The kernel first frees memory, closes devices and sockets, and ends other threads; only then
    can the parent see the exit. Peers see the closed sockets before the parent sees the exit.
    """
    if not is_alive(identity):
        return True
    try:
        tasks = os.listdir(f"/proc/{identity.pid}/task")
    except OSError:
        return True
    # Check the main thread first, because its answer is enough for nearly all processes.
    return all(_is_thread_dying(f"/proc/{identity.pid}/task/{task}") for task in sorted(tasks, key=int))


def _is_thread_dying(path: str) -> bool:
    thread = parse_stat(read_or_empty(f"{path}/stat"))
    if thread is None or thread.state in "ZX" or is_exiting(thread):
        return True
    pending = read_status_field(path, "SigPnd")
    return bool(pending) and bool(int(pending[0], 16) & 1 << (signal.SIGKILL - 1))


def convert_to_ticks(monotonic_s: float) -> int:
    """Convert a monotonic time to clock ticks since boot, the unit of `ProcessIdentity.start_time`."""
    return int((read_boot_time() - time.monotonic() + monotonic_s) * TICKS_PER_SECOND)


def read_run_delay(pid: int | str = "self") -> float | None:
    """Return how many seconds the main thread of a process was runnable but had no processor; `None` if unknown."""
    fields = read_or_empty(f"/proc/{pid}/schedstat").split()
    return int(fields[1]) / 1e9 if len(fields) >= 2 else None


def list_process_tree(root_pid: int, processes: dict[int, ProcessStat]) -> list[ProcessStat]:
    """Return a process, its descendants and the members of its POSIX session, parents before children."""
    children: dict[int, list[ProcessStat]] = {}
    for process in processes.values():
        children.setdefault(process.ppid, []).append(process)
    starts = [processes[root_pid]] if root_pid in processes else []
    starts += [process for process in processes.values() if process.sid == root_pid and process.pid != root_pid]
    members: dict[int, ProcessStat] = {}
    while starts:
        process = starts.pop(0)
        if process.pid not in members:
            members[process.pid] = process
            starts.extend(children.get(process.pid, ()))
    return list(members.values())


def read_all_processes() -> dict[int, ProcessStat]:
    """Return the present processes of this pid namespace, by pid."""
    processes = (read_stat(pid) for pid in list_pids())
    return {process.pid: process for process in processes if process is not None}
