"""The agent's end of one session with a controller (`serve`). It stores no state and ends with the connection."""

from __future__ import annotations

import functools
import sys
import time

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.event_loop import EventLoop, FrameChannel
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import command_messages, frames
from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.serve.child_processes import ChildProcesses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Callable, Optional

    from clusterctl.agent.linux.helper_process import Task, TaskResult
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.protocol.frames import Message

    Result = Optional[Mapping[str, object]]
    Handler = Callable[[int, Any, Optional[int]], Result]
    """Function that takes id, arguments (`command_payload_types`) and epoch of a request, and returns the answer."""
    Handlers = dict[Command, Handler]

_IDLE_CHECK_S = 1.0


class AgentSession:
    """Handles the requests of one controller. A handler returns the answer, or `None` if the answer follows later.

    Args:
        makers: Functions that make handlers of commands. While a command has no handler, the session calls the next
            function.

    Attributes:
        data_handlers: Functions that take the pieces of received streams, by stream number.
        frame_actions: Called after the arrival of each frame.
        end_actions: Called at the end of the session.
    """

    def __init__(
        self, read: int, write: int, idle_s: float, makers: Sequence[Callable[[AgentSession], Handlers]]
    ) -> None:
        self.loop = EventLoop()
        self.channel = FrameChannel(self.loop, read, write, self._receive_frame, lambda _why: self.end())
        self.children = ChildProcesses(self.loop, self.channel)
        self.data_handlers: dict[int, Callable[[frames.StreamData], None]] = {}
        self.frame_actions: list[Callable[[], None]] = []
        self.end_actions: list[Callable[[], None]] = []
        self._idle_s = idle_s
        self._last_frame_at = time.monotonic()
        self._handlers: Handlers = {Command.BYE: self._handle_bye}
        self._makers = list(makers)
        self.loop.on_child_exit(self.children.reap)
        self.loop.call_repeatedly(min(_IDLE_CHECK_S, idle_s / 4), self._close_if_idle)

    # --- frames

    def _receive_frame(self, frame: frames.Frame) -> None:
        self._last_frame_at = time.monotonic()
        for action in self.frame_actions:
            action()
        if isinstance(frame, frames.StreamData):
            handler = self.data_handlers.get(frame.stream)
            if handler is not None:
                handler(frame)
        elif "cmd" in frame:
            self._handle_request(frame)
        elif "beat" in frame:
            self.channel.send(
                command_messages.make_heartbeat_answer(
                    frame["beat"], time.time(), time.monotonic(), proc.read_boot_id()
                )
            )

    def _handle_request(self, frame: Message) -> None:
        request_id = int(frame.get("id") or 0)
        arguments = frame.get("args") or {}
        try:
            command = Command(frame["cmd"])
            while command not in self._handlers and self._makers:
                self._handlers |= self._makers.pop(0)(self)
            result = self._handlers[command](request_id, arguments, frame.get("epoch"))
        except Exception as error:
            self.answer_error(request_id, error)
            return
        if result is not None and command not in command_messages.COMMANDS_WITHOUT_ANSWER:
            self.answer(request_id, result)

    def answer(self, request_id: int, result: Mapping[str, object]) -> None:
        """Send the answer to a request, or an error if the answer is too large for a frame."""
        try:
            self.channel.send(command_messages.make_answer(request_id, result))
        except frames.FrameTooLargeError as error:
            self.answer_error(request_id, error)

    def answer_error(self, request_id: int, error: Exception) -> None:
        """Send an error as the answer to a request."""
        if not isinstance(error, command_messages.EXPECTED_ERRORS):
            # Print the traceback without an import of `traceback`.
            sys.excepthook(type(error), error, error.__traceback__)
        self.channel.send(command_messages.convert_to_request_error(error).make_answer(request_id))

    def run_task(self, request_id: int, task: Task) -> None:
        """Run a task in a helper process, and send its result as the answer to a request."""

        def answer_request(outcome: TaskResult) -> None:
            if isinstance(outcome, Exception):
                self.answer_error(request_id, outcome)
            else:
                self.answer(request_id, outcome)

        self.children.run_task(task, answer_request)

    @functools.cached_property
    def state_root(self) -> str:
        """The path of the state root, which is made at the first use.

        Raises:
            RequestError: The state root cannot be used.
        """
        return run_dir.make_state_root()

    # --- the end

    def _close_if_idle(self) -> None:
        if time.monotonic() - self._last_frame_at > self._idle_s:
            self.channel.close("idle")

    def _handle_bye(self, request_id: int, _asked: command_payload_types.NoArguments, _epoch: int | None) -> Result:
        self.answer(request_id, {})
        self.channel.flush()
        self.channel.close("bye")
        return None

    def end(self) -> None:
        """End the session, its programs and its tasks. Supervisors and workers continue."""
        self.children.kill_all()
        for action in self.end_actions:
            action()
        self.loop.stop()
