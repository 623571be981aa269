"""`clusterctl reserve`."""

from __future__ import annotations

import os
import time
from datetime import datetime

import click

from clusterctl.agent.protocol.command_payload_types import ReserveArguments
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.cli.option_values import parse_interval_option
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.errors import ExitCode, RefusedError
from clusterctl.formatting import plural
from clusterctl.plan.layout import list_claimed_gpus
from clusterctl.run.nodes.fan_out import call_all, raise_first
from clusterctl.run.nodes.network_probe import build_node_facts
from clusterctl.session.node_session import Session
from clusterctl.session.request_definitions import RESERVE

_MAX_S = 30 * 86400.0
_MAX_NOTE = 200
"""The most characters of a note: nodes read only the first 4096 bytes of the file that describes a reservation."""


@click.command("reserve", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@click.option("--for", "duration", metavar="DURATION", help="Hold the GPUs for this time, e.g. 2h.")
@click.option("--note", metavar="TEXT", default="", help="Tell all users of the nodes why.")
@click.option("--release", is_flag=True, help="Give all reserved GPUs of these nodes back.")
@click.pass_obj
def command(
    common: CommonOptions, *, path: str | None, nodes: str | None, duration: str | None, note: str, release: bool
) -> int:
    """Hold the GPUs of the cluster file for a person, without a run, until the time is over.

    Your own runs from this head may use the GPUs. Others are refused, or wait with `up --wait`, and see who holds the
    GPUs, until when and why. The nodes end the reservation themselves. A later `reserve` replaces the earlier one on
    its nodes.
    """
    seconds = parse_interval_option(duration, "--for")
    if (seconds is None) != release:
        raise click.UsageError("`reserve` needs either `--for DURATION` or `--release`")
    if (seconds or 0.0) > _MAX_S:
        raise click.BadParameter("at most 30d", param_hint="--for")
    if len(note) > _MAX_NOTE:
        raise click.BadParameter(f"at most {_MAX_NOTE} characters", param_hint="--note")
    console = common.console()
    spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
    hosts = {host.name: host for host in cluster_selection.select_spec_hosts(spec, nodes)}
    with open_all_sessions(spec, [*hosts.values()], progress=None if common.quiet else console.err) as sessions:
        gpus = {n: list_claimed_gpus(hosts[n], build_node_facts(hosts[n], s.hello).gpus) for n, s in sessions.items()}

        def reserve(node: str, session: Session, seconds: float) -> int:
            asked: ReserveArguments = {
                "node": node,
                "gpus": list(gpus[node]),
                "seconds": seconds,
                "name": spec.name,
                "head": os.uname().nodename,
                "note": note,
            }
            return RESERVE.call(session, asked)["ended"]

        without = [node for node, indices in gpus.items() if not indices]
        if without and not release:
            raise RefusedError(f"{fold_hosts(without)}: no GPU to reserve", hint="write `gpus: N`, or use `--nodes`")
        ended, errors = call_all(sessions, lambda node, session: reserve(node, session, seconds or 0.0))
        if errors and not release:
            call_all({node: sessions[node] for node in ended}, lambda node, session: reserve(node, session, 0.0))
        raise_first(errors)
    if release:
        console.write_stdout(f"{plural(sum(ended.values()), 'reservation')} ended on {fold_hosts(hosts)}")
    else:
        until = datetime.fromtimestamp(time.time() + (seconds or 0.0)).astimezone()
        count = plural(sum(map(len, gpus.values())), "GPU")
        console.write_stdout(f"{count} on {fold_hosts(hosts)} reserved until {until:%Y-%m-%d %H:%M}")
    return int(ExitCode.OK)
