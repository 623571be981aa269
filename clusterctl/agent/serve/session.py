"""`serve`: what a controller talks to over its connection. Stateless; any number at once; ends with its connection."""

from __future__ import annotations

import os
import time

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.channel import Channel
from clusterctl.agent.linux.loop import Loop
from clusterctl.agent.protocol import commands, frames, request_errors
from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.agent.record import authority, rundir
from clusterctl.agent.record.rundir import RunDir
from clusterctl.agent.serve.jobs import Jobs
from clusterctl.agent.serve.pump import Pump

# Not from `typing`; it, and what only runs need, would be most of an agent's start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable, Optional

    from clusterctl.agent.linux.aside import Outcome, Task
    from clusterctl.agent.protocol import command_types
    from clusterctl.agent.protocol.frames import Message
    from clusterctl.agent.record.states import States
    from clusterctl.agent.serve.holds import Holds
    from clusterctl.agent.serve.supervisor_link import Link

    Result = Optional[Mapping[str, object]]
    Handler = Callable[[int, Any, Optional[int]], Result]
    """Takes the id of a request, its arguments (`command_types` by command) and its epoch."""
    Handlers = dict[Command, Handler]

_LEASE_SECONDS = 0.5
_CHECK_SECONDS = 1.0


class Session:
    """One controller. A handler returns its answer, or `None` where the answer comes later.

    Args:
        tables: Make the handlers of commands, one table after the other: a command that an earlier one does not know is
            looked for in the next, which is made only then.
    """

    def __init__(self, read: int, write: int, idle: float, tables: Sequence[Callable[[Session], Handlers]]) -> None:
        self.loop = Loop()
        self._root: str | None = None
        self.channel = Channel(self.loop, read, write, self._frame, lambda _why: self.end())
        self.jobs = Jobs(self.loop, self.channel)
        self.data_handlers: dict[int, Callable[[frames.StreamData], None]] = {}
        self._holds: Holds | None = None
        self._links: dict[tuple[str, str], Link] = {}
        self._states: States | None = None
        self._held: dict[tuple[str, str], int] = {}
        self._at_end: list[Callable[[], None]] = []
        self._idle = idle
        self._heard = self._leased = time.monotonic()
        self._handlers = self._own_handlers()
        self._tables = list(tables)
        self.loop.on_children(self.jobs.reap)
        self._pump = Pump(self.loop, self.channel)
        self.loop.every(min(_CHECK_SECONDS, idle / 4), self._check)

    def _own_handlers(self) -> Handlers:
        supervised = (Command.PREPARE, Command.START, Command.STOP, Command.FINISH)
        return {
            **{command: self._forwarder(command) for command in supervised},
            Command.FOLLOW: self._follow,
            Command.CREDIT: self._more_credit,
            Command.REPLICATED: self._replicated,
            Command.BYE: self._bye,
        }

    def _handler(self, command: Command) -> Handler:
        while command not in self._handlers and self._tables:
            self._handlers |= self._tables.pop(0)(self)
        return self._handlers[command]

    # --- frames

    def _frame(self, frame: frames.Frame) -> None:
        self._heard = time.monotonic()
        self._keep_leases()
        if isinstance(frame, frames.StreamData):
            handler = self.data_handlers.get(frame.stream)
            if handler is not None:
                handler(frame)
        elif "cmd" in frame:
            self._request(frame)
        elif "beat" in frame:
            self.channel.send(
                commands.make_heartbeat_answer(frame["beat"], time.time(), time.monotonic(), proc.boot_id())
            )

    def _request(self, frame: Message) -> None:
        identity = int(frame.get("id") or 0)
        arguments = frame.get("args") or {}
        try:
            command = Command(frame["cmd"])
            result = self._handler(command)(identity, arguments, frame.get("epoch"))
        except Exception as error:
            self.answer_error(identity, error)
            return
        if result is not None and command not in commands.COMMANDS_WITHOUT_ANSWER:
            self.answer(identity, result)

    def answer(self, identity: int, result: Mapping[str, object]) -> None:
        """Answer a request, in words where no frame holds the answer."""
        try:
            self.channel.send(commands.make_answer(identity, result))
        except frames.FrameTooLargeError as error:
            self.answer_error(identity, error)

    def answer_error(self, identity: int, error: Exception) -> None:
        """Answer a request that went wrong."""
        if not isinstance(error, request_errors.EXPECTED_ERRORS):
            import traceback

            traceback.print_exc()
        self.channel.send(request_errors.convert_to_request_error(error).answer(identity))

    def work(self, identity: int, task: Task) -> None:
        """Do something in a fork and answer the request with what comes of it."""

        def done(outcome: Outcome) -> None:
            if isinstance(outcome, Exception):
                self.answer_error(identity, outcome)
            else:
                self.answer(identity, outcome)

        self.jobs.work(task, done)

    # --- runs

    @property
    def root(self) -> str:
        """The state root.

        Raises:
            RootError: There is no place for our state on this node.
        """
        if self._root is None:
            self._root = rundir.state_root()
        return self._root

    @property
    def holds(self) -> Holds:
        """The workdirs held for runs that are being started here."""
        if self._holds is None:
            from clusterctl.agent.serve.holds import Holds

            self._holds = Holds()
        return self._holds

    def run_of(self, asked: command_types.RunArguments) -> RunDir:
        """Return the run that a request names."""
        return RunDir(self.root, str(asked["run"]), str(asked["node"]))

    def known_run(self, asked: command_types.RunArguments) -> RunDir:
        """Return the run that a request names.

        Raises:
            RequestError: This node knows no such run.
        """
        run = self.run_of(asked)
        if not os.path.isdir(run.path):
            raise request_errors.RequestError(
                ErrorKind.NOT_FOUND, f"no run {run.run} of node {run.node} on this machine"
            )
        return run

    def admit(self, run: RunDir, epoch: int | None) -> None:
        """Let a command for a run pass; `None` may only read and is let pass always.

        Raises:
            RequestError: A newer controller has taken over.
        """
        if epoch is None:
            return
        key = (run.run, run.node)
        try:
            authority.admit(run.epoch, int(epoch))
        except request_errors.RequestError:
            self._leave(key)
            raise
        if key not in self._held:
            authority.touch_lease(run.lease)
        self._held[key] = int(epoch)

    def _leave(self, key: tuple[str, str]) -> None:
        """Have nothing more to do with a run that another controller has taken over."""
        self._held.pop(key, None)
        self._pump.leave(key)
        link = self._links.pop(key, None)
        if link is not None:
            link.close()

    def _keep_leases(self) -> None:
        """Let the fences of the runs that this controller holds know that it was heard."""
        if self._heard - self._leased < _LEASE_SECONDS:
            return
        self._leased = self._heard
        for (name, node), epoch in list(self._held.items()):
            run = RunDir(self.root, name, node)
            if authority.current(run.epoch) > epoch:
                self._leave((name, node))
                self.channel.send({"push": "stale", "run": name, "node": node})
            else:
                authority.touch_lease(run.lease)

    @property
    def states(self) -> States:
        """What the journals on this node say."""
        if self._states is None:
            from clusterctl.agent.record.states import States

            self._states = States()
        return self._states

    def link(self, run: RunDir) -> Link:
        """Return the link to a run's supervisor."""
        key = (run.run, run.node)
        if key not in self._links:
            from clusterctl.agent.serve.supervisor_link import Link

            self._links[key] = Link(self.loop, run, lambda: self._needs_supervisor(key))
        return self._links[key]

    def _needs_supervisor(self, key: tuple[str, str]) -> bool:
        """Whether a run that this controller follows still has something to be watched."""
        if key not in self._pump or key not in self._held:
            return False
        return self.states.of(RunDir(self.root, *key)).state not in ("new", "swept", "finished")

    def _forwarder(self, command: Command) -> Handler:
        def forward(identity: int, asked: Any, epoch: int | None) -> Result:
            if epoch is None:
                raise request_errors.RequestError(ErrorKind.BAD_REQUEST, f"`{command.value}` needs an epoch")
            if command is Command.PREPARE:
                run = self.run_of(asked)
                run.make()
                asked = {**asked, "workdir": os.path.abspath(os.path.expanduser(asked["workdir"]))}
            elif command is Command.START:
                run = self.known_run(asked)
            else:
                # A node that never heard of the run keeps the epoch all the same: what a controller that is gone asked
                # for may still be on its way, and is refused then.
                run = self.run_of(asked)
                run.make()
            self.admit(run, epoch)
            if command is Command.FINISH:
                self._let_workdirs_go(run)
            if command in (Command.STOP, Command.FINISH) and self._nothing_to_do(run):
                return {}

            def pass_on(message: Message) -> None:
                if command is Command.PREPARE and "result" in message:
                    # From here on its own directory tells that it uses the workdir.
                    self._let_workdirs_go(run)
                self.channel.send({**message, "id": identity})

            self.link(run).ask(command, asked, epoch, pass_on)
            return None

        return forward

    def _let_workdirs_go(self, run: RunDir) -> None:
        if self._holds is not None:
            self._holds.drop_all_of(run.run)

    def _nothing_to_do(self, run: RunDir) -> bool:
        from clusterctl.agent.members import guardians

        state = self.states.of(run)
        return state.finished is not None or (state.seq == 0 and guardians.supervisor(run) is None)

    def _replicated(self, _identity: int, asked: command_types.ReplicatedArguments, epoch: int | None) -> Result:
        run = self.run_of(asked)
        key = (run.run, run.node)
        if key in self._held and key in self._links:
            self._links[key].tell(Command.REPLICATED, asked, epoch)
        return None

    # --- following

    def _follow(self, _identity: int, asked: Any, epoch: int | None) -> Result:
        # With what dataclasses import, it would be half of an agent's start.
        from clusterctl.agent.protocol import dataclass_json, requests

        follow = dataclass_json.parse_dataclass(requests.Follow, asked)
        run = self.known_run(asked)
        self.admit(run, epoch)
        if not os.path.exists(run.journal):
            raise request_errors.RequestError(ErrorKind.NOT_FOUND, f"run {run.run} was not prepared on this node")
        self._pump.follow(run, follow)
        if epoch is not None and self._needs_supervisor((run.run, run.node)):
            self.link(run).ensure()
        return {}

    def _more_credit(self, _identity: int, asked: command_types.CreditArguments, _epoch: int | None) -> Result:
        self._pump.credit(int(asked["bytes"]))
        return None

    # --- the end

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` when the session ends."""
        self._at_end.append(action)

    def _check(self) -> None:
        if time.monotonic() - self._heard > self._idle:
            self.channel.close("idle")

    def _bye(self, identity: int, _asked: command_types.NoArguments, _epoch: int | None) -> Result:
        self.answer(identity, {})
        self.channel.flush()
        self.channel.close("bye")
        return None

    def end(self) -> None:
        """End with everything that was started for this controller; runs are not."""
        self.jobs.kill_all()
        for action in self._at_end:
            action()
        self.loop.stop()
