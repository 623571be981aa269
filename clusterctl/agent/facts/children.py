"""Doing risky things in forks: all at once, each with the same deadline, none able to keep the parent.

A child that touches a hung driver or mount can sit in state D, where SIGKILL does nothing. Such a child is abandoned
and named. Children own nothing of the parent's streams, so an abandoned one cannot keep a pipe of ours open.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable

Task = Callable[[], "dict[str, Any]"]

REAP_SECONDS = 0.1
"""How long a killed child may take to go before it is abandoned."""


class DeniedError(Exception):
    """The task may not look; the text says why and who may."""


class AbsentError(Exception):
    """There is nothing to look at."""


class _Child:
    def __init__(self, name: str, task: Task) -> None:
        self.name = name
        self.began = time.monotonic()
        self.output = bytearray()
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _child(task, writer)
        os.close(writer)
        self.reader = reader

    def result(self) -> dict[str, Any]:
        """Return what the child wrote; an empty or torn answer is an error that says how it died."""
        status = os.waitpid(self.pid, 0)[1]
        try:
            result: dict[str, Any] = json.loads(bytes(self.output))
        except ValueError:
            died = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit status {status >> 8}"
            result = {"status": "error", "reason": f"the look ended with {died}", "data": {}}
        return self._timed(result)

    def abandon(self) -> dict[str, Any]:
        """Kill the child and its programs; say where it hung."""
        state, wchan = where(self.pid)
        reason = f"no answer within {time.monotonic() - self.began:.1f} s"
        if state == "D":
            reason += f", stuck in the kernel (state D, {wchan or 'place unknown'})"
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except OSError:
            os.kill(self.pid, signal.SIGKILL)
        gone = _reaped(self.pid)
        result = {"status": "timeout", "reason": reason, "data": {}, "pid": self.pid, "state": state, "wchan": wchan}
        return self._timed({**result, "abandoned": not gone})

    def _timed(self, result: dict[str, Any]) -> dict[str, Any]:
        result["ms"] = round((time.monotonic() - self.began) * 1000, 1)
        return result


def run(tasks: dict[str, Task], deadline: float) -> dict[str, dict[str, Any]]:
    """Run every task in a fork of its own until `deadline` (monotonic seconds); return one result a task."""
    waiting: dict[int, _Child] = {}
    for name, task in tasks.items():
        child = _Child(name, task)
        waiting[child.reader] = child
    results: dict[str, dict[str, Any]] = {}
    poll = select.poll()
    for reader in waiting:
        poll.register(reader, select.POLLIN | select.POLLHUP)
    while waiting and time.monotonic() < deadline:
        for reader, _ in poll.poll(max(1, int((deadline - time.monotonic()) * 1000))):
            child = waiting[reader]
            chunk = os.read(reader, 1 << 16)
            child.output += chunk
            if not chunk:
                poll.unregister(reader)
                os.close(reader)
                results[child.name] = waiting.pop(reader).result()
    for reader, child in waiting.items():
        os.close(reader)
        results[child.name] = child.abandon()
    return {name: results[name] for name in tasks}


def where(pid: int) -> tuple[str | None, str | None]:
    """Return the state letter of a process and the kernel function it sleeps in, each `None` where unreadable."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None, None
    try:
        with open(f"/proc/{pid}/wchan", encoding="utf-8") as file:
            return state, file.read().strip() or None
    except OSError:
        return state, None


def _child(task: Task, writer: int) -> None:
    """Run in the fork; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        for name in ("SIGINT", "SIGTERM", "SIGPIPE", "SIGCHLD"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.dup2(writer, 3)
        os.closerange(4, 256)
        _write(3, json.dumps(_outcome(task)).encode())
        code = 0
    finally:
        os._exit(code)


def _outcome(task: Task) -> dict[str, Any]:
    try:
        return {"status": "ok", "reason": None, "data": task()}
    except DeniedError as error:
        return {"status": "denied", "reason": str(error), "data": {}}
    except PermissionError as error:
        return {"status": "denied", "reason": str(error), "data": {}}
    except AbsentError as error:
        return {"status": "absent", "reason": str(error), "data": {}}
    except Exception as error:
        return {"status": "error", "reason": f"{type(error).__name__}: {error}", "data": {}}


def _write(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _reaped(pid: int) -> bool:
    until = time.monotonic() + REAP_SECONDS
    while time.monotonic() < until:
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return True
        time.sleep(0.005)
    return False
