"""`clusterctl version`."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any

import click

from clusterctl._version import __version__
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.config.host_ranges import fold_hosts, group_names_by_value


@click.command("version", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@options.nodes_option
@options.json_option
@click.pass_obj
def command(common: CommonOptions, path: str | None, nodes: str | None, as_json: bool) -> int:
    """Show the versions of clusterctl and Python here.

    With FILE or `--nodes`, `version` also shows the versions of Python, kernel and agent on the nodes of the cluster
    file.
    """
    console = common.console()
    shown: dict[str, Any] = {"clusterctl": __version__, "python": platform.python_version()}
    if path or nodes or common.files or common.sets:
        spec = cluster_selection.load_chosen_cluster_file(common, path, console=console).spec
        with open_all_sessions(spec, cluster_selection.select_spec_hosts(spec, nodes)) as sessions:
            shown["nodes"] = [
                {
                    "node": node,
                    "python": session.hello["python_version"],
                    "kernel": session.hello["kernel"],
                    "machine": session.hello["machine"],
                    "agent": session.hello["version"],
                }
                for node, session in sessions.items()
            ]
    if as_json:
        console.write_stdout_json(shown)
    else:
        console.write_stdout(
            f"clusterctl {__version__}, Python {shown['python']}", *_fold_versions(shown.get("nodes", []))
        )
    return 0


def _fold_versions(entries: list[dict[str, str]]) -> Iterator[str]:
    """Yield one line for all nodes with equal versions."""
    texts = {
        entry[
            "node"
        ]: f"Python {entry['python']}, kernel {entry['kernel']} ({entry['machine']}), agent {entry['agent']}"
        for entry in entries
    }
    for text, nodes in group_names_by_value(texts).items():
        yield f"{fold_hosts(nodes)}: {text}"
