"""Decides which process is the rank: the first Python that claims the rank.

After the end of this Python, another Python may claim the rank.
"""

from __future__ import annotations

import fcntl
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_LEVELS = 8
_LAUNCHERS = (b"torchrun", b"accelerate", b"accelerate-launch", b"deepspeed")
_MODULES = (b"torch.distributed.run", b"torch.distributed.launch", b"accelerate.commands.launch")


def is_rank_launcher(pid: object = "self") -> bool:
    """Return whether a process is a launcher such as torchrun, which starts ranks and is not a rank itself."""
    words = _read_command(pid)
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
    return _replace_claim(status_dir, rank, lambda holder: read_start_ticks(holder[0]) != holder[1])


def take_over_claim(status_dir: str, rank: int) -> int | None:
    """Claim the rank in place of an ancestor that holds the claim and has not imported a framework.

    Returns:
        The start time of this process in ticks since boot if it has the claim now, else `None`.
    """
    # The processes of `multiprocessing` serve the script that started them.
    if any(word.startswith((b"--multiprocessing-fork", b"from multiprocessing.")) for word in _read_command()):
        return None
    return _replace_claim(status_dir, rank, lambda holder: _is_idle_ancestor(status_dir, rank, holder[0]))


def has_claim(status_dir: str, rank: int, start_time: int) -> bool:
    """Return whether this process still holds the claim, or there is no claim."""
    return _read_claim(os.path.join(status_dir, f"rank-{rank}.claim")) in (None, (os.getpid(), start_time))


def _replace_claim(status_dir: str, rank: int, can_replace: Callable[[tuple[int, int]], bool]) -> int | None:
    """Write the claim of this process if there is none, or if this process may replace the claim of the holder.

    Args:
        status_dir: The status directory of this attempt.
        rank: The global rank.
        can_replace: A function of the pid and start time of the holder.

    Returns:
        The start time of this process if it has the claim now, else `None`.
    """
    base = os.path.join(status_dir, f"rank-{rank}")
    # The lock makes reading and replacing of the claim one step, which takes microseconds. If the lock is taken,
    # another process is claiming the rank at this moment, so this process does not get it.
    lock = os.open(f"{base}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        start_time = read_start_ticks("self")
        if start_time is None:
            return None
        holder = _read_claim(f"{base}.claim")
        if holder is not None and holder != (os.getpid(), start_time) and not can_replace(holder):
            return None
        file = os.open(f"{base}.claim", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, b"%d %d\n" % (os.getpid(), start_time))
        finally:
            os.close(file)
        return start_time
    except BlockingIOError:
        return None
    finally:
        os.close(lock)


def _is_idle_ancestor(status_dir: str, rank: int, pid: int) -> bool:
    """Return whether a process has started this one, perhaps over others, and does not train itself."""
    import json

    fields, levels = _read_stat("self"), 0
    while fields is not None and int(fields[1]) != pid and levels < _MAX_LEVELS:
        fields, levels = _read_stat(int(fields[1])), levels + 1
    if fields is None or int(fields[1]) != pid:
        return False
    with open(os.path.join(status_dir, f"rank-{rank}.status.json"), encoding="ascii") as file:
        status = json.load(file)
    return status["pid"] == pid and not status["frameworks"] and not status["beats"]


def _read_claim(path: str) -> tuple[int, int] | None:
    """Return pid and start time of the holder of a claim; `None` without a claim, or if the claim is incomplete."""
    try:
        with open(path, encoding="ascii") as file:
            words = file.read().split()
    except OSError:
        return None
    return (int(words[0]), int(words[1])) if len(words) == 2 else None


def _read_command(pid: object = "self") -> list[bytes]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).split(b"\0")
    except OSError:
        return []


def read_start_ticks(pid: object) -> int | None:
    """Return the start time of a process in clock ticks since boot (proc(5), stat field 22); `None` after the end."""
    fields = _read_stat(pid)
    return None if fields is None or fields[0] in (b"Z", b"X") else int(fields[19])


def _read_stat(pid: object) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on (field 3), or `None`."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command in field 2 may contain blanks and brackets, so count fields from the last closing bracket.
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return None
