"""Large files that nodes pass on to one another: the command, `cp` and `sync`, on nodes of this machine."""

from __future__ import annotations

import contextlib
import http.server
import json
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from clusterctl.run.nodes.cast import make_certificate
from tests.documented import typed
from tests.e2e.conftest import LocalHead, MakeHead
from tests.lab.waiting import wait_for

SIZE = 40 << 20
CONTENT = random.Random(3).randbytes(SIZE)
NODES = ("localhost.0", "localhost.1", "localhost.2")


@pytest.fixture
def head(make_head: MakeHead) -> LocalHead:
    """A head with three nodes, each with a code folder of its own, and a large file."""
    head = make_head()
    hosts = [
        {"host": "localhost", "transport": "local", "gpus": 0, "workdir": str(head.folder.parent / name)}
        for name in NODES
    ]
    job = {"command": "sleep 600", "grace": "1s"}
    (head.folder / "cluster.yaml").write_text(yaml.safe_dump({"version": 1, "name": "c", "hosts": hosts, "job": job}))
    (head.folder / "data.bin").write_bytes(CONTENT)
    return head


def places(head: LocalHead, path: str) -> list[Path]:
    return [head.folder.parent / name / path for name in NODES]


def leftovers(head: LocalHead) -> list[Path]:
    return [path for name in NODES for path in (head.folder.parent / name).rglob(".clusterctl-cast*")]


def start(head: LocalHead, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "clusterctl", *arguments], cwd=head.folder, env=dict(head.env), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip


def spooled_bytes(head: LocalHead) -> int:
    return sum(file.stat().st_blocks * 512 for spool in leftovers(head) for file in spool.iterdir())


def test_a_file_reaches_all_nodes_and_this_machine_sends_it_once(head: LocalHead) -> None:
    shown = head.run("cast", "data.bin", "data/", "--dry-run")
    assert shown.stdout == "localhost.[0-2]: 1 of 1 file would be sent, 40 MiB\n"
    assert not places(head, "data")[0].exists()

    done = json.loads(head.run(*typed("clusterctl cast data.bin data/"), "--json").stdout)

    assert [path.read_bytes() == CONTENT for path in places(head, "data/data.bin")] == [True] * 3
    assert {node: answer["bytes"] for node, answer in done["nodes"].items()} == dict.fromkeys(NODES, SIZE)
    assert done["head_sent_bytes"] == SIZE
    assert (done["warnings"], done["errors"]) == ([], {})
    assert leftovers(head) == []
    again = json.loads(head.run("cast", "data.bin", "data/", "--json").stdout)
    assert {node: answer["bytes"] for node, answer in again["nodes"].items()} == dict.fromkeys(NODES, 0)


def test_a_file_of_one_node_reaches_the_others_past_this_machine(head: LocalHead) -> None:
    source = places(head, "data.bin")[1]
    source.parent.mkdir()
    source.write_bytes(CONTENT)
    source.chmod(0o750)

    words = typed("clusterctl cast NODE:data.bin all:data/", **{"NODE:data.bin": "localhost.1:data.bin"})
    done = json.loads(head.run(*words, "--json").stdout)

    assert done["head_sent_bytes"] == 0
    first, _, last = places(head, "data/data.bin")
    assert first.read_bytes() == last.read_bytes() == CONTENT
    assert first.stat().st_mode & 0o777 == 0o750


def test_what_is_small_goes_to_each_node_at_once(head: LocalHead) -> None:
    (head.folder / "small").write_bytes(b"x" * 1000)

    done = json.loads(head.run("cast", "small", "data/", "--json").stdout)

    assert done["head_sent_bytes"] == 3000
    assert [path.read_bytes() for path in places(head, "data/small")] == [b"x" * 1000] * 3


def test_a_limit_holds(head: LocalHead) -> None:
    began = time.monotonic()

    assert head.run(*typed("clusterctl cast data.bin data/ --limit 50MB/s")).returncode == 0
    # The first pieces may go at once.
    assert time.monotonic() - began > (SIZE - 3 * (4 << 20)) / 50e6
    assert places(head, "data/data.bin")[2].read_bytes() == CONTENT


def test_cp_casts_what_is_large(head: LocalHead) -> None:
    assert head.run("cp", "data.bin", "all:data/").returncode == 0
    assert [path.read_bytes() == CONTENT for path in places(head, "data/data.bin")] == [True] * 3
    assert leftovers(head) == []


def test_an_interrupted_cast_ends_the_peers_and_continues_when_it_is_repeated(head: LocalHead) -> None:
    process = start(head, "cast", "data.bin", "data/", "--limit", "8MB/s")
    wait_for(lambda: spooled_bytes(head) > SIZE // 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    there = spooled_bytes(head)

    done = json.loads(head.run("cast", "data.bin", "data/", "--json").stdout)

    assert done["errors"] == {}
    assert done["head_sent_bytes"] <= SIZE - there // 3 + (4 << 20)
    assert [path.read_bytes() == CONTENT for path in places(head, "data/data.bin")] == [True] * 3
    assert leftovers(head) == []


def test_a_file_that_changes_while_it_is_cast_is_refused_and_never_put_in_place(head: LocalHead) -> None:
    process = start(head, "cast", "data.bin", "data/", "--limit", "8MB/s")
    wait_for(lambda: spooled_bytes(head) > 0)
    with (head.folder / "data.bin").open("r+b") as file:
        file.write(bytes(SIZE))

    _, errors = process.communicate(timeout=60)
    assert process.returncode == 6
    assert "data.bin has changed while it was cast" in errors
    assert "hint: repeat the command when the file is complete" in errors
    assert not any(path.exists() for path in places(head, "data/data.bin"))


@contextlib.contextmanager
def serve(folder: Path, name: str, data: bytes, lost: int = 0) -> Iterator[str]:
    """An HTTPS server with one file, whose last `lost` bytes never arrive; `folder/own.pem` is its certificate."""
    requests: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append(self.path.partition("?")[0])
            self.send_response(200)
            self.send_header("Content-Length", str(len(data) + lost))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost", "-keyout", folder / "key.pem", "-out", folder / "own.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "own.pem", folder / "key.pem")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"https://localhost:{server.server_port}/{name}"
    server.shutdown()
    thread.join()
    server.server_close()
    assert requests == [f"/{name}"], "it must be fetched once"


@pytest.mark.parametrize("origin", [[], ["--on", "localhost.1"]], ids=["this machine", "a node"])
def test_a_url_is_fetched_once(head: LocalHead, tmp_path: Path, origin: list[str]) -> None:
    with serve(tmp_path, "weights.bin", CONTENT) as url:
        trusting = LocalHead(head.folder, {**head.env, "SSL_CERT_FILE": str(tmp_path / "own.pem")})
        words = typed("clusterctl cast https://HOST/weights.bin data/", **{"https://HOST/weights.bin": url})
        done = trusting.run(*words, *origin)

    assert done.returncode == 0, done.stderr
    assert [path.read_bytes() == CONTENT for path in places(head, "data/weights.bin")] == [True] * 3


@pytest.mark.parametrize("origin", [[], ["--on", "localhost.1"]], ids=["this machine", "a node"])
def test_half_a_download_is_not_used(head: LocalHead, tmp_path: Path, origin: list[str]) -> None:
    with serve(tmp_path, "weights.bin", b"x" * 1000, lost=7) as url:
        trusting = LocalHead(head.folder, {**head.env, "SSL_CERT_FILE": str(tmp_path / "own.pem")})
        done = trusting.run("cast", f"{url}?signature=secret", "data/", *origin)

    assert done.returncode == 6
    assert "weights.bin: the answer ended 7 bytes before its end" in done.stderr
    assert "secret" not in done.stderr
    assert [path for name in NODES for path in (head.folder.parent / name).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        pytest.param(["nope", "data/"], 102, "nope: no such file or folder", id="no such file"),
        pytest.param(["localhost.0:nope", "data/"], 102, "localhost.0: no file is at", id="no such file on the node"),
        pytest.param(["all:x", "data/"], 2, "SRC must name one node, not 3", id="several origins"),
        pytest.param(["x", "data/", "--on", "localhost.0"], 2, "`--on` needs an https:// URL", id="a node fetches no path"),
        pytest.param(["data.bin", "data/", "--limit", "0"], 2, "the limit must be more than 0", id="a limit of nothing"),
        pytest.param(["data.bin", "data/", "--limit", "fast"], 2, "--limit", id="a limit that is no rate"),
        pytest.param(["https://localhost:1/", "data/"], 2, "names no file", id="a URL without a name"),
        pytest.param(["https://localhost:1/x", "data/"], 6, "cannot fetch https://localhost:1/x", id="no answer"),
    ],
)  # fmt: skip
def test_what_cannot_be_cast_is_refused(head: LocalHead, words: list[str], code: int, said: str) -> None:
    done = head.run("cast", *words)

    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


def test_a_new_certificate_for_each_cast() -> None:
    assert make_certificate() != make_certificate()
