"""Decides which process is the rank: the first Python that claims it, until that process has ended."""

from __future__ import annotations

import fcntl
import os

_LAUNCHERS = (b"torchrun", b"accelerate", b"accelerate-launch", b"deepspeed")
_MODULES = (b"torch.distributed.run", b"torch.distributed.launch", b"accelerate.commands.launch")


def is_launcher(pid: object = "self") -> bool:
    """Return whether a Python only starts the ranks, each with a RANK of its own."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")
    except OSError:
        return False
    script = next((word for word in words[1:] if not word.startswith(b"-")), b"")
    return os.path.basename(script) in _LAUNCHERS or (b"-m" in words and script in _MODULES)


def claim_rank(status_dir: str, rank: int) -> int | None:
    """Claim the rank for this process.

    A child finds its living parent's claim and gets nothing. The training script after a helper of the prologue finds
    the claim of an ended process and takes over. A process that replaced itself by exec finds its own claim.

    Args:
        status_dir: One directory per attempt, so an earlier attempt's claims do not count.
        rank: The global rank.

    Returns:
        This process's start time in ticks since boot if the rank is ours, else `None`.
    """
    base = os.path.join(status_dir, f"rank-{rank}")
    # The lock makes "read, then replace" one step. It is held for microseconds, so a process that finds it locked has
    # lost.
    lock = os.open(f"{base}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start_time = read_start_ticks("self")
        if start_time is None or _is_taken(f"{base}.claim", (os.getpid(), start_time)):
            return None
        return start_time
    except BlockingIOError:
        return None
    finally:
        os.close(lock)


def _is_taken(path: str, ours: tuple[int, int]) -> bool:
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        with open(path, encoding="ascii") as existing:
            words = existing.read().split()
        holder = (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)
        if holder != ours and holder[0] > 0 and read_start_ticks(holder[0]) == holder[1]:
            return True
        file = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
    try:
        os.write(file, b"%d %d\n" % ours)
    finally:
        os.close(file)
    return False


def read_start_ticks(pid: object) -> int | None:
    """Return the start of a process in clock ticks since boot (proc(5), stat field 22); `None` if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in field 2 may hold blanks and brackets, so count from the last closing bracket.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
