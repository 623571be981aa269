"""`clusterctl metrics`."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import click
from typing_extensions import override

from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.node_stats import read_run_gpus
from clusterctl.cli.option_values import is_own_host, parse_listen_address
from clusterctl.cli.run_views import make_sampled_activity
from clusterctl.errors import RefusedError
from clusterctl.render.metrics_text import CONTENT_TYPE, MAX_SAMPLE_AGE_S, RunMetrics, render_metrics
from clusterctl.run.record import sample_files
from clusterctl.run.record.disk_files import write_atomically
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import StateReader, list_runs, load_state_and_attendance, read_summary
from clusterctl.run.rules.goodput import measure_goodput

MAX_RUNS = 32
"""The most runs with series; the newest come first."""
_ENDED_FOR_S = 3600.0
"""An ended run has series for this many seconds after its end, so that Prometheus sees how the run ended."""
_CLIENT_TIMEOUT_S = 10.0


@click.command("metrics", cls=CliCommand)
@click.option("--listen", metavar="[ADDRESS:]PORT", help="Serve the metrics over HTTP; on 127.0.0.1 by default.")
@click.option(
    "--textfile",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Write the metrics once to DIR/clusterctl-UID.prom, for the textfile collector of node_exporter.",
)
@click.pass_obj
def command(common: CommonOptions, listen: str | None, textfile: Path | None) -> int:
    """Give metrics of all runs of this head to Prometheus: runs, ranks, goodput, stalls, nodes and GPUs.

    Without an option, `metrics` prints the metrics once. `metrics` reads only files on this head, at each scrape, and
    connects to no node. With `--listen`, Ctrl-C ends it.
    """
    options.refuse_combination(("--listen", listen), ("--textfile", textfile))
    console, source = common.console(), MetricsSource()
    if listen is not None:
        _serve(source, listen, common)
    elif textfile is None:
        console.write_stdout_text(source.read())
    else:
        path = textfile / f"clusterctl-{os.getuid()}.prom"
        try:
            write_atomically(path, _encode(source.read()), 0o644)
        except OSError as error:
            raise RefusedError(f"{path} cannot be written: {error.strerror or error}") from error
    return 0


class MetricsSource:
    """Reads the metrics of all runs of this head. The journals are read from the place where the last scrape ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[str, StateReader] = {}
        self._over: set[str] = set()

    def read(self) -> str:
        """Return the present metrics as text."""
        with self._lock:
            began, now = time.perf_counter(), time.time()
            runs = list(self._list_shown_runs(now))
            read_s = time.perf_counter() - began
            omitted = max(0, len(runs) - MAX_RUNS)
            return render_metrics(runs[:MAX_RUNS], omitted=omitted, read_s=read_s, now=now, uid=os.getuid())

    def _list_shown_runs(self, now: float) -> Iterator[RunMetrics]:
        readers, self._readers = self._readers, {}
        for folder in reversed(list_runs()):
            if folder.run in self._over:
                continue
            summary = None if folder.run in readers else read_summary(folder.summary, folder.events)
            if summary is None or now - (summary.state.ended or now) <= _ENDED_FOR_S:
                reader = self._readers[folder.run] = readers.get(folder.run) or StateReader(folder)
                metrics = _load_run(folder, reader, now)
                if now - (metrics.state.ended or now) <= _ENDED_FOR_S:
                    yield metrics
                    continue
            self._over.add(folder.run)


def _load_run(run: RunDir, reader: StateReader, now: float) -> RunMetrics:
    state, attended = load_state_and_attendance(run, lambda _: reader.load_state())
    goodput = measure_goodput(state, now)
    if state.is_over:
        return RunMetrics(state=state, has_controller=attended, goodput=goodput)
    newest = {
        node: sample
        for node, sample in sample_files.read_latest_activities(run, state, sample_files.PROGRESS_FIELDS).items()
        if now - (sample["t"] - state.clock_ahead_s(node)) <= MAX_SAMPLE_AGE_S
    }
    health = {node: sample_files.read_latest_health(run, node) for node in state.nodes}
    return RunMetrics(
        state=state,
        has_controller=attended,
        goodput=goodput,
        activity=make_sampled_activity(state, newest, now),
        health={node: sample for node, sample in health.items() if sample is not None},
        gpus=read_run_gpus(run),
    )


# --- HTTP


class _Server(ThreadingHTTPServer):
    """Serves the metrics; each request reads them."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], source: MetricsSource) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.source = source
        self.is_loopback = ip_address(address[0]).is_loopback
        super().__init__(address, _Handler)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _CLIENT_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.server.is_loopback and not is_own_host(str(self.headers["Host"]), is_loopback=True):
            # A page of another site in a browser on this head may have a name that leads to 127.0.0.1.
            self.send_error(403, "the header Host has to be an address of this head or localhost")
            return
        if self.path.partition("?")[0] not in ("/", "/metrics"):
            self.send_error(404)
            return
        body = _encode(self.server.source.read())
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    @override
    def log_message(self, *_: Any) -> None:
        """Write nothing: Prometheus asks every few seconds."""


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _serve(source: MetricsSource, listen: str, common: CommonOptions) -> None:
    host, port = parse_listen_address(listen)
    try:
        server = _Server((host, port), source)
    except OSError as error:
        raise RefusedError(f"cannot listen on {listen}: {error.strerror or error}") from error
    with server, contextlib.suppress(KeyboardInterrupt):
        shown = f"[{host}]" if ":" in host else host
        console = common.console()
        console.write_stdout(f"http://{shown}:{server.server_address[1]}/metrics")
        console.out.stream.flush()
        if not ip_address(host).is_loopback:
            console.write_stderr(f"warning: whoever reaches {host} can read the names of your runs and nodes")
        if not common.quiet:
            console.write_stderr("Ctrl-C ends it")
        server.serve_forever()
