"""The forkserver of a run on this node: it starts with the first attempt and may serve later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from clusterctl.agent import inject
from clusterctl.agent.protocol import dataclass_json, events, requests
from clusterctl.agent.supervisor import forkserver, workers
from clusterctl.agent.supervisor.control_server import DeferredReply
from clusterctl.agent.supervisor.forkserver import ForkServer, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from clusterctl.agent.linux import spawn
    from clusterctl.agent.linux.event_loop import EventLoop
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_markers import RunMarkers
    from clusterctl.agent.supervisor.attempt import Attempt
    from clusterctl.agent.supervisor.workers import Worker

    Answer = dict[str, Any]
    Action = Callable[[], None]


class ForkServerManager:
    """Starts a forkserver if the head requests one, and defers starts of workers until it is ready."""

    def __init__(
        self, loop: EventLoop, run: RunDir, markers: RunMarkers, record: Callable[[events.Event], object]
    ) -> None:
        """Begin without a forkserver."""
        self._loop, self._run, self._markers, self._record = loop, run, markers, record
        self._server: ForkServer | None = None
        self._attempt: Attempt | None = None
        self._request: requests.Forked | None = None
        self._waiting_starts: list[tuple[Action, Action, DeferredReply]] = []
        self._warned_reasons: set[str] = set()

    # --- the forkserver

    def prepare(self, attempt: Attempt) -> None:
        """Provide a forkserver for an attempt that requests one; the one of the last attempt may serve again."""
        wanted = attempt.prepare.forked
        self._attempt, self._warned_reasons = attempt, set()
        self._request = None if wanted is None else dataclass_json.parse_dataclass(requests.Forked, wanted)
        if self._request is None:
            self.close()
            return
        attempt.start_workers = self._start_workers
        program, old = self._build_program(attempt.prepare, attempt.python, self._request), self._server
        if old is not None and old.stage is not Stage.OVER and old.matches(self._request, program):
            attempt.known_processes.protected.add(old.identity)
            old.revalidate(self._request, program)
        else:
            self.close()
            self._start(self._request, program)

    def _build_program(self, prepare: requests.Prepare, python: str, request: requests.Forked) -> spawn.Program:
        one = requests.WorkerStart(rank=0, local_rank=0, argv=request.argv, env=request.env)
        # Attempt 0 stands for every attempt: the variables of a single attempt are left out anyway.
        start = requests.Start(self._run.run, self._run.node, 0, [], inject=request.inject)
        return workers.build_worker_program(self._run, self._markers, prepare, start, one, python)

    def _start(self, request: requests.Forked, program: spawn.Program) -> None:
        try:
            if not workers.install_shim(self._run):
                raise OSError(0, "its modules cannot be written")
            server = ForkServer(self._loop, request, program, inject.folder(self._run.root), self._on_state_change)
        except OSError as error:
            self._warn_not_forked(f"no process can be had to fork them: {error.strerror}")
            return
        if self._attempt is not None:
            self._attempt.known_processes.protected.add(server.identity)
        self._server = server

    def _on_state_change(self) -> None:
        """Handle a forkserver that has become ready or has ended."""
        server = self._server
        if server is not None and server.stage is Stage.OVER:
            self._server = None
            if server.is_stale and self._attempt is not None and self._request is not None:
                again = self._build_program(self._attempt.prepare, self._attempt.python, self._request)
                self._start(self._request, again)
                return
            self._warn_not_forked(server.end_reason)
        self.run_waiting_starts()

    def close(self) -> None:
        """End the forkserver without a message."""
        server, self._server = self._server, None
        if server is not None:
            server.close("")

    # --- starts

    def when_ready(self, start: Action, started: Action) -> Answer | DeferredReply:
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

    def _run_start(self, start: Action, started: Action) -> Answer:
        try:
            start()
        finally:
            started()
            if self._server is not None and self._server.stage is Stage.READY and not self._server.request.keep:
                self.close()
        return {}

    def _start_workers(self, wanted: Sequence[forkserver.WorkerToStart]) -> Iterator[Worker]:
        server, anew = self._server, len(self._warned_reasons)
        yield from forkserver.start_workers(server, wanted, self._warn_not_forked)
        if server is not None and len(self._warned_reasons) == anew and wanted and self._attempt is not None:
            self._record_alarm(events.FORKED, _describe_gain(server.report, len(wanted)))

    def _record_alarm(self, code: str, text: str) -> None:
        if self._attempt is not None:
            self._record(events.Alarm(self._attempt.number, code, text, "info"))

    def _warn_not_forked(self, why: str) -> None:
        """Record, once per attempt and reason, why ranks are not forked."""
        if self._attempt is None or self._request is None or why in self._warned_reasons:
            return
        self._warned_reasons.add(why)
        severity = "warn" if self._request.demanded else "info"
        text = f"not forked, but started anew: {why}"
        self._record(events.Alarm(self._attempt.number, events.NOT_FORKED, text, severity))


def _describe_gain(report: dict[str, Any], ranks: int) -> str:
    """Describe how much a forkserver saves."""
    names = report["modules"]
    what = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    memory = f"{report['kilobytes'] / 1024:.0f} MiB once instead of {ranks} times"
    return f"{ranks} forked from one process that took {report['seconds']:.1f} s to import {what}: {memory}"
