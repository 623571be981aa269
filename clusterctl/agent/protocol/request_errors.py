"""What goes wrong with a request, as an exception that becomes its answer."""

from __future__ import annotations

from clusterctl.agent.protocol.commands import ErrorKind, make_error_answer
from clusterctl.agent.protocol.frames import FrameTooLargeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.frames import Message


class RequestError(Exception):
    """A request that is not carried out.

    Attributes:
        kind: Why.
        hint: What the reader can do about it, or `None`.
    """

    def __init__(self, kind: ErrorKind, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.hint = hint

    def answer(self, identity: int) -> Message:
        """Return the message for the peer."""
        return make_error_answer(identity, self.kind, str(self), self.hint)


def make_refused_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error of a request that is well-formed but must not be carried out now."""
    return RequestError(ErrorKind.REFUSED, message, hint)


def make_failed_error(message: str, hint: str | None = None) -> RequestError:
    """Return the error of a request that was tried and did not work."""
    return RequestError(ErrorKind.FAILED, message, hint)


class StateRootError(Exception):
    """No place for our state: one line that says which and why; `hint` says what helps."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def convert_to_request_error(error: Exception) -> RequestError:
    """Return what a request is told that ended in an exception: the same words in whichever process it was raised."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, StateRootError):
        return make_refused_error(str(error), error.hint)
    if isinstance(error, FrameTooLargeError):
        return make_failed_error(f"the answer cannot be sent: {error}", "ask for less at once")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return make_failed_error(f"{where}{error.strerror or error}")
    # What a peer sent is read where it is needed, so these are mistakes of a request much rather than of ours.
    if isinstance(error, (KeyError, TypeError, ValueError)):
        lacking = "missing " if isinstance(error, KeyError) else ""
        return RequestError(ErrorKind.BAD_REQUEST, f"{lacking}{error}")
    return make_failed_error(f"the agent failed: {error!r}")


EXPECTED_ERRORS = (RequestError, StateRootError, OSError, KeyError, TypeError, ValueError)
"""Of any other exception the words for the peer do not say enough."""
