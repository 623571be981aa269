from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from clusterctl.transport.ssh.paramiko_transport import JumpConnections


class Connection:
    def __init__(self) -> None:
        self.alive = True

    def close(self) -> None:
        self.alive = False


def soon() -> float:
    return time.monotonic() + 10


def test_many_who_ask_at_once_share_one_connection() -> None:
    shared: Any = JumpConnections()
    together = threading.Barrier(8)
    made: list[Connection] = []

    def connect() -> Connection:
        made.append(Connection())
        return made[-1]

    def ask(_: int) -> Connection:
        together.wait(10)
        return shared.get("gate", connect, soon())

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert len(made) == 1
    assert set(map(id, found)) == {id(made[0])}


def test_a_broken_connection_is_made_anew() -> None:
    shared: Any = JumpConnections()
    first = shared.get("gate", Connection, soon())
    first.close()
    assert shared.get("gate", Connection, soon()) is not first


def test_a_failure_is_everybodys_and_not_remembered() -> None:
    shared: Any = JumpConnections()

    def fail() -> Connection:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        shared.get("gate", fail, soon())
    assert shared.get("gate", Connection, soon()).alive


def test_waiting_for_somebody_elses_attempt_is_bounded() -> None:
    shared: Any = JumpConnections()
    hold, started = threading.Event(), threading.Event()

    def slow() -> Connection:
        started.set()
        hold.wait(10)
        return Connection()

    with ThreadPoolExecutor(1) as pool:
        slow_one = pool.submit(shared.get, "gate", slow, soon())
        started.wait(10)
        with pytest.raises(TimeoutError):
            shared.get("gate", Connection, time.monotonic())
        hold.set()
        assert slow_one.result(10).alive


def test_closing_closes_all_and_makes_no_more() -> None:
    shared: Any = JumpConnections()
    first = shared.get("gate", Connection, soon())
    shared.close()
    assert not first.alive
    with pytest.raises(ConnectionError):
        shared.get("gate", Connection, soon())
