"""Runs risky tasks in forked children, all at once, each with a deadline, so that none can block the parent.

A child that touches a hung driver or mount may sleep in state D, where SIGKILL has no effect. Such a child is abandoned
and reported. Children hold none of the parent's streams, so an abandoned child cannot keep a pipe open.
"""

from __future__ import annotations

import json
import os
import select
import time

from clusterctl.agent.linux import proc, syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from clusterctl.agent.protocol.command_payload_types import FactGroup

    Task = Callable[[], Mapping[str, object]]

_SIGKILL = 9  # importing `signal` takes two milliseconds, for enumerations of all its numbers

REAP_TIMEOUT_S = 0.1
"""Seconds for a killed child to exit before it is abandoned."""
STUCK_AFTER_S = 5.0
"""Seconds of sleep in the kernel without one wake-up, after which a child counts as stuck."""
_LOOK_SECONDS = 1.0


class DeniedError(Exception):
    """The user may not read this; the message says why, and who may."""


class AbsentError(Exception):
    """There is nothing to examine."""


class _Child:
    """A fork that runs some tasks in turn and reports the result of each."""

    def __init__(self, names: list[str], tasks: dict[str, Task], deadline: float, later: dict[str, float]) -> None:
        self.unfinished = list(names)
        self.began = time.monotonic()
        self._deadlines = {name: later.get(name, deadline) for name in names}
        self._look_at = deadline
        self._asleep: tuple[int | None, float] = (None, 0.0)
        self._partial = b""
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child([(name, tasks[name]) for name in names], writer)
        os.close(writer)
        self.reader = reader

    def next_check_at(self) -> float:
        """Return the monotonic time at which the child must be checked."""
        return min(self._deadline(), self._look_at)

    def is_stuck(self, now: float) -> bool:
        """Return whether to give the child up: its deadline has passed, or it is stuck.

        A sleep in the kernel alone is not a sign: a driver that starts a GPU sleeps for seconds and is woken meanwhile.
        """
        if now >= self._deadline():
            return True
        if now < self._look_at:
            return False
        self._look_at = now + _LOOK_SECONDS
        woken = count_wakeups("/", self.pid)
        if woken is None or woken != self._asleep[0]:
            self._asleep = (woken, now)
        return woken is not None and now - self._asleep[1] >= STUCK_AFTER_S

    def _deadline(self) -> float:
        """Return the deadline of the present task, or of the last one."""
        return self._deadlines[self.unfinished[0]] if self.unfinished else min(self._deadlines.values())

    def add_output(self, chunk: bytes) -> dict[str, FactGroup]:
        """Return the results that these bytes complete."""
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        groups: dict[str, FactGroup] = {}
        for line in lines:
            name = self.unfinished.pop(0)
            groups[name] = json.loads(line)
        return groups

    def report_ended(self) -> dict[str, FactGroup]:
        """Return an error for each task that the child had not finished when it ended."""
        reason = f"the child that collected it ended with {syscalls.describe_exit(os.waitpid(self.pid, 0)[1])}"
        return {name: self._timed({"status": "error", "reason": reason, "data": {}}) for name in self.unfinished}

    def abandon(self) -> dict[str, FactGroup]:
        """Kill the child and its programs; report where it hung, and the tasks that it never reached."""
        if not self.unfinished:
            os.waitpid(self.pid, 0)
            return {}
        state, wchan = read_state(self.pid)
        reason = f"no answer within {time.monotonic() - self.began:.1f} s"
        if state == "D":
            reason += f", stuck in the kernel (state D, {wchan or 'place unknown'})"
        try:
            os.killpg(self.pid, _SIGKILL)
        except OSError:
            os.kill(self.pid, _SIGKILL)
        abandoned = syscalls.wait_for_exit(self.pid, REAP_TIMEOUT_S) is None
        where: FactGroup = {"status": "timeout", "pid": self.pid, "state": state, "wchan": wchan}
        result: FactGroup = {**where, "data": {}, "abandoned": abandoned}
        first = self.unfinished[0]
        late = f"not collected, because `{first}` hung before it"
        return {n: self._timed({**result, "reason": reason if n == first else late}) for n in self.unfinished}

    def _timed(self, result: FactGroup) -> FactGroup:
        result["ms"] = round((time.monotonic() - self.began) * 1000, 1)
        return result


def run_tasks(
    tasks: dict[str, Task],
    deadline: float,
    together: tuple[tuple[str, ...], ...] = (),
    later: dict[str, float] | None = None,
) -> dict[str, FactGroup]:
    """Run every task in a fork until `deadline` (monotonic seconds); return one result for each task.

    Args:
        tasks: The functions by name.
        deadline: When unfinished tasks are killed, or abandoned if they cannot be killed.
        together: Names that share a fork, in this order, because none of them can hang by itself. A fork costs more
            than most tasks.
        later: Later deadlines of some tasks. Beyond `deadline` such a task is given up early if it is stuck in the
            kernel.
    """
    batches = [[name for name in batch if name in tasks] for batch in together]
    shared = {name for batch in batches for name in batch}
    batches += [[name] for name in tasks if name not in shared]
    waiting = {c.reader: c for c in (_Child(batch, tasks, deadline, later or {}) for batch in batches if batch)}
    results: dict[str, FactGroup] = {}
    poll = select.poll()
    for reader in waiting:
        poll.register(reader, select.POLLIN | select.POLLHUP)
    while waiting:
        until = min(child.next_check_at() for child in waiting.values())
        for reader, _ in poll.poll(max(1, int((until - time.monotonic()) * 1000))):
            child = waiting[reader]
            chunk = os.read(reader, 1 << 16)
            results.update(child.add_output(chunk))
            if not chunk:
                poll.unregister(reader)
                os.close(reader)
                results.update(waiting.pop(reader).report_ended())
        now = time.monotonic()
        for reader in [reader for reader, child in waiting.items() if child.is_stuck(now)]:
            poll.unregister(reader)
            os.close(reader)
            results.update(waiting.pop(reader).abandon())
    return {name: results[name] for name in tasks}


def run_program(argv: list[str], seconds: float | None = None) -> tuple[int, str, str]:
    """Run a program and return its exit status, stdout and stderr; call it in a task, which has a deadline.

    Importing `subprocess` would cost more than most programs.

    Args:
        argv: The program and its arguments.
        seconds: Kill the program after this time, if the other results of the task matter more.

    Raises:
        FileNotFoundError: The program is not on PATH.
    """
    files = [syscalls.create_memory_file(name) for name in ("stdout", "stderr")]
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(files, 1)]
        pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
        status = None if seconds is None else syscalls.wait_for_exit(pid, seconds)
        if status is None:
            if seconds is not None:
                os.kill(pid, _SIGKILL)
            status = os.waitpid(pid, 0)[1]
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        output, errors = (os.pread(fd, os.fstat(fd).st_size, 0).decode("utf-8", "replace") for fd in files)
        return code, output, errors
    finally:
        for fd in files:
            os.close(fd)


def read_state(pid: int) -> tuple[str | None, str | None]:
    """Return the state letter of a process and the kernel function it sleeps in, each `None` if unreadable."""
    stat = proc.read_stat(pid)
    return (None, None) if stat is None else (stat.state, proc.read_wait_channel(pid) or None)


def count_wakeups(root: str, pid: int) -> int | None:
    """Return how often a process in state D (uninterruptible sleep) was woken so far; `None` in another state."""
    try:
        with open(f"{'' if root == '/' else root}/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            text = file.read()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    if not values.get("State", "").strip().startswith("D"):
        return None
    return int(values.get("voluntary_ctxt_switches") or 0)


def _run_child(tasks: list[tuple[str, Task]], writer: int) -> None:
    """Run tasks in the fork and write one line of JSON for each; never return."""
    code = 1
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        os.dup2(writer, 3)
        os.closerange(4, 256)
        for _, task in tasks:
            began = time.monotonic()
            outcome = _run_task(task)
            outcome["ms"] = round((time.monotonic() - began) * 1000, 1)
            syscalls.write_all(3, json.dumps(outcome).encode() + b"\n")
        code = 0
    finally:
        os._exit(code)


def _run_task(task: Task) -> FactGroup:
    try:
        return {"status": "ok", "reason": None, "data": task()}
    except (DeniedError, PermissionError) as error:
        return {"status": "denied", "reason": str(error), "data": {}}
    except AbsentError as error:
        return {"status": "absent", "reason": str(error), "data": {}}
    except Exception as error:
        return {"status": "error", "reason": f"{type(error).__name__}: {error}", "data": {}}
