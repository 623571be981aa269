"""`serve`: the node's end of one connection to a controller. It keeps no state and ends with its connection."""

from __future__ import annotations

import functools
import os
import time

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel
from clusterctl.agent.node_state import fencing, run_dir
from clusterctl.agent.node_state.run_dir import RunDir
from clusterctl.agent.protocol import commands, frames
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.serve.child_processes import ChildProcesses
from clusterctl.agent.serve.follow_sender import FollowSender

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable, Optional

    from clusterctl.agent.linux.helper_process import Task, TaskResult
    from clusterctl.agent.node_state.journal import JournalCache
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.frames import Message
    from clusterctl.agent.serve.supervisor_link import SupervisorLink
    from clusterctl.agent.serve.workdirs import WorkdirLocks

    Result = Optional[Mapping[str, object]]
    Handler = Callable[[int, Any, Optional[int]], Result]
    """Takes the id of a request, its arguments (see `command_types`) and its epoch; returns the answer."""
    Handlers = dict[Command, Handler]

_LEASE_INTERVAL_S = 0.5
_IDLE_CHECK_S = 1.0


class Session:
    """The session of one controller. A handler returns its answer, or `None` if the answer comes later.

    Args:
        tables: Functions that make the handlers of some commands. A table is made only if a command is in no earlier
            one.
    """

    def __init__(self, read: int, write: int, idle_s: float, tables: Sequence[Callable[[Session], Handlers]]) -> None:
        self.loop = EventLoop()
        self.channel = FrameChannel(self.loop, read, write, self._receive_frame, lambda _why: self.end())
        self.children = ChildProcesses(self.loop, self.channel)
        self.data_handlers: dict[int, Callable[[frames.StreamData], None]] = {}
        self._links: dict[tuple[str, str], SupervisorLink] = {}
        self._epochs: dict[tuple[str, str], int] = {}
        self.end_actions: list[Callable[[], None]] = []
        self._idle_s = idle_s
        self._last_frame_at = self._last_lease_at = time.monotonic()
        self._handlers = self._make_handlers()
        self._tables = list(tables)
        self.loop.on_children(self.children.reap)
        self._follow_sender = FollowSender(self.loop, self.channel)
        self.loop.every(min(_IDLE_CHECK_S, idle_s / 4), self._close_if_idle)

    def _make_handlers(self) -> Handlers:
        supervised = (Command.PREPARE, Command.START, Command.STOP, Command.FINISH)
        return {
            **{command: self._make_forwarder(command) for command in supervised},
            Command.FOLLOW: self._follow,
            Command.CREDIT: lambda _id, arguments, _epoch: self._follow_sender.add_credit(int(arguments["bytes"])),
            Command.REPLICATED: self._forward_replicated,
            Command.BYE: self._handle_bye,
        }

    # --- frames

    def _receive_frame(self, frame: frames.Frame) -> None:
        self._last_frame_at = time.monotonic()
        self._renew_leases()
        if isinstance(frame, frames.StreamData):
            handler = self.data_handlers.get(frame.stream)
            if handler is not None:
                handler(frame)
        elif "cmd" in frame:
            self._handle_request(frame)
        elif "beat" in frame:
            self.channel.send(
                commands.make_heartbeat_answer(frame["beat"], time.time(), time.monotonic(), proc.read_boot_id())
            )

    def _handle_request(self, frame: Message) -> None:
        request_id = int(frame.get("id") or 0)
        arguments = frame.get("args") or {}
        try:
            command = Command(frame["cmd"])
            while command not in self._handlers and self._tables:
                self._handlers |= self._tables.pop(0)(self)
            result = self._handlers[command](request_id, arguments, frame.get("epoch"))
        except Exception as error:
            self.answer_error(request_id, error)
            return
        if result is not None and command not in commands.COMMANDS_WITHOUT_ANSWER:
            self.answer(request_id, result)

    def answer(self, request_id: int, result: Mapping[str, object]) -> None:
        """Answer a request; if the answer is too large for a frame, answer with an error."""
        try:
            self.channel.send(commands.make_answer(request_id, result))
        except frames.FrameTooLargeError as error:
            self.answer_error(request_id, error)

    def answer_error(self, request_id: int, error: Exception) -> None:
        """Answer a request with an error."""
        if not isinstance(error, commands.EXPECTED_ERRORS):
            import traceback

            traceback.print_exc()
        self.channel.send(commands.convert_to_request_error(error).answer(request_id))

    def run_task(self, request_id: int, task: Task) -> None:
        """Run a task in a fork and answer the request with its result."""

        def answer_request(outcome: TaskResult) -> None:
            if isinstance(outcome, Exception):
                self.answer_error(request_id, outcome)
            else:
                self.answer(request_id, outcome)

        self.children.run_task(task, answer_request)

    # --- runs

    @functools.cached_property
    def root(self) -> str:
        """The state root.

        Raises:
            RequestError: This node has no usable place for our state.
        """
        return run_dir.make_state_root()

    @functools.cached_property
    def workdir_locks(self) -> WorkdirLocks:
        """The locks on workdirs of runs that are starting in this session."""
        from clusterctl.agent.serve.workdirs import WorkdirLocks

        return WorkdirLocks()

    def get_run(self, arguments: command_types.RunArguments) -> RunDir:
        """Return the run that a request names, whether it exists or not."""
        return RunDir(self.root, str(arguments["run"]), str(arguments["node"]))

    def find_run(self, arguments: command_types.RunArguments) -> RunDir:
        """Return the run that a request names.

        Raises:
            RequestError: This node has no such run.
        """
        run = self.get_run(arguments)
        if not os.path.isdir(run.path):
            raise commands.RequestError(ErrorKind.NOT_FOUND, f"no run {run.run} of node {run.node} on this machine")
        return run

    def check_epoch(self, run: RunDir, epoch: int | None) -> None:
        """Refuse a command from a controller that lost the run; a request without an epoch may only read, and passes.

        Raises:
            RequestError: A newer controller has taken over.
        """
        if epoch is None:
            return
        key = (run.run, run.node)
        try:
            fencing.check_epoch(run.epoch, int(epoch))
        except commands.RequestError:
            self._release_run(key)
            raise
        if key not in self._epochs:
            fencing.touch_lease(run.lease)
        self._epochs[key] = int(epoch)

    def _release_run(self, key: tuple[str, str]) -> None:
        """Forget a run that another controller has taken over."""
        self._epochs.pop(key, None)
        self._follow_sender.unfollow(key)
        link = self._links.pop(key, None)
        if link is not None:
            link.close()

    def _renew_leases(self) -> None:
        """Renew the leases of this controller's runs, because a frame has arrived."""
        if self._last_frame_at - self._last_lease_at < _LEASE_INTERVAL_S:
            return
        self._last_lease_at = self._last_frame_at
        for (name, node), epoch in list(self._epochs.items()):
            run = RunDir(self.root, name, node)
            if fencing.read_epoch(run.epoch) > epoch:
                self._release_run((name, node))
                self.channel.send({"push": "stale", "run": name, "node": node})
            else:
                fencing.touch_lease(run.lease)

    @functools.cached_property
    def journal_states(self) -> JournalCache:
        """The states that the journals on this node describe."""
        from clusterctl.agent.node_state.journal import JournalCache

        return JournalCache()

    def get_link(self, run: RunDir) -> SupervisorLink:
        """Return the link to the supervisor of a run."""
        key = (run.run, run.node)
        if key not in self._links:
            from clusterctl.agent.serve.supervisor_link import SupervisorLink

            self._links[key] = SupervisorLink(self.loop, run, lambda: self._needs_supervisor(key))
        return self._links[key]

    def _needs_supervisor(self, key: tuple[str, str]) -> bool:
        """Return whether this controller follows a run that still needs a supervisor."""
        if key not in self._follow_sender or key not in self._epochs:
            return False
        return self.journal_states.of(RunDir(self.root, *key)).state not in ("new", "swept", "finished")

    def _make_forwarder(self, command: Command) -> Handler:
        def forward(request_id: int, arguments: Any, epoch: int | None) -> Result:
            if epoch is None:
                raise commands.RequestError(ErrorKind.BAD_REQUEST, f"`{command.value}` needs an epoch")
            if command is Command.PREPARE:
                run = self.get_run(arguments)
                run.make()
                arguments = {**arguments, "workdir": os.path.abspath(os.path.expanduser(arguments["workdir"]))}
            elif command is Command.START:
                run = self.find_run(arguments)
            else:
                # A node that does not know the run records the epoch all the same. It can then refuse a late request of
                # an earlier controller.
                run = self.get_run(arguments)
                run.make()
            self.check_epoch(run, epoch)
            if command is Command.FINISH:
                self.workdir_locks.release_run(run.run)
            if command in (Command.STOP, Command.FINISH):
                from clusterctl.agent.processes import run_processes

                state = self.journal_states.of(run)
                if state.finished is not None or (state.seq == 0 and run_processes.find_supervisor(run) is None):
                    return {}

            def pass_on(message: Message) -> None:
                if command is Command.PREPARE and "result" in message:
                    # From here on the run directory shows that the run uses the workdir.
                    self.workdir_locks.release_run(run.run)
                self.channel.send({**message, "id": request_id})

            self.get_link(run).send_request(command, arguments, epoch, pass_on)
            return None

        return forward

    def _forward_replicated(
        self, _identity: int, arguments: command_types.ReplicatedArguments, epoch: int | None
    ) -> Result:
        run = self.get_run(arguments)
        key = (run.run, run.node)
        if key in self._epochs and key in self._links:
            self._links[key].send_notice(Command.REPLICATED, arguments, epoch)
        return None

    # --- following

    def _follow(self, _identity: int, arguments: Any, epoch: int | None) -> Result:
        # These modules import dataclasses, which would take half of the agent's start.
        from clusterctl.agent.protocol import requests

        follow = requests.parse_dataclass(requests.Follow, arguments)
        run = self.find_run(arguments)
        self.check_epoch(run, epoch)
        if not os.path.exists(run.journal):
            raise commands.RequestError(ErrorKind.NOT_FOUND, f"run {run.run} was not prepared on this node")
        self._follow_sender.follow(run, follow)
        if epoch is not None and self._needs_supervisor((run.run, run.node)):
            self.get_link(run).ensure_supervisor()
        return {}

    # --- the end

    def _close_if_idle(self) -> None:
        if time.monotonic() - self._last_frame_at > self._idle_s:
            self.channel.close("idle")

    def _handle_bye(self, request_id: int, _asked: command_types.NoArguments, _epoch: int | None) -> Result:
        self.answer(request_id, {})
        self.channel.flush()
        self.channel.close("bye")
        return None

    def end(self) -> None:
        """End the session and all processes that were started for this controller; runs go on."""
        self.children.kill_all()
        for action in self.end_actions:
            action()
        self.loop.stop()
