"""The supervisor's part of a forkserver, a process of the workers' own Python that imports once and forks ranks.

A forkserver ends with its supervisor, because their connection closes and because the kernel kills it. A worker that it
cannot fork starts as a new process.
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
from clusterctl.agent.protocol import command_messages, events, run_requests
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
"""Variables that differ between ranks. A module that reads one at import cannot be imported once for all ranks."""
_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Makes torch count GPUs through NVML: after a call of the CUDA driver no fork could use CUDA."""
_ROOM_BYTES = 16384
"""Room for the variables of a rank in the memory in which the kernel shows the environment."""
_PROBE = "import sys; sys.exit(f'{sys.executable} does not look at PYTHONPATH')"
"""This code runs only without our `sitecustomize`, which otherwise executes the rest of the arguments before."""
_IMPORT_TIMEOUT_S = 120.0
"""Seconds in which imports may finish; then the ranks start without the forkserver."""
_EXIT_READ_TIMEOUT_MS = 1000
_MAX_LINE_BYTES = 500


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


class Stage(Enum):
    """State of a forkserver."""

    BUSY = "busy"
    READY = "ready"
    OVER = "over"


class ForkServer:
    """One forkserver.

    Attributes:
        end_reason: Why it is unusable, if it is over.
        is_stale: It is being checked for another attempt; if it ends meanwhile, a new one replaces it.
        report: Its report when it was ready: modules, seconds, kilobytes.
        identity: Its process; it belongs to no attempt.
    """

    def __init__(
        self, loop: EventLoop, request: run_requests.ForkPlan, program: spawn.Program, shim: str, on_change: Action
    ) -> None:
        """Start the forkserver.

        Args:
            loop: The supervisor's event loop.
            request: The request of the head.
            program: The program of a worker of this node.
            shim: Folder of the shim's modules.
            on_change: Called when it is ready or over.

        Raises:
            OSError: No process or no descriptor is available.
        """
        self._loop, self._on_change = loop, on_change
        self.request, self._program = request, program
        self.stage, self.end_reason, self.is_stale = Stage.BUSY, "", False
        self.report: dict[str, Any] = {}
        self._exit_read_timeout_ms = _EXIT_READ_TIMEOUT_MS
        self._output = syscalls.create_memory_file("output")
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        with theirs:
            control = theirs.fileno()
            env = build_forkserver_environment(program.env, control, shim)
            # These arguments make Python execute our `sitecustomize`, which then executes the rest.
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
        self._deadline: Timer = loop.after(_IMPORT_TIMEOUT_S, self._time_out)
        self._send(b"s", [file])
        os.close(file)

    def matches(self, request: run_requests.ForkPlan, program: spawn.Program) -> bool:
        """Return whether a new forkserver for this request would have the same program, environment and imports."""
        same = dataclasses.replace(request, keep=self.request.keep, demanded=self.request.demanded)
        return same == self.request and _select_stable_variables(program) == _select_stable_variables(self._program)

    def reuse(self, request: run_requests.ForkPlan, program: spawn.Program) -> None:
        """Use it for another attempt. It is busy until it has checked that the imported files are unchanged."""
        self.request, self._program = request, program
        if self.stage is Stage.READY:
            self.stage, self.is_stale = Stage.BUSY, True
            self._deadline = self._loop.after(_IMPORT_TIMEOUT_S, self._time_out)
            self._send(b"?", [])

    def _time_out(self) -> None:
        # A replacement would take as long.
        self.is_stale = False
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
            # It ended with unread requests.
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
            self.is_stale = False
            self._set_stage(Stage.READY)

    def _close_ended(self) -> None:
        """Close it; the reason includes the last line of its output, in which a library may explain the end."""
        last = b""
        with contextlib.suppress(OSError):
            size = os.fstat(self._output).st_size
            data = os.pread(self._output, _MAX_LINE_BYTES, max(0, size - _MAX_LINE_BYTES))
            last = data.strip().rpartition(b"\n")[2]
        explanation = f"; its last line: {last.decode('utf-8', 'replace')}" if last else ""
        self.close(f"the process that was to fork the ranks has ended{explanation}")

    def explain_end(self) -> str:
        """Return why it is over, or "" if it is not.

        If a fork has ended without a report, the end of the forkserver may be the reason: wait for it once.
        """
        if self.stage is not Stage.OVER:
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if poll.poll(self._exit_read_timeout_ms):
                self._read()
            self._exit_read_timeout_ms = 0
        return self.end_reason if self.stage is Stage.OVER else ""

    def _set_stage(self, stage: Stage) -> None:
        self.stage = stage
        self._deadline.cancel()
        self._on_change()

    def find_obstacle(self, env: dict[bytes, bytes]) -> str | None:
        """Return why a rank with this environment cannot be forked, or `None`."""
        if self.stage is not Stage.READY:
            return self.end_reason
        names = find_differing_variables(self._program.env, env, self.request.secrets)
        return f"{', '.join(names[:4])} of the rank had another value during the imports" if names else None

    def fork_worker(self, config: WaiterConfig) -> int:
        """Fork a rank and its waiter; return a descriptor for `workers.read_waiter_report`.

        Raises:
            OSError: No descriptor is available.
        """
        names = ("spawn_file", "exit_file", "stop_after", "lease", "fence", "title")
        request = {
            "env": _decode_environment(config.program.env),
            "cgroup": config.cgroup,
            "waiter": helper_process.build_agent_command("wait"),
            # The agent's Python may need variables of the login to start at all, such as LD_LIBRARY_PATH.
            "waiter_env": _decode_environment(spawn.build_base_environment()),
            "forkserver": self.identity.pid,
            "config": {name: getattr(config, name) for name in names},
        }
        read, write = os.pipe2(os.O_CLOEXEC)
        file = _make_memory_file(request)
        self._send(b"f", [file, write, config.output, *config.kept_descriptors])
        os.close(file)
        os.close(write)
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
        self._set_stage(Stage.OVER)


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
    """Starts a forkserver if the head requests one, and defers starts of workers until it is ready.

    The forkserver starts with the first attempt of the run and may serve later ones.
    """

    def __init__(
        self, loop: EventLoop, run: RunDir, markers: RunMarkers, record: Callable[[events.Event], object]
    ) -> None:
        """Begin without a forkserver."""
        self._loop, self._run, self._markers, self._record = loop, run, markers, record
        self._server: ForkServer | None = None
        self._attempt: Attempt | None = None
        self._request: run_requests.ForkPlan | None = None
        self._waiting_starts: list[tuple[Action, Action, DeferredReply]] = []
        self._warned_reasons: set[str] = set()

    # --- the forkserver

    def prepare(self, attempt: Attempt) -> None:
        """Provide a forkserver for an attempt that requests one; the one of the last attempt may serve again."""
        wanted = attempt.prepare.forked
        self._attempt, self._warned_reasons = attempt, set()
        self._request = None if wanted is None else run_requests.parse_dataclass(run_requests.ForkPlan, wanted)
        if self._request is None:
            self.close()
            return
        attempt.start_workers = self._start_workers
        program, old = self._build_program(attempt, self._request), self._server
        if old is not None and old.stage is not Stage.OVER and old.matches(self._request, program):
            attempt.known_processes.protected.add(old.identity)
            old.reuse(self._request, program)
        else:
            self.close()
            self._start(attempt, self._request, program)

    def _build_program(self, attempt: Attempt, request: run_requests.ForkPlan) -> spawn.Program:
        one = run_requests.WorkerStart(rank=0, local_rank=0, argv=request.argv, env=request.env)
        # The number of the attempt does not matter: variables that depend on it are left out later.
        start = run_requests.StartArguments(self._run.run, self._run.node, 0, [], inject=request.inject)
        return workers.build_worker_program(self._run, self._markers, attempt.prepare, start, one, attempt.python)

    def _start(self, attempt: Attempt, request: run_requests.ForkPlan, program: spawn.Program) -> None:
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
        if server is not None and server.stage is Stage.OVER:
            self._server = None
            if server.is_stale and self._attempt is not None and self._request is not None:
                self._start(self._attempt, self._request, self._build_program(self._attempt, self._request))
                return
            self._warn_not_forked(server.end_reason)
        self.run_waiting_starts()

    def close(self) -> None:
        """End the forkserver without giving a reason."""
        server, self._server = self._server, None
        if server is not None:
            server.close("")

    # --- starts

    def run_when_ready(self, start: Action, started: Action) -> dict[str, Any] | DeferredReply:
        """Run a start now or when the forkserver is ready; `started` is called after it in any case."""
        if self._server is None or self._server.stage is not Stage.BUSY:
            return self._run_start(start, started)
        later = DeferredReply()
        self._waiting_starts.append((start, started, later))
        return later

    def run_waiting_starts(self) -> None:
        """Run the deferred starts: the forkserver is ready, or the attempt ends."""
        waiting, self._waiting_starts = self._waiting_starts, []
        for start, started, later in waiting:
            later.resolve(lambda start=start, started=started: self._run_start(start, started))  # type: ignore[misc]

    def _run_start(self, start: Action, started: Action) -> dict[str, Any]:
        try:
            start()
        finally:
            started()
            if self._server is not None and self._server.stage is Stage.READY and not self._server.request.keep:
                self.close()
        return {}

    def _start_workers(self, wanted: Sequence[WorkerToStart]) -> Iterator[Worker]:
        """Fork all workers at once; yield each one when it is running. One that is not forked starts as a new process.

        Raises:
            RequestError: A worker could not be started.
        """
        server, warned = self._server, len(self._warned_reasons)
        if server is None:
            yield from workers.start_workers(wanted)
            return
        forks = [self._try_fork(server, config) for _, config in wanted]
        reports = [
            fork if fork is not None else workers.fork_waiter_of_rank(one.rank, config)
            for fork, (one, config) in zip(forks, wanted)
        ]
        for (one, config), report, fork in zip(wanted, reports, forks):
            worker = None if fork is None else self._read_forked_worker(server, one, report)
            if worker is None:
                again = report if fork is None else workers.fork_waiter_of_rank(one.rank, config)
                worker = workers.read_started_worker(one.rank, one.local_rank, again)
            yield worker
        if len(self._warned_reasons) == warned and wanted and self._attempt is not None:
            text = _describe_gain(server.report, len(wanted))
            self._record(events.Alarm(self._attempt.number, events.FORKED, text, "info"))

    def _try_fork(self, server: ForkServer, config: WaiterConfig) -> int | None:
        reason = server.find_obstacle(config.program.env)
        if reason is None:
            try:
                return server.fork_worker(config)
            except OSError as error:
                reason = f"no resources for a fork: {error.strerror}"
        self._warn_not_forked(reason)
        return None

    def _read_forked_worker(self, server: ForkServer, one: run_requests.WorkerStart, report: int) -> Worker | None:
        """Return the forked worker, or `None` if there is none and nothing was started."""
        try:
            answer = workers.read_waiter_report(report)
        finally:
            os.close(report)
        if answer is None:
            reason = server.explain_end() or f"rank {one.rank} was killed while it was forked, or its waiter was"
        elif "refused" in answer:
            reason = f"rank {one.rank} could not be forked: {answer['refused']}"
        elif "error" in answer:
            raise command_messages.make_failed_error(f"cannot start rank {one.rank}: {answer['error']}")
        else:
            return workers.make_worker(one.rank, one.local_rank, cast("SpawnRecord", answer))
        self._warn_not_forked(reason)
        return None

    def _warn_not_forked(self, why: str) -> None:
        """Record, once per attempt and reason, why ranks are not forked."""
        if self._attempt is None or self._request is None or why in self._warned_reasons:
            return
        self._warned_reasons.add(why)
        severity = "warn" if self._request.demanded else "info"
        text = f"not forked, but started as new processes: {why}"
        self._record(events.Alarm(self._attempt.number, events.NOT_FORKED, text, severity))


def _describe_gain(report: dict[str, Any], ranks: int) -> str:
    """Describe how much a forkserver saves."""
    names = report["modules"]
    what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    memory = f"{report['kilobytes'] / 1024:.0f} MiB once instead of {ranks} times"
    return f"{ranks} forked from one process that took {report['seconds']:.1f} s to import {what}: {memory}"
