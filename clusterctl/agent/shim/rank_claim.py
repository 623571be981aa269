"""Decides which process is the rank: the first Python that claims the rank.

After the end of this Python, another Python may claim the rank.
"""

from __future__ import annotations

import fcntl
import os
import sys

_MAX_LEVELS = 8
_LAUNCHERS = (b"torchrun", b"accelerate", b"accelerate-launch", b"deepspeed")
_MODULES = (b"torch.distributed.run", b"torch.distributed.launch", b"accelerate.commands.launch")


def is_rank_launcher(pid: object = "self") -> bool:
    """Return whether a process is a launcher such as torchrun, which starts ranks and is not a rank itself."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).split(b"\0")
    except OSError:
        return False
    script = next((word for word in words[1:] if not word.startswith(b"-")), b"")
    return os.path.basename(script) in _LAUNCHERS or (b"-m" in words and script in _MODULES)


def claim_rank(status_dir: str, rank: int) -> int | None:
    """Claim the rank for this process.

    A child of the rank cannot claim the rank, because the living parent has the claim. A training script can replace
    the claim of an ended helper of the prologue. A process that has replaced itself by exec still has its own claim.

    Args:
        status_dir: The status directory of this attempt.
        rank: The global rank.

    Returns:
        The start time of this process in ticks since boot if it has the claim, else `None`.
    """
    base = os.path.join(status_dir, f"rank-{rank}")
    # The lock makes reading and replacing of the claim one step, which takes microseconds. If the lock is taken,
    # another process is claiming the rank at this moment, so this process does not get it.
    lock = os.open(f"{base}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start_time = read_start_ticks("self")
        if start_time is None or _is_claimed_by_another(f"{base}.claim", (os.getpid(), start_time)):
            return None
        return start_time
    except BlockingIOError:
        return None
    finally:
        os.close(lock)


def take_over_claim(status_dir: str, rank: int) -> int | None:
    """Claim the rank in place of an ancestor that holds the claim and has not imported a framework.

    Returns:
        The start time of this process in ticks since boot if it has the claim now, else `None`.
    """
    import json

    base = os.path.join(status_dir, f"rank-{rank}")
    holder, start_time = _read_claim(f"{base}.claim"), read_start_ticks("self")
    if start_time is None or "--multiprocessing-fork" in sys.argv or not _is_ancestor(holder[0]):
        return None
    with open(f"{base}.status.json", encoding="ascii") as file:
        status = json.load(file)
    if status["pid"] != holder[0] or status["frameworks"] or status["beats"]:
        return None
    _write_claim(f"{base}.claim", (os.getpid(), start_time))
    return start_time


def has_claim(status_dir: str, rank: int, start_time: int) -> bool:
    """Return whether this process still holds the claim, or the claim cannot be read."""
    try:
        return _read_claim(os.path.join(status_dir, f"rank-{rank}.claim")) == (os.getpid(), start_time)
    except OSError:
        return True


def _is_ancestor(pid: int) -> bool:
    parent: object = "self"
    for _ in range(_MAX_LEVELS):
        with open(f"/proc/{parent}/stat", "rb") as file:
            parent = int(file.read().rpartition(b")")[2].split()[1])
        if parent == pid:
            return True
    return False


def _read_claim(path: str) -> tuple[int, int]:
    with open(path, encoding="ascii") as file:
        words = file.read().split()
    return (int(words[0]), int(words[1])) if len(words) == 2 else (0, 0)


def _write_claim(path: str, identity: tuple[int, int]) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, b"%d %d\n" % identity)
    finally:
        os.close(file)


def _is_claimed_by_another(path: str, own_identity: tuple[int, int]) -> bool:
    try:
        holder = _read_claim(path)
    except FileNotFoundError:
        holder = (0, 0)
    if holder != own_identity and holder[0] > 0 and read_start_ticks(holder[0]) == holder[1]:
        return True
    _write_claim(path, own_identity)
    return False


def read_start_ticks(pid: object) -> int | None:
    """Return the start time of a process in clock ticks since boot (proc(5), stat field 22); `None` after the end."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in field 2 may contain blanks and brackets, so count fields from the last closing bracket.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
