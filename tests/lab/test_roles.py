"""Roles on nodes with addresses of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory

SERVER = """\
import http.server, sys
http.server.HTTPServer((sys.argv[1], 8000), http.server.SimpleHTTPRequestHandler).serve_forever()
"""
TRAINER = """\
import os, urllib.request
print("the server said", urllib.request.urlopen(f"http://{os.environ['CLUSTERCTL_SERVER_ADDR']}/").status, flush=True)
"""


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        pytest.param("0.0.0.0", 0, "trainer has ended: stopping server", id="for all"),
        pytest.param("127.0.0.1", 100, "the server listens on 127.0.0.1 alone", id="for its own node alone"),
    ],
)
def test_a_server_is_asked_at_the_address_that_the_other_nodes_use(
    nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str], address: str, code: int, said: str
) -> None:
    made, head = nodes(2), Head(tmp_path / "project", head_env)
    head.folder.mkdir()
    (head.folder / "serve.py").write_text(SERVER)
    (head.folder / "train.py").write_text(TRAINER)
    ready = {"port": 8000, "http": "/", "within": "5s" if code else "60s"}
    server = {"script": "serve.py", "args": [address], "hosts": made[1].name, "ready": ready}
    job = {"roles": {"trainer": {"script": "train.py", "needs": "server"}, "server": server}, "grace": "2s"}
    head.write({node.name: 1 for node in made}, job)

    done = head.run("up", "--no-health")

    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert ("the server said 200" in done.stdout) == (code == 0)
