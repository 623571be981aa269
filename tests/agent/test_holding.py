"""What a run holds on a node: ports and GPUs."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.agent.talk import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.agent.conftest import Node

LISTEN = """
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("", int(sys.argv[1])))
s.listen()
print("listening")
"""


def test_a_held_port_is_refused_to_a_second_holder_and_free_for_the_worker(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.talk()
    (port,) = node.prepare(talk, ports=[0])["ports"]
    with pytest.raises(Refused, match=f"port {port} cannot be held: Address already in use"):
        other.prepare(other.talk(), ports=[port])
    node.follow(talk)
    node.start(talk, ["{python}", "-c", LISTEN, str(port)])
    talk.wait_for("swept")
    assert talk.exits()[0]["exit_code"] == 0
    assert other.prepare(other.talk(), ports=[port])["ports"] == [port]


def test_a_port_that_a_program_listens_on_is_refused(node: Node) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(Refused, match=f"port {port} cannot be held"):
            node.prepare(node.talk(), ports=[port])


def test_a_fixed_port_can_be_held_again_right_after_connections_on_it(node: Node) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted, _ = server.accept()
        accepted.close()  # closes first: TIME_WAIT stays on our port
        client.recv(1)
        client.close()
    assert node.prepare(node.talk(), ports=[port])["ports"] == [port]


def test_gpus_that_another_run_holds_are_refused_by_its_name(nodes: Callable[[], Node]) -> None:
    node, other = nodes(), nodes()
    talk = node.talk()
    node.prepare(talk, gpus=[990, 991])
    with pytest.raises(Refused, match=f"GPU 991 is held by run {node.run}"):
        other.prepare(other.talk(), gpus=[991, 992])
    node.follow(talk)
    node.stop(talk)
    talk.wait_for("swept")
    other.prepare(other.talk(), gpus=[991, 992])


def test_gpus_stay_claimed_while_a_worker_lives_and_its_supervisor_does_not(nodes: Callable[[], Node]) -> None:
    import os

    node, other = nodes(), nodes()
    talk = node.launch(["sleep", "1000"], gpus=[993])
    talk.kill()
    os.kill(node.supervisor(), 9)
    with pytest.raises(Refused, match=f"GPU 993 is held by run {node.run}"):
        other.prepare(other.talk(), gpus=[993])
