"""The Grafana dashboard: a real Prometheus scrapes two nodes of 8 GPUs, and each query of the dashboard has data."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.render.metrics_text import FAMILIES
from clusterctl.run.rules import controller_events
from tests.big_run import End, Shape, made
from tests.documented import REPOSITORY
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARD = json.loads((REPOSITORY / "docs/monitoring/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(note["target"]["expr"] for note in DASHBOARD["annotations"]["list"] if "target" in note),
]
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
CONFIG = """\
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: clusterctl
    static_configs: [{{targets: ["{target}"]}}]
"""


def test_the_panels_are_of_the_schema_and_do_not_overlap() -> None:
    """The fields that Grafana's dashboard schema requires (`@grafana/schema`: Dashboard, Panel, DataQuery)."""
    assert DASHBOARD["schemaVersion"] == 39
    assert DASHBOARD["uid"] == "clusterctl"
    assert [variable["name"] for variable in DASHBOARD["templating"]["list"]] == ["datasource", "run"]
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert place["x"] + place["w"] <= 24
        cells |= own
    for panel in PANELS:
        assert panel["type"] in {"stat", "table", "timeseries", "bargauge", "status-history"}
        assert panel["datasource"] == DATA_SOURCE
        assert panel["fieldConfig"].keys() == {"defaults", "overrides"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == DATA_SOURCE for target in panel["targets"])


def test_the_dashboard_uses_no_unknown_metric_and_follows_the_chosen_runs() -> None:
    for query in QUERIES:
        used = re.findall(r"clusterctl_(\w+)", query)
        assert used
        assert set(used) <= FAMILIES.keys(), query
        assert '{run=~"$run"' in query, query


# --- with a real Prometheus


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a Prometheus that has scraped a run three times."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    env = {**os.environ, "XDG_STATE_HOME": str(folder)}
    argv = [sys.executable, "-m", "clusterctl", "metrics", "--listen", "0"]
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(made(folder, End.STALLED, shape=Shape(nodes=2, seconds=90)))
        trouble = controller_events.HealthChanged(
            node="gpu001", gpu=3, check="gpu.xid", key="gpu.xid", status="FAIL", message='"}\n'
        )
        with run.events.open("a") as journal:
            journal.write(controller_events.encode(1000, 0.0, trouble) + "\n")
        exporter = stack.enter_context(subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True))
        stack.callback(exporter.terminate)
        assert exporter.stdout is not None
        target = exporter.stdout.readline().removeprefix("http://").removesuffix("/metrics\n")
        (folder / "prometheus.yml").write_text(CONFIG.format(target=target))
        port = find_free_port()
        options = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder}/tsdb"]
        options += [f"--config.file={folder}/prometheus.yml", "--log.level=error"]
        server = stack.enter_context(subprocess.Popen([program, *options], cwd=folder))
        stack.callback(server.terminate)
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: count_scrapes(url) >= 3, what="three scrapes", every=0.3)
        yield url


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def query(url: str, text: str) -> dict[str, Any]:
    words = urllib.parse.urlencode({"query": text})
    with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def count_scrapes(url: str) -> int:
    with contextlib.suppress(OSError):
        found = query(url, "count_over_time(clusterctl_build_info[1m])")["data"]["result"]
        return int(found[0]["value"][1]) if found else 0
    return 0


def test_each_query_of_the_dashboard_is_understood_and_has_data(prometheus: str) -> None:
    empty = []
    for text in QUERIES:
        found = query(prometheus, text.replace("$run", ".*").replace("$__rate_interval", "1m"))
        assert found["status"] == "success", text
        empty += [] if found["data"]["result"] else [text]

    # The run has made no restart, so there is nothing to annotate.
    assert empty == [QUERIES[-1]]


def test_prometheus_has_the_values_of_the_run(prometheus: str) -> None:
    def value(text: str) -> float:
        return float(query(prometheus, text)["data"]["result"][0]["value"][1])

    assert value('up{job="clusterctl"}') == 1
    assert value("count(clusterctl_gpu_power_watts)") == 16
    assert value('clusterctl_run_state{state="stalled"}') == 1
    assert value('clusterctl_health_problem{node="gpu001",gpu="3"}') == 1
    assert value("sum(clusterctl_run_time_seconds) - sum(clusterctl_run_wall_seconds)") == pytest.approx(0.0, abs=1e-6)
