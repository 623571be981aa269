"""What `clean` leaves on the nodes of runs that ended: nothing."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead


def on_nodes(head: LocalHead) -> list[str]:
    return sorted(path.name for path in Path(head.env["XDG_STATE_HOME"], "clusterctl/nodes").glob("*"))


def test_nothing_is_left_of_a_run_whose_start_failed_when_it_was_prepared(head: LocalHead) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        head.write_local({"command": ["true"]}, network={"master_port": port})
        refused = head.run("up", "--no-health")
    assert refused.returncode == 6, refused.stderr
    assert on_nodes(head) == [head.json("ps", "-a")[-1]["run"]]

    cleaned = head.run("clean", "--older-than", "0s", "--yes")

    assert cleaned.returncode == 0, cleaned.stderr
    assert on_nodes(head) == []
    assert head.json("ps", "-a") == []
