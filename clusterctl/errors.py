"""The errors that clusterctl reports to users, with a hint and an exit code each.

    ClusterctlError                one line; .hint is a second; .exit_code
      ConfigError        3         .problems: (path, line, column, text)...; nothing was started
      NodeError          4         .node; ConnectError, HostKeyError, AuthError, AgentError; NodeRefusedError 6
      UnhealthyError     5         .findings; nothing was started
      EnvironmentFailed  5         NodeEnvironmentError (a NodeError); nothing was started
      RefusedError       6
      TeardownError      7         .remaining
      NotFoundError      102
      RunFailed          100, 103-107   .state; everything reachable was stopped

Any other exception is a bug in clusterctl: exit code 1, and the traceback is written to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple


class ExitCode(IntEnum):
    """Exit codes of the command line, by meaning."""

    OK = 0
    BUG = 1
    USAGE = 2
    CONFIG = 3
    NODE = 4
    UNHEALTHY = 5
    REFUSED = 6
    TEARDOWN_INCOMPLETE = 7
    FAILED = 100
    UNATTENDED = 101
    NOT_FOUND = 102
    CANCELLED = 103
    STALLED = 104
    LOST = 105
    TIME_LIMIT = 106
    IDLE = 107
    WAIT_TIMED_OUT = 124
    INTERRUPTED = 130


class ClusterctlError(Exception):
    """Base of every expected error.

    Attributes:
        hint: A remedy for the user, or `None`.
        exit_code: The exit code of the process.
    """

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


# Not a dataclass, because importing `dataclasses` would slow down the help of every command.
class Problem(NamedTuple):
    """One mistake in a cluster file.

    Attributes:
        path: The path of the file as given by the user.
        line: The line, counted from 1; 0 if the mistake has no position.
        column: The column, counted from 1; 0 if the mistake has no position.
        text: The mistake, without its position.
        hint: A remedy such as "did you mean `gpus`?", or `None`.
        length: The number of characters to underline from `column`.
        source: The text of the line, or `None`.
    """

    path: str
    line: int
    column: int
    text: str
    hint: str | None = None
    length: int = 1
    source: str | None = None


class ConfigError(ClusterctlError):
    """The cluster file has mistakes, which are in `problems`; nothing was started."""

    exit_code = ExitCode.CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        first = problems[0]
        place = f"{first.path}:{first.line}:{first.column}" if first.line else first.path
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(f"{place}: {first.text}{more}", hint=first.hint)
        self.problems = tuple(problems)


class NodeError(ClusterctlError):
    """A node could not be reached, trusted or used."""

    exit_code = ExitCode.NODE

    def __init__(self, node: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.node = node


class ConnectError(NodeError):
    """A connection failed: no route, connection refused, or timeout."""


class HostKeyError(NodeError):
    """The host key is unknown or has changed."""


class AuthError(NodeError):
    """The server did not accept any identity."""


class AgentError(NodeError):
    """A node has no usable Python, speaks another protocol version, or sends an invalid answer."""


class SourceUnreachableError(AgentError):
    """A node can reach no node that has the files of a cast."""


class NoPythonError(AgentError):
    """A node has no Python that can run the agent."""


class NodeRefusedError(NodeError):
    """A node can be reached but refuses a request, for example because it has no usable folder."""

    exit_code = ExitCode.REFUSED


class NodeEnvironmentError(NodeError):
    """The environment of the workers cannot be made on a node; nothing was started."""

    exit_code = ExitCode.UNHEALTHY


class NodesError(ClusterctlError):
    """Several nodes failed; `errors` contains a `NodeError` for each of them."""

    exit_code = ExitCode.NODE

    def __init__(self, errors: Sequence[NodeError]) -> None:
        super().__init__(f"{len(errors)} nodes cannot be used", hint=None)
        self.errors = tuple(errors)
        codes = {error.exit_code for error in errors}
        self.exit_code = codes.pop() if len(codes) == 1 else ExitCode.NODE


class UnhealthyError(ClusterctlError):
    """Health checks failed; nothing was started."""

    exit_code = ExitCode.UNHEALTHY

    def __init__(self, message: str, findings: Sequence[Any], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.findings = tuple(findings)


class EnvironmentFailed(ClusterctlError):  # noqa: N818 - `EnvironmentError` is a name of Python
    """The environment of the workers cannot be made; nothing was started."""

    exit_code = ExitCode.UNHEALTHY


class RefusedError(ClusterctlError):
    """clusterctl refuses a request that would do harm; nothing was changed."""

    exit_code = ExitCode.REFUSED


class TeardownError(ClusterctlError):
    """Processes of a run may still exist; `remaining` names them."""

    exit_code = ExitCode.TEARDOWN_INCOMPLETE

    def __init__(self, message: str, remaining: Sequence[Any], *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.remaining = tuple(remaining)


class NotFoundError(ClusterctlError):
    """There is no such run, rank, node or file."""

    exit_code = ExitCode.NOT_FOUND


class RunFailed(ClusterctlError):  # noqa: N818 - a term of the design; the run failed, not clusterctl
    """The run ended without success; all workers on reachable nodes were stopped."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, exit_code: ExitCode, state: Any = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.state = state
