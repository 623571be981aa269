"""Runs tasks in parallel, in forked children with deadlines, so a hung task cannot block the parent.

A child that uses a hung driver or mount may sleep in state D, where SIGKILL has no effect. The parent reports such a
child and does not wait for its end. Every child closes the files of the parent, so a child that remains cannot keep a
pipe open.
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

_SIGKILL = 9  # The import of `signal` would take two milliseconds.

REAP_TIMEOUT_S = 0.1
"""The seconds for which the parent waits for the exit of a killed child."""
STUCK_AFTER_S = 5.0
"""A child that sleeps in the kernel for so many seconds without a wake-up counts as stuck."""
_CHECK_INTERVAL_S = 1.0


class DeniedError(Exception):
    """The user may not read the facts of a group. The message has the reason and the users who may read them."""


class AbsentError(Exception):
    """The machine lacks the subject of a task, such as a GPU driver."""


class _Child:
    """A forked child that runs some tasks in sequence and reports the result of each task."""

    def __init__(
        self, names: list[str], tasks: dict[str, Task], deadline: float, later_deadlines: dict[str, float]
    ) -> None:
        self.unfinished = list(names)
        self.began = time.monotonic()
        self._deadlines = {name: later_deadlines.get(name, deadline) for name in names}
        self._next_check = deadline
        self._last_wakeups: tuple[int | None, float] = (None, 0.0)
        self._partial = b""
        reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _run_child([(name, tasks[name]) for name in names], writer)
        os.close(writer)
        self.reader = reader

    def next_check_at(self) -> float:
        """Return the monotonic time at which the parent must call `is_stuck` next."""
        return min(self._deadline(), self._next_check)

    def is_stuck(self, now: float) -> bool:
        """Return whether the deadline of the child has passed, or the child sleeps in the kernel without wake-ups.

        A long sleep with wake-ups does not count: a driver that starts a GPU sleeps in this way for seconds.
        """
        if now >= self._deadline():
            return True
        if now < self._next_check:
            return False
        self._next_check = now + _CHECK_INTERVAL_S
        woken = count_wakeups("/", self.pid)
        if woken is None or woken != self._last_wakeups[0]:
            self._last_wakeups = (woken, now)
        return woken is not None and now - self._last_wakeups[1] >= STUCK_AFTER_S

    def _deadline(self) -> float:
        """Return the deadline of the present task, or the earliest deadline if all tasks are finished."""
        return self._deadlines[self.unfinished[0]] if self.unfinished else min(self._deadlines.values())

    def add_output(self, chunk: bytes) -> dict[str, FactGroup]:
        """Add bytes that the child has sent, and return the results that are now complete."""
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        groups: dict[str, FactGroup] = {}
        for line in lines:
            name = self.unfinished.pop(0)
            groups[name] = json.loads(line)
        return groups

    def report_ended(self) -> dict[str, FactGroup]:
        """Wait for the exit of the child, and return an error for each unfinished task."""
        reason = f"the child that collected it ended with {syscalls.describe_exit(os.waitpid(self.pid, 0)[1])}"
        return {name: self._timed({"status": "error", "reason": reason, "data": {}}) for name in self.unfinished}

    def abandon(self) -> dict[str, FactGroup]:
        """Kill the child and the programs that it runs. Return a result for the hung task and for each later task."""
        if not self.unfinished:
            os.waitpid(self.pid, 0)
            return {}
        state, wchan = read_process_state(self.pid)
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
        late = f"not collected, because `{first}` was before it and hung"
        return {n: self._timed({**result, "reason": reason if n == first else late}) for n in self.unfinished}

    def _timed(self, result: FactGroup) -> FactGroup:
        result["ms"] = round((time.monotonic() - self.began) * 1000, 1)
        return result


def run_tasks(
    tasks: dict[str, Task],
    deadline: float,
    shared_children: tuple[tuple[str, ...], ...] = (),
    later_deadlines: dict[str, float] | None = None,
) -> dict[str, FactGroup]:
    """Run every task in a forked child until `deadline`, and return one result for each task.

    Args:
        tasks: The function of each task, by name of the task.
        deadline: The monotonic time at which unfinished tasks are killed, or abandoned if SIGKILL has no effect.
        shared_children: For each shared child, the names of the tasks that run there, in this order. These tasks must
            not hang. Sharing saves forks, and a fork takes longer than most tasks.
        later_deadlines: The deadlines of tasks that may run longer than `deadline`. After `deadline`, such a task is
            killed as soon as the task is stuck in the kernel.
    """
    batches = [[name for name in batch if name in tasks] for batch in shared_children]
    shared = {name for batch in batches for name in batch}
    batches += [[name] for name in tasks if name not in shared]
    started = [_Child(batch, tasks, deadline, later_deadlines or {}) for batch in batches if batch]
    waiting = {child.reader: child for child in started}
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


def read_process_state(pid: int) -> tuple[str | None, str | None]:
    """Return the state letter of a process and the kernel function in which it sleeps, each `None` if unknown."""
    stat = proc.read_stat(pid)
    return (None, None) if stat is None else (stat.state, proc.read_wait_channel(pid) or None)


def count_wakeups(root: str, pid: int) -> int | None:
    """Return the number of wake-ups of a process in state D (uninterruptible sleep); `None` in another state."""
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
    """Run the tasks in the child, write one line of JSON for each task, and exit."""
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
