"""A run that crashes and restarts from an earlier step: its goodput and its metrics, to people and to programs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.e2e.conftest import LocalHead, MakeHead

JOB = """\
import os, time

attempt = int(os.environ["CLUSTERCTL_ATTEMPT"])
step, ends = (5, None) if attempt else (0, time.monotonic() + 6)
while not os.path.exists("go"):
    step += 1
    print("step", step, flush=True)
    time.sleep(0.1)
    if ends and time.monotonic() > ends:
        raise ValueError("no such batch")
"""


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 1), restart={"max_restarts": 1, "backoff": "0s"})
    return head


@pytest.fixture(scope="module")
def run(head: LocalHead) -> str:
    """A run whose second attempt has made its first steps."""
    run = head.start()
    wait_for(lambda: goodput(head, run)["lost_steps"], what="the first step of the second attempt", every=0.5)
    return run


def goodput(head: LocalHead, run: str) -> dict[str, Any]:
    found: dict[str, Any] = head.json("status", run)["goodput"] or {"lost_steps": None}
    return found


def test_the_goodput_of_a_restarted_run_counts_its_repeated_steps(head: LocalHead, run: str) -> None:
    found = goodput(head, run)

    assert (found["restarts"], found["has_steps"], found["is_upper_bound"]) == (1, True, False)
    assert 0 < found["lost_steps"] <= 60
    assert found["lost_s"] > 0 < found["productive_s"] < found["wall_s"]
    assert f"{found['lost_steps']} steps repeated" in head.run("status", run).stdout


def test_the_report_shows_the_goodput(head: LocalHead, run: str) -> None:
    assert "steps repeated" in head.run("report", run, "-o", "-").stdout


# --- metrics


@contextlib.contextmanager
def exporter(head: LocalHead, address: str = "0") -> Iterator[str]:
    """Serve the metrics; give the URL that the command prints."""
    *words, _ = typed("clusterctl metrics --listen 9736")
    argv = [sys.executable, "-m", "clusterctl", *words, address]
    with subprocess.Popen(
        argv, cwd=head.folder, env=dict(head.env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


def find_value(text: str, name: str, **labels: str) -> float | None:
    """Return the value of the first sample of a family with these labels."""
    for line in text.splitlines():
        if line.startswith(f"clusterctl_{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            return float(line.rpartition(" ")[2])
    return None


def test_a_scrape_of_a_run_has_its_state_its_ranks_and_its_machines(head: LocalHead, run: str) -> None:
    with exporter(head) as url:
        text = fetch(url)

        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/metrics", url)
        assert find_value(text, "run_state", run=run, state="running") == 1
        assert find_value(text, "run_restarts_total", run=run) == 1
        assert find_value(text, "run_repeated_steps", run=run) == goodput(head, run)["lost_steps"]
        assert 0 < (find_value(text, "run_goodput_ratio", run=run) or 0) < 1
        assert find_value(text, "rank_running", run=run, node="localhost.1", rank="1") == 1
        assert find_value(text, "node_connected", run=run, node="localhost.0") == 1
        # Values are read at each scrape.
        before = find_value(text, "run_wall_seconds", run=run) or 0.0
        assert (find_value(fetch(url), "run_wall_seconds", run=run) or 0.0) > before
        with pytest.raises(urllib.error.HTTPError, match="404"):
            fetch(url.replace("/metrics", "/../../etc/passwd"))


def test_silent_clients_and_strange_hosts_do_not_disturb_a_scrape(head: LocalHead, run: str) -> None:
    with exporter(head) as url, contextlib.ExitStack() as stack:
        place = urllib.parse.urlsplit(url)
        address = (str(place.hostname), place.port or 0)
        for _ in range(50):
            stack.enter_context(socket.create_connection(address))

        assert find_value(fetch(url), "run_attended", run=run) == 1
        assert find_value(fetch(url.replace("127.0.0.1", "localhost")), "run_attended", run=run) == 1
        for host in ("evil.example:80", "", "127.0.0.1.evil.example:80"):
            request = urllib.request.Request(url, headers={"Host": host})
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(request, timeout=10)


def test_the_textfile_is_for_node_exporter_alone_and_whole(head: LocalHead, run: str, tmp_path: Path) -> None:
    *words, _ = typed("clusterctl metrics --textfile DIR")
    done = head.run(*words, str(tmp_path))
    file = tmp_path / f"clusterctl-{os.getuid()}.prom"

    assert (done.returncode, done.stdout, [*tmp_path.iterdir()]) == (0, "", [file])
    assert file.stat().st_mode & 0o777 == 0o644
    assert find_value(file.read_text(), "run_attended", run=run) == 1


def test_without_an_option_the_metrics_are_printed(head: LocalHead, run: str) -> None:
    assert find_value(head.run(*typed("clusterctl metrics")).stdout, "run_attempt", run=run) == 1


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        pytest.param(("--listen", "gpu01:80"), 2, "is not PORT or ADDRESS:PORT", id="a name"),
        pytest.param(("--listen", "70000"), 2, "is not PORT or ADDRESS:PORT", id="no port"),
        pytest.param(("--listen", "192.0.2.1:0"), 6, "cannot listen on 192.0.2.1:0", id="not an address of this head"),
        pytest.param(("--textfile", "nowhere"), 2, "does not exist", id="no folder"),
        pytest.param(("--listen", "0", "--textfile", "."), 2, "cannot be used together", id="both"),
    ],
)
def test_a_wrong_option_is_refused_with_a_reason(
    head: LocalHead, arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = head.run("metrics", *arguments)

    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_an_address_that_others_reach_gets_a_warning(head: LocalHead) -> None:
    argv = [sys.executable, "-m", "clusterctl", "metrics", "--listen", "0.0.0.0:0"]
    with subprocess.Popen(
        argv, env=dict(head.env), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as done:
        assert done.stderr is not None
        assert done.stderr.readline().startswith("warning: whoever reaches 0.0.0.0 can read")
        done.terminate()
