"""A trainer and a server in one run: real processes on local nodes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

SERVER = """\
import http.server, os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("loading", os.environ["RANK"], os.environ["WORLD_SIZE"], flush=True)
if os.environ["CLUSTERCTL_ATTEMPT"] == "0" and "--fails" in sys.argv:
    sys.exit("no memory")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() > ready else 503)
        self.end_headers()
        self.wfile.write(b"42")
ready = time.monotonic() + 1
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TRAINER = """\
import os, urllib.request
names = ("RANK", "WORLD_SIZE", "CLUSTERCTL_ROLE", "CLUSTERCTL_RANK_OFFSET", "CLUSTERCTL_ATTEMPT")
with urllib.request.urlopen(f"http://{os.environ['CLUSTERCTL_SERVER_ADDR']}/") as answer:
    print(*(os.environ[name] for name in names), answer.read().decode(), flush=True)
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def write(head: LocalHead, port: int, *arguments: str, within: str = "60s", **more: Any) -> None:
    (head.folder / "serve.py").write_text(SERVER)
    (head.folder / "train.py").write_text(TRAINER)
    server = {
        "script": "serve.py",
        "args": [str(port), *arguments],
        "nodes": 1,
        "workers": 1,
        "ready": {"port": port, "http": "/", "output": "loading 0 1", "within": within},
    }
    # The server stands first, so that the ranks of the trainer do not begin at 0.
    job = {"roles": {"server": server, "trainer": {"script": "train.py", "needs": "server"}}, "grace": "1s"}
    head.write_local(job, workers=(2, 1, 1), **more)


def test_a_trainer_finds_its_server_and_the_end_of_the_trainer_ends_the_run(head: LocalHead) -> None:
    port = free_port()
    write(head, port)

    done = head.run("up", "--no-health", timeout=150)
    logs = head.run("logs", "--role", "trainer", "--no-prefix")
    nodes = head.json("status", head.newest())["nodes"]

    assert done.returncode == 0, done.stderr
    assert "trainer has ended: stopping server" in done.stderr
    assert "(server) r0" in done.stdout
    # The server ignores SIGTERM.
    assert "on localhost.0 (server): " in done.stderr
    assert "had not ended 1 s after the stop signal" in done.stderr
    assert sorted(logs.stdout.splitlines()) == ["0 2 trainer 1 0 42", "1 2 trainer 1 0 42"]
    assert [node["role"] for node in nodes] == ["server", "trainer", "trainer"]


def test_a_server_that_fails_is_named_and_all_roles_start_again(head: LocalHead) -> None:
    port = free_port()
    write(head, port, "--fails", restart={"max_restarts": 1, "backoff": 0})

    done = head.run("up", "--no-health", timeout=150)
    logs = head.run("logs", "--role", "trainer", "--no-prefix", "--attempt", "1")

    assert done.returncode == 0, done.stderr
    assert "a worker failed: stopping the others (rank 0 on localhost.0 (server): exit code 1)" in done.stderr
    assert sorted(logs.stdout.splitlines()) == ["0 2 trainer 1 1 42", "1 2 trainer 1 1 42"]


def test_a_server_that_is_not_ready_in_time_is_named_with_its_last_words(head: LocalHead) -> None:
    write(head, free_port(), within="100ms")

    done = head.run("up", "--no-health", timeout=150)

    assert done.returncode == 100, done.stderr
    assert "error: role `server` on localhost.0 was not ready within " in done.stderr
    assert "hint: its last output: loading 0 1" in done.stderr or "hint: it has written nothing" in done.stderr
    assert not head.run("logs", "--role", "trainer").stdout


def test_a_port_that_is_taken_is_named_before_anything_starts(head: LocalHead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        write(head, port)

        done = head.run("up", "--no-health", timeout=150)

    assert done.returncode == 6, done.stderr
    assert f"localhost.0: port {port} cannot be reserved: Address already in use by a listener of uid " in done.stderr
    assert not done.stdout
