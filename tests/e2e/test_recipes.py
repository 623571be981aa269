"""The recipes that need no other framework: they run on two local nodes, and continue after a rank is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests import recipes
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.e2e.conftest import LocalHead


def kill(worker: Mapping[str, Any]) -> None:
    os.kill(worker["pid"], signal.SIGKILL)


@pytest.mark.torch
@pytest.mark.timeout(900)
def test_pre_training_continues_from_the_checkpoint_of_all_ranks(head: LocalHead) -> None:
    pytest.importorskip("torch")
    (recipe,) = recipes.RECIPES[:1]
    recipes.write_cluster_file(head, recipe.template)

    output = recipes.kill_rank_after_checkpoint(head, recipe, head.folder, kill, 400.0)

    losses = [float(found) for found in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0] / 2


@pytest.mark.timeout(900)
def test_a_server_over_two_nodes_answers_again_after_a_rank_is_killed(head: LocalHead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    recipes.write_cluster_file(head, "serve_vllm")
    path = head.folder / "cluster.yaml"
    path.write_text(path.read_text().replace("--port 8000", f"--port {port}"))

    def ask() -> str | None:
        body = json.dumps({"prompt": "Hello"}).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=5) as answer:
                return str(json.load(answer)["choices"][0]["text"])
        except OSError:
            return None

    run = head.start()
    try:
        wait_for(ask, 120.0, what="the server's first answer", every=0.2)
        kill(head.json("status", run)["workers"][1])
        wait_for(lambda: head.json("status", run)["attempt"] == 1, 120.0, what="a second attempt", every=0.2)
        wait_for(ask, 120.0, what="an answer after the restart", every=0.2)
        assert ask() == "Hello > stage 0 > stage 1"
    finally:
        assert head.run("down", run).returncode == 0
