"""Errors of requests, as exceptions that become answers."""

from __future__ import annotations

from clusterctl.agent.protocol.commands import ErrorKind, make_error_answer
from clusterctl.agent.protocol.frames import FrameTooLargeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.frames import Message


class RequestError(Exception):
    """A request that is not carried out.

    Attributes:
        kind: The kind of the error.
        hint: A remedy for the reader, or `None`.
    """

    def __init__(self, kind: ErrorKind, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint

    def answer(self, identity: int) -> Message:
        """Return the message that answers the request."""
        return make_error_answer(identity, self.kind, str(self), self.hint)


def make_refused_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error for a valid request that must not be carried out now."""
    return RequestError(ErrorKind.REFUSED, message, hint)


def make_failed_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error for a request that was tried and failed."""
    return RequestError(ErrorKind.FAILED, message, hint)


class StateRootError(Exception):
    """No place for the agent's state: one line with the place and the reason; `hint` is the remedy."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def convert_to_request_error(error: Exception) -> RequestError:
    """Return the request error for any exception, with the same words in every process of the agent."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StateRootError):
        return make_refused_error(str(error), error.hint)
    if isinstance(error, FrameTooLargeError):
        return make_failed_error(f"the answer cannot be sent: {error}", "ask for less at once")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return make_failed_error(f"{where}{error.strerror or error}")
    # Requests are parsed where they are used, so these errors are mistakes in a request rather than in the agent.
    if isinstance(error, (KeyError, TypeError, ValueError)):
        lacking = "missing " if isinstance(error, KeyError) else ""
        return RequestError(ErrorKind.BAD_REQUEST, f"{lacking}{error}")
    return make_failed_error(f"the agent failed: {error!r}")


EXPECTED_ERRORS = (RequestError, StateRootError, OSError, KeyError, TypeError, ValueError)
"""For any other exception the agent also prints the traceback."""
