"""Starts forkservers for the supervisor and sends them requests.

A forkserver is a process of the workers' own Python, which imports the libraries once and forks the ranks. The kernel
kills a forkserver when its supervisor ends. A rank that cannot be forked starts as a new process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
from enum import Enum
from typing import TYPE_CHECKING, Any, Callable, NoReturn, cast

from clusterctl.agent import inject
from clusterctl.agent.linux import helper_process, proc, spawn, syscalls
from clusterctl.agent.protocol import command_messages, events
from clusterctl.agent.protocol.run_requests import ForkSettings, StartArguments, WorkerStart, parse_dataclass
from clusterctl.agent.supervisor import workers
from clusterctl.agent.supervisor.control_server import DeferredReply

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from clusterctl.agent.linux.event_loop import EventLoop, Timer
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_processes import RunMarkers
    from clusterctl.agent.protocol.record_types import SpawnRecord
    from clusterctl.agent.supervisor.attempt import Attempt
    from clusterctl.agent.supervisor.waiter import WaiterConfig
    from clusterctl.agent.supervisor.workers import Worker, WorkerToStart

    Action = Callable[[], None]


RANK_NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("CLUSTERCTL_ATTEMPT", "CLUSTERCTL_RESUME_FROM", "CLUSTERCTL_STATUS_DIR", "TORCHELASTIC_ERROR_FILE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Environment variables that differ between ranks. A module that reads one cannot be imported once for all ranks."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""This variable makes torch count GPUs through NVML. If a forkserver called the CUDA driver, no fork could use CUDA."""
_ROOM_BYTES = 16384
"""Bytes of padding in the environment of a forkserver. A forked rank writes its own variables to this memory, so that
/proc/PID/environ shows them.
"""
_PROBE = "import sys; sys.exit(f'{sys.executable} ignores PYTHONPATH')"
"""Python executes this code only if clusterctl's `sitecustomize`, which never returns, has not run."""
_IMPORT_TIMEOUT_S = 120.0
"""If the imports last longer than this many seconds, the ranks start without the forkserver."""
_EXIT_READ_TIMEOUT_MS = 1000
_MAX_LINE_BYTES = 500


def select_common_variables(workers: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment variables that all workers of a node share in every attempt."""
    names = {name.encode() for name in RANK_NAMES}
    return {name: value for name, value in workers.items() if name not in names}


def build_forkserver_environment(workers: Mapping[bytes, bytes], control: int, shim: str) -> dict[bytes, bytes]:
    """Return the environment of a forkserver.

    Args:
        workers: The environment variables of a worker; any worker of the node will do.
        control: Descriptor number of the forkserver's connection to the supervisor.
        shim: Folder of clusterctl's `sitecustomize`; this folder comes first on PYTHONPATH.
    """
    env = select_common_variables(workers)
    path = env.get(b"PYTHONPATH", b"")
    folder = shim.encode("utf-8", "surrogateescape")
    last = {b"CLUSTERCTL_FORKSERVER": b"%d:" % control + b" " * _ROOM_BYTES, _NVML.encode(): b"1"}
    if path.split(b":")[0] != folder:
        last[b"PYTHONPATH"] = folder + b":" + path if path else folder
    return {**{name: value for name, value in env.items() if name not in last}, **last}


def list_differing_variables(
    common: Mapping[bytes, bytes], rank: Mapping[bytes, bytes], secrets: Iterable[str]
) -> list[str]:
    """Return the names of variables whose values differ in a rank and in the forkserver: imports may have read them."""
    free = {name.encode() for name in (*RANK_NAMES, *secrets)}
    names = (common.keys() | rank.keys()) - free
    return sorted(name.decode("utf-8", "replace") for name in names if common.get(name) != rank.get(name))


class ServerStage(Enum):
    """State of a forkserver: importing or checking, ready to fork, or ended."""

    BUSY = "busy"
    READY = "ready"
    OVER = "over"


class ForkServer:
    """A forkserver process and its connection to the supervisor.

    Attributes:
        end_reason: Why the forkserver has ended, or "".
        is_rechecking: Whether the forkserver is checking that it can serve another attempt. If a forkserver ends during
            this check, a new forkserver replaces it.
        report: Facts about the imports: the modules, their time in seconds, and their memory in kilobytes.
        identity: The process of the forkserver.
    """

    def __init__(
        self, loop: EventLoop, request: ForkSettings, program: spawn.Program, shim: str, on_change: Action
    ) -> None:
        """Start the forkserver.

        Args:
            loop: The supervisor's event loop.
            request: The head's request for a forkserver.
            program: The program of a worker of this node.
            shim: Folder of the shim's modules.
            on_change: Called when the forkserver has become ready or has ended.

        Raises:
            OSError: No process or no descriptor is available.
        """
        self._loop, self._on_change = loop, on_change
        self.request, self._program = request, program
        self.stage, self.end_reason, self.is_rechecking = ServerStage.BUSY, "", False
        self.report: dict[str, Any] = {}
        self._exit_read_timeout_ms = _EXIT_READ_TIMEOUT_MS
        self._output = syscalls.create_memory_file("output")
        self._sock, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with peer:
            control = peer.fileno()
            env = build_forkserver_environment(program.env, control, shim)
            # Python first executes clusterctl's `sitecustomize`, which then executes the program in these arguments.
            argv = [program.argv[0], b"-c", _PROBE.encode(), *program.argv]

            def become(_out: helper_process.HelperOutput) -> NoReturn:
                spawn.redirect_stdio(stdout=self._output, stderr=self._output)
                os.set_inheritable(control, True)
                spawn.exec_program(spawn.Program(argv, env, program.cwd, tag=program.tag))

            pid, pipe = helper_process.start_helper(become, (control, self._output))
            os.close(pipe)
        self.identity = proc.read_identity(pid) or proc.ProcessIdentity(pid, 0)
        loop.on_readable(self._sock.fileno(), self._read)
        names = [*RANK_NAMES, *request.secrets]
        file = _make_memory_file({"preload": request.preload, "rank_names": names, "inject": request.inject})
        self._deadline: Timer = loop.call_later(_IMPORT_TIMEOUT_S, self._time_out)
        self._send(b"s", [file])
        os.close(file)

    def matches(self, request: ForkSettings, program: spawn.Program) -> bool:
        """Return whether this forkserver has the program, environment and imports that the request needs."""
        same = dataclasses.replace(request, keep=self.request.keep, demanded=self.request.demanded)
        return same == self.request and _select_stable_variables(program) == _select_stable_variables(self._program)

    def reuse(self, request: ForkSettings, program: spawn.Program) -> None:
        """Use the forkserver for another attempt, after it has checked that the imported files are unchanged."""
        self.request, self._program = request, program
        if self.stage is ServerStage.READY:
            self.stage, self.is_rechecking = ServerStage.BUSY, True
            self._deadline = self._loop.call_later(_IMPORT_TIMEOUT_S, self._time_out)
            self._send(b"?", [])

    def _time_out(self) -> None:
        # Do not start a new forkserver: its imports would take as long.
        self.is_rechecking = False
        self.close(f"the imports took longer than {_IMPORT_TIMEOUT_S:.0f} s")

    def _send(self, word: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._sock, [word], descriptors)
        except ConnectionError:
            self._close_ended()
        except OSError as error:
            self.close(f"cannot send a request to the process that was to fork the ranks: {error.strerror}")

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except OSError:
            # The forkserver ended and left requests unread.
            data = b""
        if not data:
            self._close_ended()
            return
        answer = json.loads(data)
        if answer.get("cannot"):
            self.close(answer["cannot"])
        elif answer.get("changed"):
            self.close(f"the installed modules have changed: {answer['changed']}")
        else:
            self.report |= answer
            self.is_rechecking = False
            self._set_stage(ServerStage.READY)

    def _close_ended(self) -> None:
        """Close the connection to an ended forkserver. Add the last line of its output to `end_reason`."""
        last = b""
        with contextlib.suppress(OSError):
            size = os.fstat(self._output).st_size
            data = os.pread(self._output, _MAX_LINE_BYTES, max(0, size - _MAX_LINE_BYTES))
            last = data.strip().rpartition(b"\n")[2]
        explanation = f"; its last line: {last.decode('utf-8', 'replace')}" if last else ""
        self.close(f"the process that was to fork the ranks has ended{explanation}")

    def explain_end(self) -> str:
        """Return why the forkserver has ended, or "" if it still runs.

        Call this function if a fork has ended without a report. The first call waits up to 1 s for the end of the
        forkserver, because this end may explain the failed fork.
        """
        if self.stage is not ServerStage.OVER:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(self._exit_read_timeout_ms):
                self._read()
            self._exit_read_timeout_ms = 0
        return self.end_reason if self.stage is ServerStage.OVER else ""

    def _set_stage(self, stage: ServerStage) -> None:
        self.stage = stage
        self._deadline.cancel()
        self._on_change()

    def find_reason_not_to_fork(self, env: dict[bytes, bytes]) -> str | None:
        """Return why a rank with this environment cannot be forked, or `None`."""
        if self.stage is not ServerStage.READY:
            return self.end_reason
        names = list_differing_variables(self._program.env, env, self.request.secrets)
        return f"{', '.join(names[:4])} of the rank had another value during the imports" if names else None

    def fork_worker(self, config: WaiterConfig) -> int:
        """Fork a rank and its waiter; return a descriptor for `workers.read_waiter_report`.

        Raises:
            OSError: No descriptor is available.
        """
        names = ("spawn_file", "exit_file", "stop_after", "lease_file", "fence", "title")
        request = {
            "env": _decode_environment(config.program.env),
            "cgroup": config.cgroup_procs,
            "waiter": helper_process.build_agent_command("wait"),
            # The agent's Python may need environment variables of the login to start, such as LD_LIBRARY_PATH.
            "waiter_env": _decode_environment(spawn.build_base_environment()),
            "forkserver": self.identity.pid,
            "config": {name: getattr(config, name) for name in names},
        }
        read, write = os.pipe2(os.O_CLOEXEC)
        file = _make_memory_file(request)
        self._send(b"f", [file, write, config.output_fd, *config.kept_descriptors])
        os.close(file)
        os.close(write)
        return read

    def close(self, reason: str) -> None:
        """End the forkserver."""
        if self.stage is ServerStage.OVER:
            return
        self.end_reason = reason
        self._loop.remove_descriptor(self._sock.fileno())
        self._sock.close()
        os.close(self._output)
        if proc.is_alive(self.identity):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.identity.pid, signal.SIGKILL)
        self._set_stage(ServerStage.OVER)


def _select_stable_variables(program: spawn.Program) -> tuple[dict[bytes, bytes], list[bytes], bytes]:
    return select_common_variables(program.env), program.argv, program.cwd


def _make_memory_file(value: Any) -> int:
    fd = syscalls.create_memory_file("request")
    syscalls.write_all(fd, json.dumps(value).encode())
    return fd


def _decode_environment(env: dict[bytes, bytes]) -> dict[str, str]:
    how = ("utf-8", "surrogateescape")
    return {name.decode(*how): value.decode(*how) for name, value in env.items()}


class ForkServerManager:
    """Starts a forkserver if the head requests one, and defers starts of workers until the forkserver is ready.

    The forkserver starts with the first attempt of the run and may serve later attempts.
    """

    def __init__(
        self, loop: EventLoop, run: RunDir, markers: RunMarkers, record: Callable[[events.Event], object]
    ) -> None:
        """Make a manager without a forkserver."""
        self._loop, self._run, self._markers, self._record = loop, run, markers, record
        self._server: ForkServer | None = None
        self._attempt: Attempt | None = None
        self._request: ForkSettings | None = None
        self._deferred_starts: list[tuple[Action, Action, DeferredReply]] = []
        self._warned_reasons: set[str] = set()

    # --- the forkserver

    def prepare_forkserver(self, attempt: Attempt) -> None:
        """If the attempt requests a forkserver, reuse the forkserver of the last attempt or start a new one."""
        requested = attempt.prepare.forked
        self._attempt, self._warned_reasons = attempt, set()
        self._request = None if requested is None else parse_dataclass(ForkSettings, requested)
        if self._request is None:
            self.close()
            return
        attempt.start_workers = self._start_workers
        program, old = self._build_program(attempt, self._request), self._server
        if old is not None and old.stage is not ServerStage.OVER and old.matches(self._request, program):
            attempt.known_processes.protected.add(old.identity)
            old.reuse(self._request, program)
        else:
            self.close()
            self._start(attempt, self._request, program)

    def _build_program(self, attempt: Attempt, request: ForkSettings) -> spawn.Program:
        worker_start = WorkerStart(rank=0, local_rank=0, argv=request.argv, env=request.env)
        # The number of the attempt does not matter: `select_common_variables` removes variables that depend on it.
        start = StartArguments(self._run.run, self._run.node, 0, [], inject=request.inject)
        return workers.build_worker_program(
            self._run, self._markers, attempt.prepare, start, worker_start, attempt.python, attempt.keeper
        )

    def _start(self, attempt: Attempt, request: ForkSettings, program: spawn.Program) -> None:
        try:
            if not workers.install_shim(self._run):
                raise OSError(0, "cannot write the modules of the forkserver")
            server = ForkServer(
                self._loop, request, program, inject.get_shim_folder(self._run.root), self._on_state_change
            )
        except OSError as error:
            self._warn_not_forked(f"cannot start the process that forks them: {error.strerror}")
            return
        attempt.known_processes.protected.add(server.identity)
        self._server = server

    def _on_state_change(self) -> None:
        """Handle a forkserver that has become ready or has ended."""
        server = self._server
        if server is not None and server.stage is ServerStage.OVER:
            self._server = None
            if server.is_rechecking and self._attempt is not None and self._request is not None:
                self._start(self._attempt, self._request, self._build_program(self._attempt, self._request))
                return
            self._warn_not_forked(server.end_reason)
        self.run_deferred_starts()

    def close(self) -> None:
        """End the forkserver without giving a reason."""
        server, self._server = self._server, None
        if server is not None:
            server.close("")

    # --- starts

    def run_when_ready(self, start: Action, started: Action) -> dict[str, Any] | DeferredReply:
        """Run `start` as soon as the forkserver is ready, and then run `started`, even if `start` has failed."""
        if self._server is None or self._server.stage is not ServerStage.BUSY:
            return self._run_start(start, started)
        later = DeferredReply()
        self._deferred_starts.append((start, started, later))
        return later

    def run_deferred_starts(self) -> None:
        """Run the deferred starts, because the forkserver is ready or the attempt ends."""
        waiting, self._deferred_starts = self._deferred_starts, []
        for start, started, later in waiting:
            later.resolve(lambda start=start, started=started: self._run_start(start, started))  # type: ignore[misc]

    def _run_start(self, start: Action, started: Action) -> dict[str, Any]:
        try:
            start()
        finally:
            started()
            if self._server is not None and self._server.stage is ServerStage.READY and not self._server.request.keep:
                self.close()
        return {}

    def _start_workers(self, to_start: Sequence[WorkerToStart]) -> Iterator[Worker]:
        """Fork all workers at once, and yield each worker when it runs. If a fork fails, start a new process instead.

        Raises:
            RequestError: A worker did not start.
        """
        server, warned = self._server, len(self._warned_reasons)
        if server is None:
            yield from workers.start_workers(to_start)
            return
        forks = [self._try_fork(server, config) for _, config in to_start]
        reports = [
            fork if fork is not None else workers.fork_waiter_of_rank(worker_start.rank, config)
            for fork, (worker_start, config) in zip(forks, to_start)
        ]
        for (worker_start, config), report, fork in zip(to_start, reports, forks):
            worker = None if fork is None else self._read_forked_worker(server, worker_start, report)
            if worker is None:
                again = report if fork is None else workers.fork_waiter_of_rank(worker_start.rank, config)
                worker = workers.read_started_worker(worker_start.rank, worker_start.local_rank, again)
            yield worker
        if len(self._warned_reasons) == warned and to_start and self._attempt is not None:
            text = _describe_gain(server.report, len(to_start))
            self._record(events.Alarm(self._attempt.number, events.FORKED, text, "info"))

    def _try_fork(self, server: ForkServer, config: WaiterConfig) -> int | None:
        reason = server.find_reason_not_to_fork(config.program.env)
        if reason is None:
            try:
                return server.fork_worker(config)
            except OSError as error:
                reason = f"no resources for a fork: {error.strerror}"
        self._warn_not_forked(reason)
        return None

    def _read_forked_worker(self, server: ForkServer, worker_start: WorkerStart, report: int) -> Worker | None:
        """Return the forked worker, or `None` if the fork failed and no process of the rank runs."""
        try:
            answer = workers.read_waiter_report(report)
        finally:
            os.close(report)
        if answer is None:
            killed = f"rank {worker_start.rank} or its waiter was killed before the waiter sent a report"
            reason = server.explain_end() or killed
        elif "refused" in answer:
            reason = f"rank {worker_start.rank} could not be forked: {answer['refused']}"
        elif "error" in answer:
            raise command_messages.make_failed_error(f"cannot start rank {worker_start.rank}: {answer['error']}")
        else:
            return workers.make_worker(worker_start.rank, worker_start.local_rank, cast("SpawnRecord", answer))
        self._warn_not_forked(reason)
        return None

    def _warn_not_forked(self, why: str) -> None:
        """Record why ranks are not forked; record each reason once per attempt."""
        if self._attempt is None or self._request is None or why in self._warned_reasons:
            return
        self._warned_reasons.add(why)
        severity = "warn" if self._request.demanded else "info"
        text = f"not forked, but started as new processes: {why}"
        self._record(events.Alarm(self._attempt.number, events.NOT_FORKED, text, severity))


def _describe_gain(report: dict[str, Any], ranks: int) -> str:
    """Return a text that says how much import time and memory a forkserver saves."""
    names = report["modules"]
    what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    memory = f"{report['kilobytes'] / 1024:.0f} MiB once instead of {ranks} times"
    return f"{ranks} forked from one process that took {report['seconds']:.1f} s to import {what}: {memory}"
