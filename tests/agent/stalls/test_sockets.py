"""The connections of a process, and the file locks for which it waits."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.watch import tcp_connections


def _until(found: object, seconds: float = 20.0) -> object:
    end = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < end:  # type: ignore[operator]
        os.sched_yield()
    return value


def test_a_connection_that_is_read_from_is_awaited_and_named_by_both_ends() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            accepted, (_, theirs) = listener.accept()
            found = _until(lambda: [one for one in tcp_connections.list_tcp_connections(child.pid) if one["awaited"]])
            accepted.sendall(b"x")
            accepted.close()

    (one,) = found  # type: ignore[misc]
    assert (one["address"], one["port"], one["peer"], one["peer_port"]) == ("127.0.0.1", theirs, "127.0.0.1", port)
    assert (one["state"], one["unacked"], one["lost"]) == ("established", 0, 0)


def test_a_connection_from_which_a_thread_reads_is_marked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        read = f"socket.create_connection(('127.0.0.1', {listener.getsockname()[1]})).recv"
        code = f"import socket, threading; threading.Thread(target={read}, args=(1,)).start(); {read}(1)"
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            accepted = [listener.accept()[0] for _ in range(2)]
            found = _until(lambda: marks if len(marks := _list_marks(child.pid)) == 2 else [])
            for each in accepted:
                each.sendall(b"x")
                each.close()

    assert sorted(found) == ["awaited", "awaited_by_thread"]  # type: ignore[call-overload]


def test_a_connection_of_a_child_counts_as_that_of_a_thread() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"import socket; socket.create_connection(('127.0.0.1', {port})).recv(1)"
        with subprocess.Popen([sys.executable, "-c", code]) as child:
            accepted, _ = listener.accept()
            found = _until(lambda: _list_marks(os.getpid(), child.pid))
            accepted.sendall(b"x")
            accepted.close()

    assert found == ["awaited_by_thread"]


def _list_marks(pid: int, *children: int) -> list[str]:
    connections = tcp_connections.list_tcp_connections(pid, children)
    return [name for one in connections for name in ("awaited", "awaited_by_thread") if one.get(name)]


def test_what_was_sent_and_not_read_shows_at_its_reader() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        client = socket.create_connection(listener.getsockname()[:2])
        accepted, _ = listener.accept()
        client.sendall(b"12345")
        found = _until(lambda: [one for one in tcp_connections.list_tcp_connections(os.getpid()) if one["unread"] == 5])
        client.close()
        accepted.close()

    assert [(one["address"], one["peer"]) for one in found] == [("::1", "::1")]  # type: ignore[attr-defined]


def test_a_process_that_is_gone_has_no_connections() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()

    assert tcp_connections.list_tcp_connections(child.pid) == []


def test_a_socket_that_waits_for_clients_is_in_the_list() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = [one for one in tcp_connections.list_tcp_connections(os.getpid()) if one["state"] == "listen"]

        assert listener.getsockname()[1] in {one["port"] for one in found}


@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_the_process_that_took_the_lock_of_a_file_is_found_for_each_that_waits(tmp_path: Path, lock: str) -> None:
    code = f"import fcntl; fcntl.{lock}(open({str(tmp_path / 'lock')!r}, 'a'), fcntl.LOCK_EX)"
    with (tmp_path / "lock").open("a") as file:
        getattr(fcntl, lock)(file, fcntl.LOCK_EX)
        waiting = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
        found = _until(lambda: all(proc.find_lock_holder(one.pid) for one in waiting))
        holders = [proc.find_lock_holder(one.pid) for one in waiting]
    for one in waiting:
        one.wait()

    assert found
    assert holders == [os.getpid()] * 2
    assert proc.find_lock_holder(os.getpid()) is None
