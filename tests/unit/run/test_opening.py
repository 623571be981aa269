"""Sessions that are opened all at once: by a command, and by the controller of a run."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from clusterctl.config.spec import HostSpec
from clusterctl.errors import ClusterctlError, ConnectError, NodeError, RefusedError
from clusterctl.session.connect import open_in_parallel

if TYPE_CHECKING:
    from clusterctl.session.node_session import Session

HOSTS = [HostSpec(name=name, host=name) for name in ("a", "b", "c")]


class Opened:
    """Sessions that were opened, and which of them were closed."""

    def __init__(self, errors: dict[str, Exception], held: threading.Event | None = None) -> None:
        self._errors, self._held = errors, held
        self.begun: dict[str, threading.Event] = {host.name: threading.Event() for host in HOSTS}
        self.closed: dict[str, threading.Event] = {host.name: threading.Event() for host in HOSTS}

    def open(self, host: HostSpec) -> Session:
        self.begun[host.name].set()
        if host.name in self._errors:
            # What has not begun by then never does.
            assert self._held is None or all(event.wait(10) for event in self.begun.values())
            raise self._errors[host.name]
        if self._held is not None:
            self._held.wait(10)
        return cast("Session", SimpleNamespace(node=host.name, close=self.closed[host.name].set))


def test_a_node_that_cannot_be_had_keeps_the_sessions_with_the_others() -> None:
    error = ConnectError("b", "no route")
    sessions, errors = open_in_parallel(HOSTS, Opened({"b": error}).open, 64, NodeError)

    assert (list(sessions), errors) == (["a", "c"], {"b": error})


@pytest.mark.parametrize("expected", [NodeError, ClusterctlError])
def test_a_mistake_of_ours_leaves_no_session_open_not_even_one_that_comes_later(expected: Any) -> None:
    held = threading.Event()
    opened = Opened({"a": RuntimeError("oh")}, held)

    with pytest.raises(RuntimeError, match="oh"):
        open_in_parallel(HOSTS, opened.open, 64, expected)
    held.set()

    assert [opened.closed[name].wait(10) for name in "bc"] == [True, True]


def test_what_a_controller_expects_of_a_node_may_be_more_than_an_error_of_its_connection() -> None:
    error = RefusedError("no")
    _, errors = open_in_parallel(HOSTS, Opened({"c": error}).open, 2, ClusterctlError)

    assert errors == {"c": error}
