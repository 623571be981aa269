"""Requests to a node: argument and answer types, timeouts, and the error for a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, overload

from clusterctl.agent.protocol.commands import Command, ErrorKind
from clusterctl.errors import (
    AgentError,
    ClusterctlError,
    NotFoundError,
    RefusedError,
)

if TYPE_CHECKING:
    from concurrent.futures import Future
    from typing import Literal

    from clusterctl.agent.protocol import command_types, facts_types, process_types, requests


_DEFAULT_TIMEOUT_S = 20.0
"""Timeout of commands that a node answers from memory and its own small files. A loaded machine takes seconds for that.
"""

_TIMEOUTS_S: Mapping[Command, float] = {
    # Opens or closes a port. The peer that connects to it waits meanwhile.
    Command.LISTEN: 10.0,
    Command.UNLISTEN: 10.0,
    # The request carries a shorter limit of its own: the node answers with what it has by then.
    Command.EVIDENCE: 15.0,
    # Folds the journals of all runs on the node.
    Command.RUNS: 30.0,
    # Reads every source file of a workdir, which may lie on a file server.
    Command.CODE: 30.0,
    # Walks a checkpoint folder on a file server.
    Command.CHECKPOINTS: 60.0,
    # Resolves names and looks up the route to every peer.
    Command.ROUTES: 60.0,
    # Reserves disk space for all ranks and claims GPUs that an earlier run may still be releasing.
    Command.PREPARE: 60.0,
    # Forks a waiter and a worker for each rank.
    Command.START: 60.0,
}


def answer_timeout_s(command: Command) -> float:
    """Return how long a node may take to answer a command.

    A caller with a reason to wait longer or shorter passes its own timeout: a person who waits, data of a known size,
        work
    whose duration the caller sets.
    """
    return _TIMEOUTS_S.get(command, _DEFAULT_TIMEOUT_S)


class ProtocolError(AgentError):
    """The node sent bytes that no agent of ours sends: they are damaged or forged."""


class StaleEpochError(RefusedError):
    """The node obeys a later controller. This controller has been replaced and must stop acting."""


def error_from_wire(node: str, error: dict[str, Any]) -> ClusterctlError:
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


if TYPE_CHECKING:
    Arguments = Mapping[str, Any] | requests.Prepare | requests.Start | requests.Stop | requests.Follow
    """A mapping of `command_types`, or one of the request dataclasses."""


class Requests:
    """Requests to a node. Every method may be called from any thread."""

    @overload
    def call(
        self, command: Literal[Command.HELLO], asked: command_types.NoArguments = ..., *, timeout: float | None = ...
    ) -> command_types.HelloAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.STATUS], asked: command_types.RunArguments, *, timeout: float | None = ...
    ) -> command_types.StatusAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.RUNS], asked: command_types.NoArguments = ..., *, timeout: float | None = ...
    ) -> command_types.RunsAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.ROUTES], asked: command_types.RoutesArguments, *, timeout: float | None = ...
    ) -> command_types.RoutesAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.PROBE], asked: command_types.ProbeArguments, *, timeout: float | None = ...
    ) -> facts_types.Facts: ...
    @overload
    def call(
        self, command: Literal[Command.LISTEN], asked: command_types.ListenArguments, *, timeout: float | None = ...
    ) -> command_types.ListenAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.UNLISTEN], asked: command_types.UnlistenArguments, *, timeout: float | None = ...
    ) -> None: ...
    @overload
    def call(
        self, command: Literal[Command.CONNECT], asked: command_types.ConnectArguments, *, timeout: float | None = ...
    ) -> command_types.ConnectAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.MANIFEST], asked: command_types.ManifestArguments, *, timeout: float | None = ...
    ) -> command_types.ManifestAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.RECEIVE], asked: command_types.ReceiveArguments, *, timeout: float | None = ...
    ) -> command_types.ReceiveAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.FETCH], asked: command_types.FetchArguments, *, timeout: float | None = ...
    ) -> command_types.FetchAnswer: ...
    @overload
    def call(
        self,
        command: Literal[Command.CHECKPOINTS],
        asked: command_types.CheckpointsArguments,
        *,
        timeout: float | None = ...,
    ) -> command_types.CheckpointsAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.CODE], asked: command_types.CodeArguments, *, timeout: float | None = ...
    ) -> command_types.CodeAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.PREPARE], asked: requests.Prepare, *, timeout: float | None = ...
    ) -> command_types.PrepareAnswer: ...
    @overload
    def call(self, command: Literal[Command.START], asked: requests.Start, *, timeout: float | None = ...) -> None: ...
    @overload
    def call(self, command: Literal[Command.STOP], asked: requests.Stop, *, timeout: float | None = ...) -> None: ...
    @overload
    def call(
        self, command: Literal[Command.FINISH], asked: command_types.FinishArguments, *, timeout: float | None = ...
    ) -> None: ...
    @overload
    def call(
        self, command: Literal[Command.FOLLOW], asked: requests.Follow, *, timeout: float | None = ...
    ) -> None: ...
    @overload
    def call(
        self, command: Literal[Command.READ], asked: command_types.ReadArguments, *, timeout: float | None = ...
    ) -> command_types.ReadAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.EVIDENCE], asked: command_types.EvidenceArguments, *, timeout: float | None = ...
    ) -> process_types.EvidenceAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.CLEAN], asked: command_types.RunArguments, *, timeout: float | None = ...
    ) -> command_types.CleanAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.EXEC], asked: command_types.ExecArguments, *, timeout: float | None = ...
    ) -> command_types.ExecAnswer: ...
    @overload
    def call(
        self,
        command: Literal[Command.SHELL_SCRIPT],
        asked: command_types.ShellScriptArguments,
        *,
        timeout: float | None = ...,
    ) -> command_types.ShellScriptAnswer: ...
    @overload
    def call(
        self, command: Literal[Command.BYE], asked: command_types.NoArguments = ..., *, timeout: float | None = ...
    ) -> None: ...
    def call(self, command: Command, asked: Any = None, *, timeout: float | None = None) -> Any:
        """Send a request and wait for the answer.

        Raises:
            RefusedError: The node refused; `StaleEpochError` if it obeys a later controller.
            NotFoundError: The node has no such run, rank or file.
            AgentError: The node failed, or did not answer within `timeout` seconds (default: `answer_timeout_s`).
            NodeError: The session is lost.
        """
        return self.request(command, asked or {}, timeout)

    @overload
    def call_async(
        self, command: Literal[Command.MANIFEST], asked: command_types.ManifestArguments
    ) -> Future[command_types.ManifestAnswer]: ...
    @overload
    def call_async(
        self, command: Literal[Command.FETCH], asked: command_types.FetchArguments
    ) -> Future[command_types.FetchAnswer]: ...
    @overload
    def call_async(
        self, command: Literal[Command.COPY], asked: command_types.CopyArguments
    ) -> Future[command_types.CopyAnswer]: ...
    @overload
    def call_async(
        self, command: Literal[Command.RECEIVE], asked: command_types.ReceiveArguments
    ) -> Future[command_types.ReceiveAnswer]: ...
    @overload
    def call_async(self, command: Literal[Command.STOP], asked: requests.Stop) -> Future[None]: ...
    @overload
    def call_async(
        self, command: Literal[Command.READ], asked: command_types.ReadArguments
    ) -> Future[command_types.ReadAnswer]: ...
    @overload
    def call_async(
        self, command: Literal[Command.EXEC], asked: command_types.ExecArguments
    ) -> Future[command_types.ExecAnswer]: ...
    def call_async(self, command: Command, asked: Any = None) -> Future[Any]:
        """Send a request; the future gets the answer or the exception of `call`. Callbacks run on the reader thread."""
        return self.request_async(command, asked or {})

    @overload
    def post(self, command: Literal[Command.CREDIT], asked: command_types.CreditArguments) -> None: ...
    @overload
    def post(self, command: Literal[Command.REPLICATED], asked: command_types.ReplicatedArguments) -> None: ...
    @overload
    def post(self, command: Literal[Command.CANCEL], asked: command_types.CancelArguments) -> None: ...
    def post(self, command: Command, asked: Any = None) -> None:
        """Send a message that has no answer. A lost session drops it."""
        self.notify(command, asked or {})

    def request(self, command: Command, asked: Arguments, timeout: float | None) -> Any:
        """Send any request and wait for the answer; see `call`."""
        raise NotImplementedError

    def request_async(self, command: Command, asked: Arguments) -> Future[Any]:
        """Send any request; see `call_async`."""
        raise NotImplementedError

    def notify(self, command: Command, asked: Arguments) -> None:
        """Send any message; see `post`."""
        raise NotImplementedError


def to_wire(asked: Arguments) -> dict[str, Any]:
    """Return the object that is sent."""
    return dict(asked) if isinstance(asked, Mapping) else asdict(asked)
