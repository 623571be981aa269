"""The requests to a node: the types of arguments and answer, the time limit, and the exceptions for error answers."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from clusterctl.agent.protocol import command_payload_types, run_requests
from clusterctl.agent.protocol.command_messages import Command, ErrorKind
from clusterctl.agent.protocol.command_payload_types import Facts
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.record_types import EvidenceAnswer
from clusterctl.agent.protocol.validators import ValidationError
from clusterctl.errors import AgentError, ClusterctlError, NotFoundError, RefusedError
from clusterctl.validation.derived_validators import derive_object_validator

if TYPE_CHECKING:
    from clusterctl.agent.protocol.validators import Validator

Arguments = TypeVar("Arguments")
Answer = TypeVar("Answer")


class ProtocolError(AgentError):
    """The node sent bytes that clusterctl's agent never sends: the bytes are damaged or forged."""


class StaleEpochError(RefusedError):
    """The node obeys a later controller of the run, so this controller must stop."""


def convert_error_answer(node: str, error: dict[str, Any]) -> ClusterctlError:
    """Return the exception for an agent's error answer (`ErrorAnswer`)."""
    message, hint = str(error.get("message", "")), error.get("hint")
    # Without this prefix the user would take the hint for clusterctl's own advice.
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


class RequestSender(Protocol):
    """The methods of `Session` that send requests; `Session` documents them."""

    def call(self, command: Command, arguments: Any, *, timeout: float | None) -> Any:
        """Send a request and return its answer."""

    def call_async(self, command: Command, arguments: Any) -> Future[Any]:
        """Send a request and return a future for its answer."""

    def post(self, command: Command, arguments: Any) -> None:
        """Send a message that has no answer."""


@dataclass(frozen=True)
class Request(Generic[Arguments, Answer]):
    """A command to a node, with the types of its arguments and its answer.

    Attributes:
        timeout_s: The time limit in seconds for the answer, if the caller gives no limit. The default suits commands
            for which a node reads only its memory and small files; a loaded machine needs seconds even for such
            commands.
    """

    command: Command
    arguments: type[Arguments]
    answer: type[Answer]
    timeout_s: float = 20.0

    def call(self, session: RequestSender, arguments: Arguments, *, timeout: float | None = None) -> Answer:
        """Send the request and wait for the answer; see `Session.call`."""
        return cast("Answer", session.call(self.command, arguments, timeout=timeout))

    def call_async(self, session: RequestSender, arguments: Arguments) -> Future[Answer]:
        """Send the request; see `Session.call_async`."""
        return session.call_async(self.command, arguments)

    def post(self, session: RequestSender, arguments: Arguments) -> None:
        """Send a request that has no answer; see `Session.post`."""
        session.post(self.command, arguments)

    def validate_answer(self, value: Any) -> dict[str, Any]:
        """Return the result of the command, if its fields are valid.

        Raises:
            FrameError: A field of the result is missing or invalid.
        """
        try:
            self._validator(value)
        except ValidationError as error:
            raise FrameError(f"its answer to `{self.command.value}`: {error}") from None
        return cast("dict[str, Any]", value)

    @cached_property
    def _validator(self) -> Validator:
        return derive_object_validator(self.answer)


HELLO = Request(Command.HELLO, command_payload_types.NoArguments, command_payload_types.HelloAnswer)
# The node resolves the name of every peer, and finds the route to every peer.
ROUTES = Request(Command.ROUTES, command_payload_types.RoutesArguments, command_payload_types.RoutesAnswer, 60.0)
PROBE = Request(Command.PROBE, command_payload_types.ProbeArguments, Facts)
# LISTEN and UNLISTEN have a short limit, because a peer waits for the answer.
LISTEN = Request(Command.LISTEN, command_payload_types.ListenArguments, command_payload_types.ListenAnswer, 10.0)
UNLISTEN = Request(Command.UNLISTEN, command_payload_types.UnlistenArguments, command_payload_types.EmptyAnswer, 10.0)
CONNECT = Request(Command.CONNECT, command_payload_types.ConnectArguments, command_payload_types.ConnectAnswer)
ANSWERS = Request(Command.ANSWERS, command_payload_types.AnswersArguments, command_payload_types.AnswersAnswer)
MANIFEST = Request(Command.MANIFEST, command_payload_types.ManifestArguments, command_payload_types.ManifestAnswer)
RECEIVE = Request(Command.RECEIVE, command_payload_types.ReceiveArguments, command_payload_types.ReceiveAnswer)
COPY = Request(Command.COPY, command_payload_types.CopyArguments, command_payload_types.CopyAnswer)
# The node reads the pieces that an interrupted cast has left.
CAST = Request(Command.CAST, command_payload_types.CastArguments, command_payload_types.CastAnswer, 1800.0)
# The node reads all files twice.
CONTENTS = Request(
    Command.CONTENTS, command_payload_types.ContentsArguments, command_payload_types.ContentsAnswer, 24 * 3600.0
)
FETCH = Request(Command.FETCH, command_payload_types.FetchArguments, command_payload_types.FetchAnswer)
# The node searches a checkpoint folder, which may lie on a slow file server.
CHECKPOINTS = Request(
    Command.CHECKPOINTS, command_payload_types.CheckpointsArguments, command_payload_types.CheckpointsAnswer, 60.0
)
# The node reads every source file of a workdir, which may lie on a slow file server.
CODE = Request(Command.CODE, command_payload_types.CodeArguments, command_payload_types.CodeAnswer, 30.0)
# The node may remove old environments, and may try to reach a package index.
ENVIRONMENT = Request(
    Command.ENVIRONMENT, command_payload_types.EnvironmentArguments, command_payload_types.EnvironmentAnswer, 300.0
)
QUEUE = Request(Command.QUEUE, command_payload_types.QueueArguments, command_payload_types.QueueAnswer)
RESERVE = Request(Command.RESERVE, command_payload_types.ReserveArguments, command_payload_types.ReserveAnswer)
# The node reserves disk space for all ranks. The node also claims GPUs, which an earlier run may still be releasing.
PREPARE = Request(Command.PREPARE, run_requests.PrepareArguments, command_payload_types.PrepareAnswer, 60.0)
# The node starts a waiter and a worker for each rank.
START = Request(Command.START, run_requests.StartArguments, command_payload_types.EmptyAnswer, 60.0)
STOP = Request(Command.STOP, run_requests.StopArguments, command_payload_types.EmptyAnswer)
FINISH = Request(Command.FINISH, command_payload_types.FinishArguments, command_payload_types.EmptyAnswer)
FOLLOW = Request(Command.FOLLOW, run_requests.FollowArguments, command_payload_types.EmptyAnswer)
READ = Request(Command.READ, command_payload_types.ReadArguments, command_payload_types.ReadAnswer)
STATUS = Request(Command.STATUS, command_payload_types.RunArguments, command_payload_types.StatusAnswer)
# The node reads the journals of all its runs.
RUNS = Request(Command.RUNS, command_payload_types.NoArguments, command_payload_types.RunsAnswer, 30.0)
# The request contains a shorter limit, after which the node sends the evidence that it has collected so far.
EVIDENCE = Request(Command.EVIDENCE, command_payload_types.EvidenceArguments, EvidenceAnswer, 15.0)
# The answer follows after the seconds of the request, so the caller gives the limit.
PROFILE = Request(Command.PROFILE, command_payload_types.ProfileArguments, command_payload_types.ProfileAnswer)
CLEAN = Request(Command.CLEAN, command_payload_types.RunArguments, command_payload_types.CleanAnswer)
EXEC = Request(Command.EXEC, command_payload_types.ExecArguments, command_payload_types.ExecAnswer)
SHELL_SCRIPT = Request(
    Command.SHELL_SCRIPT, command_payload_types.WriteScriptArguments, command_payload_types.ShellScriptAnswer
)
BYE = Request(Command.BYE, command_payload_types.NoArguments, command_payload_types.EmptyAnswer)
# A node does not answer the following requests.
CREDIT = Request(Command.CREDIT, command_payload_types.CreditArguments, command_payload_types.EmptyAnswer)
REPLICATED = Request(Command.REPLICATED, command_payload_types.ReplicatedArguments, command_payload_types.EmptyAnswer)
CANCEL = Request(Command.CANCEL, command_payload_types.CancelArguments, command_payload_types.EmptyAnswer)

REQUESTS = {request.command: request for request in vars().copy().values() if isinstance(request, Request)}
"""The request of each command."""
