"""Commands that run on nodes: what is left of them here."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from clusterctl.cli.node_command_runs import RemoteCommand
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from clusterctl.session.node_session import Session


def test_no_thread_waits_for_the_garbage_collector_once_a_command_has_ended() -> None:
    end: Future[dict[str, Any]] = Future()
    session = SimpleNamespace(node="n1", allocate_streams=lambda *_, **__: 1, call_async=lambda *_: end)
    before = set(threading.enumerate())
    gc.disable()
    try:
        with RemoteCommand({"argv": ["true"]}, None, 1, None) as remote:
            remote.start_on(cast("Session", session))
            end.set_result({"exit_code": 0, "signal": None})
            wait_for(remote.collect_finished_results, what="the end of the command")
        wait_for(lambda: set(threading.enumerate()) <= before, what="the end of the thread")
    finally:
        gc.enable()
