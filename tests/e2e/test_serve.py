"""`serve`: the live page of runs that were really made, as HTTP requests see it."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.documented import typed
from tests.e2e import hostile
from tests.e2e.live import Server, serving
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import LocalHead, MakeHead

pytest.importorskip("starlette", reason="pip install starlette uvicorn")
pytest.importorskip("uvicorn", reason="pip install starlette uvicorn")

JOB = f"""\
import os, time

step = 0
print({hostile.TEXT!r}, "</script><script>alert(1)</script>", flush=True)
while not os.path.exists("go"):
    step += 1
    print(f"step {{step}} loss {{4 / step:.4f}} of rank {{os.environ['RANK']}}", flush=True)
    if os.path.exists("shout"):
        print(("x" * 500 + "\\n") * 2000, flush=True)
    time.sleep(0.1)
raise ValueError("no <b>batch")
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 2))
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    return head.start()


@pytest.fixture(scope="module")
def server(head: LocalHead, run: str) -> Iterator[Server]:
    with serving(head.env, typed("clusterctl serve")) as server:
        yield server


def test_the_page_loads_nothing_and_permits_its_own_script_alone(server: Server) -> None:
    _, headers, body = server.ask(server.path)
    policy, html = headers["Content-Security-Policy"], body.decode()

    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", server.url)
    assert headers["Referrer-Policy"] == "no-referrer"
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # These insert markup, or load something.
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|src=|<link|https?://(?!www\.w3)", html
    )


def test_the_stream_has_the_run_its_ranks_its_output_and_its_curves(server: Server, run: str) -> None:
    found = server.wait_for("runs", "run", "layout", "row", "log", "failure", "curves", run=run, ranks="1-2")

    assert [one["run"] for one in found["runs"]] == [run]
    assert (found["run"]["state"], found["run"]["attempt"]) == ("running", 0)
    assert found["layout"] == ["localhost.0", "localhost.1"]
    assert [cell["rank"] for cell in found["row"]["cells"]] == [0]
    assert found["failure"] == {"lines": [], "rank": None}
    assert {line[1] for line in found["log"]["lines"]} == {1, 2}
    assert found["curves"][0]["title"] == "Loss"


def test_new_output_arrives_without_a_reload(server: Server, run: str) -> None:
    with contextlib.closing(server.events(run)) as events:
        batches = (value for name, value in events if name == "log")
        first, second = next(batches), next(batches)

    assert second["number"] == first["number"] + 1
    assert second["lines"][-1][0] > first["lines"][-1][0]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        pytest.param("/", 403, id="no token"),
        pytest.param("/wrong/", 403, id="a wrong token"),
        pytest.param("/wrong/events?run=RUN", 403, id="events with a wrong token"),
        pytest.param("/%C3%A9%00/", 403, id="a token that is no text"),
        pytest.param("TOKENnothing", 404, id="no such path"),
        pytest.param("TOKEN../../etc/passwd", 404, id="a path that climbs"),
        pytest.param("TOKEN%2e%2e/%2e%2e/etc/passwd", 404, id="a path that climbs, encoded"),
        pytest.param("TOKENevents?run=../../../../etc", 404, id="a run that climbs"),
        pytest.param("TOKENevents?run=.", 404, id="a run that is a folder"),
        pytest.param("TOKENevents?run=%00", 404, id="a run that is no name"),
        pytest.param("TOKENevents?run=RUN&ranks=all", 400, id="ranks that are none"),
        pytest.param(f"TOKENevents?run={'x' * 9000}", 404, id="a long path"),
    ],
)
def test_a_wrong_request_is_refused(server: Server, run: str, path: str, status: int) -> None:
    path = path.replace("TOKEN", server.path).replace("RUN", run)

    with socket.create_connection(server.address, timeout=20) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        answer = connection.recv(1 << 16).decode("latin-1")

    assert answer.startswith(f"HTTP/1.1 {status} "), answer
    assert server.path.strip("/") not in answer


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:7070", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:7070", 421),
        ("192.0.2.1", 421),
        ("localhost.", 421),
        ("", 400),
    ],
)
def test_a_page_of_another_name_gets_nothing(server: Server, host: str, status: int) -> None:
    assert server.ask(server.path, host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_the_page_changes_nothing(server: Server, method: str) -> None:
    assert server.ask(server.path, method=method)[0] == 405


def test_browsers_that_never_read_block_nobody_and_are_disconnected(head: LocalHead, server: Server, run: str) -> None:
    request = f"GET {server.path}events?run={run} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    (head.folder / "shout").touch()
    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(socket.socket()) for _ in range(50)]
        for one in deaf:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect(server.address)
            one.sendall(request)
        began = time.monotonic()
        server.wait_for("run", "log", run=run)
        took = time.monotonic() - began
        wait_for(lambda: count_connections(server) < 50, what="the end of these connections", every=0.5)
    (head.folder / "shout").unlink()

    assert took < 10
    assert memory_bytes(server.pid) < 400 << 20


def count_connections(server: Server) -> int:
    """Return how many connections the server has."""
    port = f":{server.address[1]:04X}"
    rows = [line.split() for line in Path(f"/proc/{server.pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(port) and row[3] == "01" for row in rows)


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_a_hostile_run_is_text_that_steers_nothing(head: LocalHead, run: str, tmp_path: Path) -> None:
    (head.folder / "go").touch()
    head.run("wait")
    for name, (rewrite, ended) in {"ended": (hostile.texts, True), "going on": (hostile.everything, False)}.items():
        state = tmp_path / name
        state.mkdir()
        hostile.make(Path(head.env["XDG_STATE_HOME"]), state, run, rewrite, ended=ended)
        with serving({**head.env, "XDG_STATE_HOME": str(state)}, typed("clusterctl serve")) as server:
            found = server.wait_for("runs", "run", "failure", "findings", run=run)
            shown = json.dumps(found, ensure_ascii=False)
            assert hostile.found_in(shown, speaking=True) == []
            assert hostile.MARK in shown or name == "going on"


def test_the_failure_of_a_run_appears_with_the_verdict_of_why(head: LocalHead, server: Server, run: str) -> None:
    head.run("wait")
    found = server.wait_for("run", "failure", run=run)

    assert found["run"]["state"] == "failed"
    text = "\n".join(found["failure"]["lines"])
    assert "ValueError: no <b>batch" in text
    assert "crash EXCEPTION" in text
    assert found["failure"]["rank"] in (0, 1, 2)


def test_the_link_is_private_and_goes_with_its_server(make_head: MakeHead) -> None:
    env = make_head().env
    file = Path(env["XDG_STATE_HOME"]) / "clusterctl/serve.json"
    with serving(env, typed("clusterctl serve")) as first:
        assert file.stat().st_mode & 0o777 == 0o600
        with serving(env, typed("clusterctl serve")) as second:
            assert json.loads(file.read_text()) == {"url": first.url} != {"url": second.url}
        assert file.exists()
    assert not file.exists()


def test_up_on_a_terminal_prints_the_link_of_its_run(make_head: MakeHead) -> None:
    head = make_head()
    head.write_local({"command": "true"})
    with serving(head.env, typed("clusterctl serve")) as server, head.terminal("up", "--no-health") as screen:
        screen.expect(f"live page: {server.url}#local-")
        screen.wait()


@pytest.mark.parametrize(
    ("address", "code", "message"),
    [
        pytest.param("gpu01:80", 2, "is not PORT or ADDRESS:PORT", id="a name"),
        pytest.param("192.0.2.1:0", 6, "cannot listen on 192.0.2.1:0", id="not an address of this head"),
    ],
)
def test_a_wrong_address_is_refused(head: LocalHead, address: str, code: int, message: str) -> None:
    done = head.run("serve", "--listen", address)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
