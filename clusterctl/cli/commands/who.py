"""`clusterctl who`."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import click

from clusterctl.cli import cluster_selection, node_stats, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.follow.keyboard import AlternateScreen
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.config.spec import HostSpec
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.render.node_use_table import node_use_json, render_node_use
from clusterctl.run.nodes.fan_out import call_all
from clusterctl.run.record.idle_records import read_idle_records, save_idle_records
from clusterctl.run.record.machine_ledger import HistoryError, read_offences
from clusterctl.run.record.rundir import find_runs_root
from clusterctl.run.record.state_reader import list_runs
from clusterctl.run.rules.node_use import NodeUse, build_node_use
from clusterctl.session.node_session import Session


@click.command("who", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@click.option("--watch", metavar="DURATION", help="Repeat at this interval until `q` or Ctrl-C.")
@options.json_option
@click.pass_obj
def command(common: CommonOptions, *, path: str | None, nodes: str | None, watch: str | None, as_json: bool) -> int:
    """Show which GPUs and nodes are free, and who uses the others: runs, reservations and processes of all users.

    `idle` marks processes that hold GPU memory and have not used a GPU or a CPU for 30 minutes. `who` asks every node
    once, and needs no run and no rights; it names what it cannot see. `who` exits with 4 if a node cannot be reached.
    """
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    hosts = cluster_selection.select_spec_hosts(spec, nodes)
    pause = parse_interval_option(watch, "--watch")
    progress = None if common.quiet else console.err
    with open_reachable_sessions(spec, hosts, progress=progress) as (sessions, errors):
        if pause is not None and not as_json and sys.stdin.isatty() and console.out.live:
            with AlternateScreen(console.out) as screen:
                while True:
                    lines = render_node_use(_ask_nodes(hosts, sessions, errors), time.time(), console.out)
                    if (height := console.out.height) < len(lines):
                        lines[height - 1 :] = [f"{len(lines) - height + 1} lines more; `--nodes SET` shows fewer nodes"]
                    console.out.draw_screen(lines)
                    if screen.wait_for_key(pause) in ("", "q", "Q", "\x03", "\x04"):
                        return int(ExitCode.OK)
        while True:
            uses = _ask_nodes(hosts, sessions, errors)
            if as_json:
                console.write_stdout_json(node_use_json(uses, time.time()))
            else:
                console.write_stdout(*render_node_use(uses, time.time(), console.out))
            if pause is None or not console.out.has_reader(pause):
                return int(ExitCode.NODE if any(use.error for use in uses) else ExitCode.OK)


def _ask_nodes(
    hosts: Sequence[HostSpec], sessions: Mapping[str, Session], errors: Mapping[str, ClusterctlError]
) -> list[NodeUse]:
    """Ask all nodes in parallel who uses them. If a node does not answer, its result has the reason."""
    state = find_runs_root().parent
    records, known_runs = read_idle_records(state), {run.run for run in list_runs()}
    facts, failed = call_all(sessions, lambda _, session: node_stats.request_facts(session, "claims", "gpu_users"))
    now = time.time()
    uses: dict[str, NodeUse] = {}
    seen = dict(records)
    for node, answer in facts.items():
        try:
            uses[node], new = build_node_use(node, answer, known_runs, records, now)
            seen.update(new)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as unreadable:
            uses[node] = NodeUse(node=node, error=f"its answer cannot be read: {unreadable!r}")
    save_idle_records(state, seen, now)
    with contextlib.suppress(HistoryError):
        for node, offence in read_offences(state, uses, now).items():
            uses[node] = replace(uses[node], notes=(*uses[node].notes, offence))
    for node, error in {**errors, **failed}.items():
        uses[node] = NodeUse(node=node, error=str(error).removeprefix(f"{node}: "))
    return [uses[host.name] for host in hosts]
