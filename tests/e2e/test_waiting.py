"""Who waits for a node that does not answer is told for whom and until when; a pipe is told nothing."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import yaml

from tests.e2e.terminal import Terminal

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def test_a_dead_node_is_named_while_it_is_waited_for_unless_somebody_may_be_asked_there(head: LocalHead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        dead = {"host": "dead", "address": "127.0.0.1", "port": port, "user": "root"}
        live = {"host": "localhost", "transport": "local"}
        document = {"version": 1, "hosts": [live, dead], "ssh": {"connect_timeout": "4s"}, "job": {"command": ["true"]}}
        (head.folder / "cluster.yaml").write_text(yaml.safe_dump(document))

        with head.terminal("exec", "--", "echo", "here") as terminal:
            terminal.expect("waiting for dead: ")
            assert terminal.wait() == 4

        asking = {**head.env, "SSH_ASKPASS": "/bin/false", "SSH_ASKPASS_REQUIRE": "force"}
        with Terminal("exec", "--", "echo", "here", folder=head.folder, env=asking) as terminal:
            assert terminal.wait() == 4
        assert "waiting" not in terminal.shown

        piped = head.run("exec", "--", "echo", "here")
    assert "waiting" not in piped.stderr
    assert piped.returncode == 4
    assert "here" in piped.stdout
