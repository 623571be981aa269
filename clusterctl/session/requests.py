"""The requests to a node: types of arguments and answer, the time limit, and the exceptions for a refusal."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from clusterctl.agent.protocol import command_payload_types, requests
from clusterctl.agent.protocol.command_messages import Command, ErrorKind
from clusterctl.agent.protocol.command_payload_types import Facts
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import EvidenceAnswer
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.errors import AgentError, ClusterctlError, NotFoundError, RefusedError
from clusterctl.validation.derivation import derive_object

if TYPE_CHECKING:
    from clusterctl.agent.protocol.validators import Validator

Arguments = TypeVar("Arguments")
Answer = TypeVar("Answer")


class ProtocolError(AgentError):
    """The node sent bytes that no agent of ours sends: they are damaged or forged."""


class StaleEpochError(RefusedError):
    """The node obeys a later controller. This controller has been replaced and must stop acting."""


def make_refusal_error(node: str, error: dict[str, Any]) -> ClusterctlError:
    """Convert the refusal of an agent to an exception."""
    message, hint = str(error.get("message", "")), error.get("hint")
    # A hint without an author would read as our advice.
    hint = f"the node says: {hint}" if hint else None
    match error.get("kind"):
        case ErrorKind.STALE_EPOCH.value:
            return StaleEpochError(f"{node}: {message}", hint=hint)
        case ErrorKind.REFUSED.value:
            return RefusedError(f"{node}: {message}", hint=hint)
        case ErrorKind.NOT_FOUND.value:
            return NotFoundError(f"{node}: {message}", hint=hint)
        case _:
            return AgentError(node, message, hint=hint)


class Caller(Protocol):
    """The part of a session that sends requests; `Session` documents it."""

    def call(self, command: Command, arguments: Any, *, timeout: float | None) -> Any:
        """Send a request and wait for the answer."""

    def call_async(self, command: Command, arguments: Any) -> Future[Any]:
        """Send a request."""

    def post(self, command: Command, arguments: Any) -> None:
        """Send a message that has no answer."""


@dataclass(frozen=True)
class Request(Generic[Arguments, Answer]):
    """A command to a node, with the types of its arguments and its answer.

    Attributes:
        timeout_s: How long a node may take, if the caller has no reason to wait longer or shorter: a person who waits,
            data of a known size, work whose duration the caller sets. The default is for commands that a node answers
            from memory and its own small files; a loaded machine takes seconds for that.
    """

    command: Command
    arguments: type[Arguments]
    answer: type[Answer]
    timeout_s: float = 20.0

    def call(self, session: Caller, arguments: Arguments, *, timeout: float | None = None) -> Answer:
        """Send the request and wait for the answer; see `Session.call`."""
        return cast("Answer", session.call(self.command, arguments, timeout=timeout))

    def call_async(self, session: Caller, arguments: Arguments) -> Future[Answer]:
        """Send the request; see `Session.call_async`."""
        return session.call_async(self.command, arguments)

    def post(self, session: Caller, arguments: Arguments) -> None:
        """Send a request that has no answer; see `Session.post`."""
        session.post(self.command, arguments)

    def validate_answer(self, value: Any) -> dict[str, Any]:
        """Return the result of the command, if it fits.

        Raises:
            FrameError: The result does not fit.
        """
        try:
            self._validator(value)
        except ValidationError as error:
            raise FrameError(f"its answer to `{self.command.value}`: {error}") from None
        return cast("dict[str, Any]", value)

    @cached_property
    def _validator(self) -> Validator:
        return derive_object(self.answer)


HELLO = Request(Command.HELLO, command_payload_types.NoArguments, command_payload_types.HelloAnswer)
# Resolves names and looks up the route to every peer.
ROUTES = Request(Command.ROUTES, command_payload_types.RoutesArguments, command_payload_types.RoutesAnswer, 60.0)
PROBE = Request(Command.PROBE, command_payload_types.ProbeArguments, Facts)
# Open or close a port. The peer that connects to it waits meanwhile.
LISTEN = Request(Command.LISTEN, command_payload_types.ListenArguments, command_payload_types.ListenAnswer, 10.0)
UNLISTEN = Request(Command.UNLISTEN, command_payload_types.UnlistenArguments, command_payload_types.NoAnswer, 10.0)
CONNECT = Request(Command.CONNECT, command_payload_types.ConnectArguments, command_payload_types.ConnectAnswer)
MANIFEST = Request(Command.MANIFEST, command_payload_types.ManifestArguments, command_payload_types.ManifestAnswer)
RECEIVE = Request(Command.RECEIVE, command_payload_types.ReceiveArguments, command_payload_types.ReceiveAnswer)
COPY = Request(Command.COPY, command_payload_types.CopyArguments, command_payload_types.CopyAnswer)
FETCH = Request(Command.FETCH, command_payload_types.FetchArguments, command_payload_types.FetchAnswer)
# Walks a checkpoint folder on a file server.
CHECKPOINTS = Request(
    Command.CHECKPOINTS, command_payload_types.CheckpointsArguments, command_payload_types.CheckpointsAnswer, 60.0
)
# Reads every source file of a workdir, which may lie on a file server.
CODE = Request(Command.CODE, command_payload_types.CodeArguments, command_payload_types.CodeAnswer, 30.0)
# Reserves disk space for all ranks and claims GPUs that an earlier run may still be releasing.
PREPARE = Request(Command.PREPARE, requests.Prepare, command_payload_types.PrepareAnswer, 60.0)
# Forks a waiter and a worker for each rank.
START = Request(Command.START, requests.Start, command_payload_types.NoAnswer, 60.0)
STOP = Request(Command.STOP, requests.Stop, command_payload_types.NoAnswer)
FINISH = Request(Command.FINISH, command_payload_types.FinishArguments, command_payload_types.NoAnswer)
FOLLOW = Request(Command.FOLLOW, requests.Follow, command_payload_types.NoAnswer)
READ = Request(Command.READ, command_payload_types.ReadArguments, command_payload_types.ReadAnswer)
STATUS = Request(Command.STATUS, command_payload_types.RunArguments, command_payload_types.StatusAnswer)
# Folds the journals of all runs on the node.
RUNS = Request(Command.RUNS, command_payload_types.NoArguments, command_payload_types.RunsAnswer, 30.0)
# The request carries a shorter limit of its own: the node answers with what it has by then.
EVIDENCE = Request(Command.EVIDENCE, command_payload_types.EvidenceArguments, EvidenceAnswer, 15.0)
CLEAN = Request(Command.CLEAN, command_payload_types.RunArguments, command_payload_types.CleanAnswer)
EXEC = Request(Command.EXEC, command_payload_types.ExecArguments, command_payload_types.ExecAnswer)
SHELL_SCRIPT = Request(
    Command.SHELL_SCRIPT, command_payload_types.ShellScriptArguments, command_payload_types.ShellScriptAnswer
)
BYE = Request(Command.BYE, command_payload_types.NoArguments, command_payload_types.NoAnswer)
# Without an answer.
CREDIT = Request(Command.CREDIT, command_payload_types.CreditArguments, command_payload_types.NoAnswer)
REPLICATED = Request(Command.REPLICATED, command_payload_types.ReplicatedArguments, command_payload_types.NoAnswer)
CANCEL = Request(Command.CANCEL, command_payload_types.CancelArguments, command_payload_types.NoAnswer)

REQUESTS = {request.command: request for request in vars().copy().values() if isinstance(request, Request)}
"""The request of each command."""
