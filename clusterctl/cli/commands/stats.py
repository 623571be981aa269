"""`clusterctl stats`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from clusterctl.cli import cluster_selection, node_stats, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.node_sessions import open_reachable_sessions
from clusterctl.cli.node_stats import StatsSource
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.config.host_ranges import select_hosts
from clusterctl.errors import ExitCode
from clusterctl.formatting import describe_duration
from clusterctl.render.stats_table import describe_missing_values, render_stats, stats_json
from clusterctl.render.top_rows import FoldLevel, TopData, list_top_units, make_rows
from clusterctl.render.top_screen import render_rows
from clusterctl.run.record import state_reader
from clusterctl.run.record.head_clock import read_head_time

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.render.stats_table import NodeStats


_MAX_ROWS = 64


@click.command("stats", cls=CliCommand)
@click.argument("reference", metavar="[RUN|FILE]", required=False, shell_complete=make_completer("runs"))
@options.nodes_option
@click.option("--watch", metavar="DURATION", help="Repeat at this interval until Ctrl-C.")
@options.json_option
@options.verbose_option("Show one row for each GPU, even of a large cluster.")
@click.pass_obj
def command(
    common: CommonOptions, reference: str | None, nodes: str | None, watch: str | None, as_json: bool, verbose: bool
) -> int:
    """Show utilisation, memory, temperature and power of all GPUs and nodes; many similar nodes share a row.

    While a run is active, `stats` shows the latest samples of its nodes (one every 15 s). Without an active run,
    `stats` measures on the nodes of the cluster file, and exits with 4 if a node cannot be reached.
    """
    console = common.console()
    options.refuse_combination(("--json", as_json), ("--verbose", verbose))
    pause = parse_interval_option(watch, "--watch")
    source = node_stats.find_stats_source(reference)
    while True:
        stats = _load_stats(common, source, nodes, console)
        _print_stats(stats, console, as_json=as_json, every=verbose, quiet=common.quiet)
        if pause is None:
            blind = source.run is None and any(n.status == "unknown" for n in stats)
            return int(ExitCode.NODE if blind else ExitCode.OK)
        if not console.out.has_reader(pause):
            return int(ExitCode.OK)


def _load_stats(common: CommonOptions, source: StatsSource, chosen: str | None, console: Console) -> list[NodeStats]:
    if source.run is None:
        spec = cluster_selection.load_chosen_cluster_file(common, source.cluster_file, console=console).spec
        hosts = cluster_selection.select_spec_hosts(spec, chosen)
        with open_reachable_sessions(spec, hosts, progress=console.err) as (sessions, errors):
            return node_stats.probe_node_stats(hosts, sessions, errors)
    state, attended = state_reader.load_state_and_attendance(source.run)
    if not attended and not state.is_over:
        console.write_stderr(
            "the run has no controller, so no new samples arrive", f"hint: `clusterctl attach --adopt {source.run.run}`"
        )
    if state.is_over:
        when = "" if state.ended is None else f" {describe_duration(read_head_time() - state.ended)} ago"
        console.write_stderr(f"{source.run.run} has ended{when}: these are its last samples")
    stats = node_stats.load_run_stats(source.run, state)
    if chosen is None:
        return stats
    names = set(select_hosts([n.node for n in stats], chosen, None))
    return [n for n in stats if n.node in names]


def _print_stats(stats: list[NodeStats], console: Console, *, as_json: bool, every: bool, quiet: bool) -> None:
    if as_json:
        console.write_stdout_json(stats_json(stats))
        return
    many = sum(max(1, len(node.gpus)) for node in stats) > _MAX_ROWS
    console.write_stdout(*(_render_folded(stats, console) if many and not every else render_stats(stats, console.out)))
    if not quiet:
        console.write_stderr(*describe_missing_values(stats, time.time()))


def _render_folded(stats: list[NodeStats], console: Console) -> list[str]:
    data = TopData(nodes=stats)
    rows = make_rows(data, list_top_units(data), FoldLevel.ALIKE, time.time())
    return render_rows(rows, data, console.out.width, console.out)
