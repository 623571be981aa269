"""Captures the Python stacks of a process by its shim, otherwise by py-spy.

The shim's thread dumps the stacks while it holds the GIL. If this thread is silent, because C code holds the GIL, the
agent sends the signal that the shim has registered. While other threads run Python code, the signal could end the
process (see `shim/stack_dumper.py`).

The signal is sent only if the process catches this signal, the ready file names exactly this process, and the
descriptor still belongs to the stacks file. Otherwise the signal could kill a process or write into a user's file. The
signal goes to the shim's own thread. In another thread the signal would interrupt a blocking call with EINTR, which
torch's store would report as an error.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.agent.inject.shim_files import get_shim_thread_id, read_stack_dump_offer, read_status
from clusterctl.agent.linux import proc, syscalls
from clusterctl.agent.linux.syscalls import read_or_empty

if TYPE_CHECKING:
    from clusterctl.agent.protocol.record_types import StackDumpOffer

_POLL_S = 0.02
_DUMP_SETTLED_S = 0.06
_DUMP_S = 1.0
_SHIM_S = 2.5
"""The shim's thread runs once a second. If it has not run for this many seconds, it cannot run."""
_PY_SPY_S = 2.0
_MAX_BYTES = 4 << 20
_TGKILL = {"x86_64": 234, "aarch64": 131}


@dataclass(frozen=True)
class StackDump:
    """The stacks of a process.

    Attributes:
        source: `shim` or `signal` (text of faulthandler), `py-spy` (JSON of py-spy) or `proc` (no stacks).
        text: The raw dump.
        main_thread: The id of the main thread in a dump of faulthandler.
        why: The reasons why better sources have failed, in order.
    """

    source: str
    text: str = ""
    main_thread: int | None = None
    why: tuple[str, ...] = ()


class NoStacksError(Exception):
    """A source of stacks has failed. The text of the exception is the reason."""


def find_py_spy(pid: int) -> str:
    """Return the py-spy on PATH, or the py-spy in the folder of the process's interpreter.

    Raises:
        NoStacksError: The node has no py-spy.
    """
    interpreter = read_or_empty(f"/proc/{pid}/cmdline", 4096).partition(b"\0")[0].decode("utf-8", "replace")
    beside = os.path.join(os.path.dirname(interpreter), "py-spy") if os.path.isabs(interpreter) else ""
    program = shutil.which("py-spy") or shutil.which(beside)
    if program is None:
        raise NoStacksError("not installed on this node")
    return program


def capture_stacks(pid: int, status_dir: str, rank: int, deadline: float) -> StackDump:
    """Capture the stacks of the process that is a rank.

    Args:
        pid: The pid of the process.
        status_dir: The folder with the ready file of the shim, if the process has a shim.
        rank: The global rank.
        deadline: The `time.monotonic()` until which this function waits.
    """
    try:
        return _dump_by_faulthandler(pid, status_dir, rank, deadline)
    except (NoStacksError, OSError) as error:
        why = f"signal: {getattr(error, 'strerror', None) or error}"
    try:
        return StackDump("py-spy", _dump_by_py_spy(pid, deadline), why=(why,))
    except (NoStacksError, OSError) as error:
        return StackDump("proc", why=(why, f"py-spy: {getattr(error, 'strerror', None) or error}"))


def find_signal_obstacle(offer: StackDumpOffer, stacks_path: str) -> str | None:
    """Return the reason why the signal must not be sent, or `None` if the signal may be sent.

    Args:
        offer: The content of the ready file.
        stacks_path: The file that gets the dump.
    """
    pid, number = offer["pid"], offer["signal"]
    caught = proc.read_status_field(f"/proc/{pid}", "SigCgt")
    if not caught or not int(caught[0], 16) >> (number - 1) & 1:
        return f"signal {number} is not caught"
    try:
        expected, actual = os.stat(stacks_path), os.stat(f"/proc/{pid}/fd/{offer['fd']}")
    except OSError as error:
        return f"descriptor {offer['fd']}: {error.strerror}"
    names = {(status.st_dev, status.st_ino) for status in (expected, actual)} | {(offer["dev"], offer["ino"])}
    if len(names) != 1:
        return f"descriptor {offer['fd']} is another file now"
    process = proc.read_stat(pid)
    # A pending signal would hit the next program that the process executes, and a stopped process cannot answer.
    if process is None or process.state in "TtDZX":
        return f"process is in state {process.state if process else 'gone'}"
    return None


def _dump_by_faulthandler(pid: int, status_dir: str, rank: int, deadline: float) -> StackDump:
    offer = read_stack_dump_offer(status_dir, rank)
    if offer is None or offer["pid"] != pid:
        raise NoStacksError("the process has not registered it")
    path = os.path.join(status_dir, f"rank-{rank}.stacks")
    handle = syscalls.pidfd_open(pid)
    try:
        # While the pidfd is open, no other process can get this pid.
        is_same = read_stack_dump_offer(status_dir, rank) == offer
        reason = find_signal_obstacle(offer, path) if is_same else "process is gone"
        if reason is not None:
            raise NoStacksError(reason)
        before, source = os.stat(path).st_size, "shim"
        text = _request_dump(status_dir, rank, path, before, deadline)
        if not text:
            source = "signal"
            _send_signal(handle, offer, get_shim_thread_id(offer, status_dir, rank))
            text = _wait_for_dump(path, before, min(deadline, time.monotonic() + _DUMP_S))
    finally:
        os.close(handle)
    if not text:
        raise NoStacksError("no answer")
    return StackDump(source, text, main_thread=offer["main_thread"])


def _request_dump(status_dir: str, rank: int, path: str, before: int, deadline: float) -> str:
    """Let the shim's thread dump the stacks, and return the dump; empty if this thread is silent."""
    now = time.monotonic()
    status = read_status(status_dir, rank, now)
    if status is None or status["age_s"] > _SHIM_S:
        return ""
    request = os.path.join(status_dir, f"rank-{rank}.dump")
    try:
        syscalls.write_atomically(request, b"")
        return _wait_for_dump(path, before, min(deadline - _DUMP_S, now + _SHIM_S))
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(request)


def _send_signal(handle: int, offer: StackDumpOffer, tid: int) -> None:
    """Send the signal to thread `tid`, or to the whole process if this thread is missing, as during a fork."""
    number = _TGKILL.get(os.uname().machine)
    if tid and number is not None:
        # The caller has checked the process of `handle`, and the open `handle` prevents a reuse of its pid.
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.syscall(ctypes.c_long(number), offer["pid"], tid, offer["signal"]) == 0:
            return
        if ctypes.get_errno() != errno.ESRCH:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    syscalls.pidfd_send_signal(handle, offer["signal"])


def _wait_for_dump(path: str, before: int, deadline: float) -> str:
    """Wait until the file has stopped growing, and return its content after the first `before` bytes."""
    size, changed = before, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        grown = os.stat(path).st_size
        if grown != size:
            size, changed = grown, time.monotonic()
        elif size > before and time.monotonic() - changed >= _DUMP_SETTLED_S:
            break
    with open(path, "rb") as file:
        file.seek(before)
        return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _dump_by_py_spy(pid: int, deadline: float) -> str:
    program = find_py_spy(pid)
    timeout_s = min(_PY_SPY_S, deadline - time.monotonic())
    if timeout_s <= 0:
        raise NoStacksError("no time left")
    # With `--nonblocking`, py-spy does not stop the process, and does not fail if the process is stopped.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise NoStacksError("no answer in time") from None
    if done.returncode != 0 or not done.stdout:
        complaint = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise NoStacksError(complaint[-1] if complaint else f"exit code {done.returncode}")
    return done.stdout[:_MAX_BYTES].decode("utf-8", "replace")
