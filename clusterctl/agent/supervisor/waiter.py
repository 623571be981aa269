"""The waiter: the parent process of one worker, which waits for the worker and writes its exit file.

A waiter survives its supervisor, and holds the claims on the GPUs while the worker lives. A waiter also enforces the
fence, so that the worker ends even if no supervisor runs.

Usually a waiter is a fork of the supervisor, and forks the worker. If a forkserver forks the worker, the waiter is the
command `wait` of the agent.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NoReturn

from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.node_state import fencing, tmpfiles_protection
from clusterctl.agent.protocol.frozen_dataclass import frozen_dataclass

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from clusterctl.agent.linux.helper_process import Task
    from clusterctl.agent.linux.spawn import Program

_FENCE_SLACK_S = 2.0
"""The waiter enforces the fence this many seconds later than a supervisor, so that a living supervisor acts first."""
_MAX_WAIT_S = 5.0
_UNMEASURED_DELAY_S = 0.05
_WRITE_RETRY_S = 0.25
_CLOCK_MARGIN_S = 0.002
_WAIT_FLAGS = os.WEXITED | os.WNOWAIT
"""WNOWAIT leaves the wait status in the kernel: if the waiter is killed before it has written the exit file, the
supervisor can still read the status.
"""


@frozen_dataclass(frozen=True)
class WaiterConfig:
    """Configuration of one waiter.

    Attributes:
        program: The worker's program.
        output_fd: Descriptor that becomes the worker's stdout and stderr.
        spawn_file: File for the identities of waiter and worker. The waiter writes this file before the worker may run.
        exit_file: File for the worker's exit record.
        kept_descriptors: Descriptors of the GPU claims, which the waiter keeps open.
        stop_after: Seconds without a controller after which the waiter ends the worker; `None` for never.
        lease_file: File with the arrival time of the controller's last frame.
        fence: Names of run and attempt, with the grace, stop signal and cgroup that the waiter uses to enforce the
            fence; `None` without a fence.
        cgroup_procs: File `cgroup.procs` of the cgroup for the worker, or `None`.
        title: Text in the waiter's process title that distinguishes it from other waiters.
    """

    program: Program
    output_fd: int
    spawn_file: str
    exit_file: str
    kept_descriptors: Sequence[int] = ()
    stop_after: float | None = None
    lease_file: str = ""
    fence: Mapping[str, Any] | None = None
    cgroup_procs: str | None = None
    title: str = ""


def fork_waiter(config: WaiterConfig) -> tuple[int, int]:
    """Fork a waiter, which forks the worker. The calling process must have one thread.

    Returns:
        The pid of the waiter, and a descriptor of the waiter's report for `workers.read_waiter_report`.
    """
    parent = os.getpid()
    pid, read, write = syscalls.fork_with_pipes()
    if pid == 0:
        try:
            _wait_for_worker(config, write, parent)
        except OSError as error:
            os.write(write, json.dumps({"error": error.strerror}).encode() + b"\n")
        finally:
            os._exit(1)
    os.close(write)
    return pid, read


def _set_up_waiter(config: WaiterConfig) -> None:
    """Set up the waiter process: freeze the garbage collector, ignore signals, set name and title."""
    gc.freeze()
    gc.disable()
    spawn.reset_signals()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    syscalls.set_process_name("clusterctl-wait")
    syscalls.set_process_title(f"clusterctl-agent wait {config.title}")


def _wait_for_worker(config: WaiterConfig, report: int, parent: int) -> NoReturn:
    os.setsid()
    _set_up_waiter(config)
    end = _ExitFile(config.exit_file)
    gate, go = os.pipe2(os.O_CLOEXEC)
    worker = os.fork()
    if worker == 0:
        _become_worker(config, gate, go)
    os.close(gate)
    _release_and_wait(config, worker, (report, go), parent, end)


def main(arguments: list[str]) -> NoReturn:
    """Run the command `wait CONFIG REPORT GO READY WORKER KEEP...`: wait for a worker that a forkserver has forked.

    The arguments are descriptor numbers, except WORKER, the worker's pid. The forkserver forked this process, which
    then forked the worker and executed the agent. The worker, a child of this process, waits until this process writes
    to GO.
    """
    file, report, go, ready, worker, *keep = map(int, arguments)
    try:
        for fd in (file, report, go, ready, *keep):
            os.set_inheritable(fd, False)
        value = json.loads(os.pread(file, os.fstat(file).st_size, 0))
        spawn.disable_own_core_dumps()
        # A worker that fails before it is ready reports the failure itself and closes the pipe.
        if os.read(ready, 1):
            config = WaiterConfig(spawn.Program([], {}), -1, kept_descriptors=keep, **value["config"])
            _set_up_waiter(config)
            end = _ExitFile(config.exit_file)
            _release_and_wait(config, worker, (report, go), value["forkserver"], end)
    except OSError as error:
        os.write(report, json.dumps({"error": error.strerror}).encode() + b"\n")
    except BaseException as error:
        os.write(report, json.dumps({"refused": f"its waiter failed: {error!r}"}).encode() + b"\n")
    finally:
        os._exit(1)


def _release_and_wait(
    config: WaiterConfig, worker: int, ends: tuple[int, int], parent: int, end: _ExitFile
) -> NoReturn:
    report, go = ends
    fence = _Fence(config)
    # Without a supervisor no process would watch a new worker. A forkserver ends with its supervisor.
    is_orphan = os.getppid() != parent
    why = "its supervisor has ended" if is_orphan else _write_spawn_record(config.spawn_file, worker, report)
    if why is not None:
        # The worker exits, because its gate closes. Do not record this exit: another waiter may own the rank.
        end.discard()
        with contextlib.suppress(OSError):
            os.write(report, json.dumps({"refused": why}).encode() + b"\n")
        os._exit(0)
    os.write(go, b"g")
    os.close(go)
    spawn.redirect_stdio()
    spawn.close_descriptors({*config.kept_descriptors, end.fd, *tmpfiles_protection.lock_run_folders(config.exit_file)})
    end.write(_wait_for_exit(worker, fence))
    os.waitpid(worker, 0)
    fence.close()
    os._exit(0)


def _become_worker(config: WaiterConfig, gate: int, go: int) -> NoReturn:
    try:
        os.setsid()
        spawn.redirect_stdio(stdout=config.output_fd, stderr=config.output_fd)
        spawn.close_descriptors({gate, go})
        os.close(go)
        if config.program.tag is not None:
            spawn.set_process_tag(config.program.tag)
        if config.cgroup_procs is not None:
            with contextlib.suppress(OSError), open(config.cgroup_procs, "w") as file:
                file.write("0")
        if os.read(gate, 1):
            os.close(gate)
            spawn.exec_program(config.program)
    finally:
        os._exit(spawn.EXIT_NOT_EXECUTABLE)


class _ExitFile:
    """The exit file, which the waiter makes with reserved space while the worker runs: the disk may be full later."""

    def __init__(self, path: str) -> None:
        self._path, self._temporary = path, f"{path}.{os.getpid()}"
        self.fd = self._open()
        with contextlib.suppress(OSError):
            syscalls.reserve_blocks(self.fd, 0, 4096)

    def _open(self) -> int:
        return os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def write(self, record: dict[str, Any]) -> None:
        """Write the exit record and move the file into place; on a full disk, retry without a limit."""
        line = json.dumps(record).encode() + b"\n"
        while True:
            try:
                os.lseek(self.fd, 0, os.SEEK_SET)
                syscalls.write_all(self.fd, line)
                os.rename(self._temporary, self._path)
                return
            except FileNotFoundError:
                if not os.path.isdir(os.path.dirname(self._path)):
                    # `clean` has removed the run with its exit files.
                    return
                with contextlib.suppress(OSError):
                    self.fd = self._open()
            except OSError:
                pass
            syscalls.sleep_interval(_WRITE_RETRY_S)

    def discard(self) -> None:
        """Remove the temporary exit file."""
        with contextlib.suppress(OSError):
            os.unlink(self._temporary)


def _write_spawn_record(path: str, worker: int, report: int) -> str | None:
    """Write the identities of waiter and worker; return why the worker must not run, or `None`."""
    who, us = proc.read_identity(worker), proc.read_identity(os.getpid())
    if who is None or us is None:
        return "its process is not visible in /proc"
    record = {
        "pid": who.pid,
        "start_time": who.start_time,
        "waiter_pid": us.pid,
        "waiter_start_time": us.start_time,
        "boot": proc.read_boot_id(),
        "pid_ns": proc.read_pid_namespace(),
    }
    line = json.dumps(record).encode() + b"\n"
    temporary = f"{path}.{us.pid}"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            syscalls.write_all(fd, line)
        finally:
            os.close(fd)
        os.link(temporary, path)
    except FileExistsError:
        return "another waiter has already started this rank"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    os.write(report, line)
    return None


# --- waiting


class _Fence:
    """Measures how long the worker may still run without a controller, and ends the run's processes after that time."""

    def __init__(self, config: WaiterConfig) -> None:
        self._config = config
        self._task: Task | None = None
        if config.stop_after is not None and config.fence is not None:
            # Most runs have no fence and do not need this slow import. Do not import the module later, because its file
            # may then be missing.
            from clusterctl.agent.processes import termination

            self._task = functools.partial(termination.terminate_for_fence, config.fence)
        self._last = fencing.read_lease_clock()
        self._helper: int | None = None
        self.expired = False

    def read_remaining_s(self) -> float | None:
        """Return the seconds until the fence expires; `None` if there is no fence, or if it was already enforced."""
        if self._config.stop_after is None or self.expired:
            return None
        self._last = max(self._last, fencing.read_last_renewal(self._config.lease_file) or 0.0)
        return self._last + self._config.stop_after + _FENCE_SLACK_S - fencing.read_lease_clock()

    def enforce(self) -> None:
        """End all processes of the run on this node."""
        self.expired = True
        if self._task is None:
            return
        try:
            self._helper, _ = helper_process.start_helper(self._task)
        except OSError:
            # The machine cannot start another process, so enforce the fence in this process. The worker's end is then
            # recorded later.
            with open(os.devnull, "wb") as null:
                self._task(helper_process.HelperOutput(null.fileno()))

    def close(self) -> None:
        """Wait for the child process that enforces the fence."""
        if self._helper is not None:
            os.waitpid(self._helper, 0)


def _wait_for_exit(worker: int, fence: _Fence) -> dict[str, Any]:
    """Wait for the worker; return its exit record with the earliest and the latest monotonic time of its end."""
    while True:
        before = proc.read_run_delay()
        end = _wait_once(worker, fence)
        latest = time.monotonic()
        if end is not None:
            break
    after = proc.read_run_delay()
    # The worker ended at most `delay` before `latest`: in between, this process only waited for a processor.
    delay = after - before if before is not None and after is not None else _UNMEASURED_DELAY_S
    killed = end.si_code != os.CLD_EXITED
    return {
        "exit_code": None if killed else end.si_status,
        "signal": end.si_status if killed else None,
        "earliest": latest - delay - _CLOCK_MARGIN_S,
        "mono": latest,
        "fenced": fence.expired,
    }


def _wait_once(worker: int, fence: _Fence) -> os.waitid_result | None:
    """Wait for the end of the worker, at most until the fence expires; return its status, or `None` if unknown."""
    remaining_s = fence.read_remaining_s()
    if remaining_s is None:
        return os.waitid(os.P_PID, worker, _WAIT_FLAGS)
    if remaining_s <= 0:
        fence.enforce()
    else:
        with contextlib.suppress(OSError):
            # The timeout does not run while the machine is suspended, so wait a few seconds and read the lease again.
            signal.sigtimedwait({signal.SIGCHLD}, min(remaining_s, _MAX_WAIT_S))
    return os.waitid(os.P_PID, worker, _WAIT_FLAGS | os.WNOHANG)
