"""What goes wrong with a request, as an exception that becomes its answer."""

from __future__ import annotations

from clusterctl.agent.protocol.commands import ErrorKind, refusal
from clusterctl.agent.protocol.frames import TooLargeError

# Not from `typing`, whose import would be a good part of an agent's start.
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
        return refusal(identity, self.kind, str(self), self.hint)


def refused(message: str, hint: str | None = None) -> RequestError:
    """Return the error of a request that is well-formed but must not be carried out now."""
    return RequestError(ErrorKind.REFUSED, message, hint)


def failed(message: str, hint: str | None = None) -> RequestError:
    """Return the error of a request that was tried and did not work."""
    return RequestError(ErrorKind.FAILED, message, hint)


class RootError(Exception):
    """No place for our state: one line that says which and why; `hint` says what helps."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def refusal_of(error: Exception) -> RequestError:
    """Return what a request is told that ended in an exception: the same words in whichever process it was raised."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, RootError):
        return refused(str(error), error.hint)
    if isinstance(error, TooLargeError):
        return failed(f"the answer cannot be sent: {error}", "ask for less at once")
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return failed(f"{where}{error.strerror or error}")
    # What a peer sent is read where it is needed, so these are mistakes of a request much rather than of ours.
    if isinstance(error, (KeyError, TypeError, ValueError)):
        lacking = "missing " if isinstance(error, KeyError) else ""
        return RequestError(ErrorKind.BAD_REQUEST, f"{lacking}{error}")
    return failed(f"the agent failed: {error!r}")


FORESEEN = (RequestError, RootError, OSError, KeyError, TypeError, ValueError)
"""Of any other exception the words for the peer do not say enough."""
