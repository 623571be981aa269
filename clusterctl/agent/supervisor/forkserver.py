"""The supervisor's end of a forkserver: a process of the workers' own Python that imports once and forks ranks.

A forkserver ends with its supervisor: it reads the end of their connection, and the kernel kills it otherwise. Workers
that it cannot fork start as new processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import signal
import socket
from enum import Enum
from typing import TYPE_CHECKING, Any, Callable, NoReturn, cast

from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.protocol import request_errors
from clusterctl.agent.supervisor import workers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from clusterctl.agent.linux.event_loop import EventLoop, Timer
    from clusterctl.agent.protocol import requests
    from clusterctl.agent.protocol.process_types import SpawnRecord
    from clusterctl.agent.protocol.requests import Forked
    from clusterctl.agent.supervisor.waiter import WaiterConfig
    from clusterctl.agent.supervisor.workers import Worker


RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CLUSTERCTL_ATTEMPT", "CLUSTERCTL_RESUME_FROM", "CLUSTERCTL_STATUS_DIR", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that differ between ranks. A module that reads one at import cannot be imported once for all ranks."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch count GPUs through NVML: after a call of the CUDA driver no fork could use CUDA."""
_ROOM_BYTES = 16384
"""Room for the variables of a rank in the memory in which the kernel shows the environment."""


def select_common_variables(workers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the variables that all workers of a node share in every attempt."""
    names = {name.encode() for name in RANK_NAMES}
    return {name: value for name, value in workers.items() if name not in names}


def build_forkserver_environment(workers: Mapping[bytes, bytes], control: int, shim: str) -> dict[bytes, bytes]:
    """Return the environment of a forkserver.

    Args:
        workers: The variables that all workers of the node share.
        control: Descriptor number of its connection.
        shim: Folder of our `sitecustomize`, which has to be on the path.
    """
    env = select_common_variables(workers)
    path = env.get(b"PYTHONPATH", b"")
    folder = shim.encode("utf-8", "surrogateescape")
    last = {b"CLUSTERCTL_FORKSERVER": b"%d:" % control + b" " * _ROOM_BYTES, _NVML.encode(): b"1"}
    if path.split(b":")[0] != folder:
        last[b"PYTHONPATH"] = folder + b":" + path if path else folder
    return {**{name: value for name, value in env.items() if name not in last}, **last}


def find_differing_variables(
    common: Mapping[bytes, bytes], rank: Mapping[bytes, bytes], secrets: Iterable[str]
) -> list[str]:
    """Return the variables of a rank that differ from the shared ones: imports may have read them."""
    free = {name.encode() for name in (*RANK_NAMES, *secrets)}
    names = (common.keys() | rank.keys()) - free
    return sorted(name.decode("utf-8", "replace") for name in names if common.get(name) != rank.get(name))


_PROBE = "import sys; sys.exit(f'{sys.executable} does not look at PYTHONPATH')"
"""This code never runs: our `sitecustomize` takes over before it. Without our `sitecustomize` it ends at once."""
_IMPORT_TIMEOUT_S = 120.0
"""Seconds in which imports may finish; then the ranks start without the forkserver."""
_EXIT_READ_TIMEOUT_MS = 1000
_MAX_LINE_BYTES = 500


class Stage(Enum):
    """State of a forkserver."""

    BUSY = "busy"
    READY = "ready"
    OVER = "over"


class ForkServer:
    """One forkserver.

    Attributes:
        end_reason: Why it is unusable, if it is over.
        is_stale: The imported files have changed on disk, or cannot be compared: a new one may replace it.
        report: What it reported when it was ready.
        identity: Its process; it belongs to no attempt.
    """

    def __init__(
        self, loop: EventLoop, request: Forked, program: spawn.Program, shim: str, settled: Callable[[], None]
    ) -> None:
        """Start the forkserver.

        Args:
            loop: The supervisor's event loop.
            request: What the head wants of it.
            program: The program of a worker of this node.
            shim: Folder of the shim's modules.
            settled: Called when it is ready or over.

        Raises:
            OSError: No process or no descriptor is available.
        """
        self._loop, self._settled = loop, settled
        self.request, self._program = request, program
        self.stage, self.end_reason, self.is_stale = Stage.BUSY, "", False
        self.report: dict[str, Any] = {}
        self._pending = 1
        self._last_word_ms = _EXIT_READ_TIMEOUT_MS
        self._deadline: Timer | None = None
        self._output = syscalls.create_memory_file("output")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            self.identity = self._start(theirs.fileno(), shim)
        loop.on_readable(self._sock.fileno(), self._read)
        self._wait()
        names = [*RANK_NAMES, *request.secrets]
        file = _make_memory_file({"preload": request.preload, "rank_names": names, "inject": request.inject})
        self._send(b"s", [file])
        os.close(file)

    def matches(self, request: Forked, program: spawn.Program) -> bool:
        """Return whether a new forkserver for this request would start in the same way."""
        same = dataclasses.replace(request, keep=self.request.keep, demanded=self.request.demanded)
        return same == self.request and _select_stable_variables(program) == _select_stable_variables(self._program)

    def _start(self, control: int, shim: str) -> proc.ProcessIdentity:
        program, parent = self._program, os.getpid()
        env = build_forkserver_environment(program.env, control, shim)
        pid = os.fork()
        if pid == 0:
            # This argument makes Python execute our `sitecustomize`.
            argv = [program.argv[0], b"-c", _PROBE.encode(), *program.argv]
            become = spawn.Program(argv, env, program.cwd, tag=program.tag)
            _exec_forkserver(become, parent, self._output, control)
        return proc.read_identity(pid) or proc.ProcessIdentity(pid, 0)

    def _wait(self, seconds: float = _IMPORT_TIMEOUT_S) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.after(seconds, functools.partial(self._time_out, seconds))

    def _time_out(self, seconds: float) -> None:
        # A new one would take as long.
        self.is_stale = False
        self.close(f"the imports took longer than {seconds:.0f} s")

    def _send(self, word: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._sock, [word], descriptors)
        except ConnectionError:
            self._ended()
        except OSError as error:
            self.close(f"the process that was to fork the ranks cannot be asked: {error.strerror}")

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            # It ended with unread requests.
            data = b""
        if not data:
            self._ended()
            return
        said = json.loads(data)
        self._pending -= 1
        if said.get("cannot"):
            # A second request is pending, so this failure may be outdated: start a new forkserver.
            self.is_stale = self._pending > 0
            self.close(said["cannot"])
        elif said.get("changed"):
            self.close(f"what was imported has changed: {said['changed']}")
        else:
            self.report |= said
            if not self._pending:
                self.is_stale = False
                self._has_stage(Stage.READY)

    def _ended(self) -> None:
        last = self._last_line()
        self.close("the process that was to fork the ranks has ended" + (f", last saying: {last}" if last else ""))

    def _last_line(self) -> str:
        """Return the last line of its output, in which a library may explain the end of the process."""
        try:
            size = os.fstat(self._output).st_size
            data = os.pread(self._output, _MAX_LINE_BYTES, max(0, size - _MAX_LINE_BYTES))
        except OSError:
            return ""
        return data.decode("utf-8", "replace").strip().rpartition("\n")[2]

    def explain_end(self) -> str:
        """Return why it is over, or "" if it is not, even before its end was noticed.

        If a fork ended without a report, the forkserver's own report may be on its way: wait for it once.
        """
        if self.stage is not Stage.OVER:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(self._last_word_ms):
                self._read()
            self._last_word_ms = 0
        return self.end_reason if self.stage is Stage.OVER else ""

    def _has_stage(self, stage: Stage) -> None:
        self.stage = stage
        if self._deadline is not None:
            self._deadline.cancel()
        self._settled()

    def revalidate(self, request: Forked, program: spawn.Program) -> None:
        """Use it for this attempt if the imported files are unchanged on disk; it is busy during this check."""
        self.request, self._program, self.is_stale = request, program, True
        self._pending += 1
        self.stage = Stage.BUSY
        self._wait()
        self._send(b"?", [])

    def find_obstacle(self, env: dict[bytes, bytes]) -> str | None:
        """Return why a rank with this environment cannot be forked, or `None`."""
        if self.stage is not Stage.READY:
            return self.end_reason
        names = find_differing_variables(self._program.env, env, self.request.secrets)
        return f"{', '.join(names[:4])} of the rank differs from what the imports have seen" if names else None

    def fork_worker(self, config: WaiterConfig) -> int:
        """Fork a rank and its waiter; return a descriptor for `workers.read_waiter_report`.

        Raises:
            OSError: No descriptor is available.
        """
        request = {
            "env": _decode_environment(config.program.env),
            "cgroup": config.cgroup,
            "waiter": helper_process.build_agent_command("wait"),
            # The agent's Python may need variables of the login to start at all, such as LD_LIBRARY_PATH.
            "waiter_env": _decode_environment(spawn.build_base_environment()),
        }
        told = {
            **(config.fence_context or {}),
            "supervisor": os.getpid(),
            "stop_after": config.stop_after,
            "lease": config.lease,
        }
        told |= {"spawn_file": config.spawn_file, "exit_file": config.exit_file, "title": config.title}
        read, write = os.pipe2(os.O_CLOEXEC)
        files = [_make_memory_file(request), _make_memory_file(told)]
        self._send(b"f", [*files, write, config.output, *config.kept_descriptors])
        for fd in (*files, write):
            os.close(fd)
        return read

    def close(self, why: str) -> None:
        """End the forkserver."""
        if self.stage is Stage.OVER:
            return
        self.end_reason = why
        self._loop.forget(self._sock.fileno())
        self._sock.close()
        os.close(self._output)
        if proc.is_alive(self.identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.identity.pid, signal.SIGKILL)
        self._has_stage(Stage.OVER)


def _exec_forkserver(program: spawn.Program, parent: int, output: int, control: int) -> NoReturn:
    try:
        os.setsid()
        syscalls.set_parent_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        spawn.close_descriptors({control})
        os.set_inheritable(control, True)
        spawn.exec_program(program)
    finally:
        os._exit(spawn.EXIT_NOT_EXECUTABLE)


def _select_stable_variables(program: spawn.Program) -> tuple[dict[bytes, bytes], list[bytes], bytes]:
    return select_common_variables(program.env), program.argv, program.cwd


def _make_memory_file(value: Any) -> int:
    fd = syscalls.create_memory_file("request")
    syscalls.write_all(fd, json.dumps(value).encode())
    return fd


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _decode_environment(env: dict[bytes, bytes]) -> dict[str, str]:
    return {_decode_text(name): _decode_text(value) for name, value in env.items()}


if TYPE_CHECKING:
    WorkerToStart = tuple[requests.WorkerStart, WaiterConfig]
    StartWorkers = Callable[[Sequence[WorkerToStart]], Iterator[Worker]]
    OnForkRefused = Callable[[str], None]


def start_without_forkserver(wanted: Sequence[WorkerToStart]) -> Iterator[Worker]:
    """Start workers as new processes; see `start_workers`."""
    return start_workers(None, wanted, lambda _why: None)


def start_workers(
    server: ForkServer | None, wanted: Sequence[WorkerToStart], on_refused: OnForkRefused
) -> Iterator[Worker]:
    """Start all workers at once; yield each one when it is running.

    Args:
        server: The forkserver, or `None`.
        wanted: The request and the waiter's configuration of each worker.
        on_refused: Called with the reason if a worker is not forked although there is a forkserver.

    Raises:
        RequestError: A worker could not be started.
    """
    forks = [_try_fork(server, config, on_refused) for _, config in wanted]
    reports = [
        fork if fork is not None else workers.fork_waiter_for(one.rank, config)
        for fork, (one, config) in zip(forks, wanted)
    ]
    for (one, config), report, fork in zip(wanted, reports, forks):
        found = None if fork is None or server is None else _read_forked_worker(server, one, report, on_refused)
        if found is None:
            again = report if fork is None else workers.fork_waiter_for(one.rank, config)
            found = workers.read_started_worker(one.rank, one.local_rank, again)
        yield found


def _try_fork(server: ForkServer | None, config: WaiterConfig, on_refused: OnForkRefused) -> int | None:
    if server is None:
        return None
    why = server.find_obstacle(config.program.env)
    if why is None:
        try:
            return server.fork_worker(config)
        except OSError as error:
            why = f"what a fork needs is not to be had: {error.strerror}"
    on_refused(why)
    return None


def _read_forked_worker(
    server: ForkServer, one: requests.WorkerStart, report: int, on_refused: OnForkRefused
) -> Worker | None:
    """Return the forked worker, or `None` if there is none and nothing was started."""
    try:
        said = workers.read_waiter_report(report)
    finally:
        os.close(report)
    if said is None:
        on_refused(server.explain_end() or f"rank {one.rank} was killed while it was forked, or its waiter was")
        return None
    if "refused" in said:
        on_refused(f"rank {one.rank} could not be forked: {said['refused']}")
        return None
    if "error" in said:
        raise request_errors.make_failed_error(f"cannot start rank {one.rank}: {said['error']}")
    return workers.make_worker(one.rank, one.local_rank, cast("SpawnRecord", said))
