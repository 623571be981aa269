"""`clusterctl version`."""

from __future__ import annotations

import json
import platform

import click

from clusterctl._version import __version__
from clusterctl.cli import options


@click.command("version")
@click.option("--nodes", "with_nodes", is_flag=True, help="Also ask the nodes of the cluster file.")
@options.cluster_file
@options.json_option
@options.output_options
def command(
    with_nodes: bool,
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    as_json: bool,
    color: str,
    quiet: bool,
) -> int:
    """Show versions: of this program, and with `--nodes` of Python, kernel and agent on every node."""
    console = options.console_of(color)
    shown: dict[str, object] = {"clusterctl": __version__, "python": platform.python_version()}
    if with_nodes:
        from clusterctl.cli.reach import sessions_of

        spec = options.load_file(path, files, sets, console=console).spec
        with sessions_of(spec, spec.hosts) as sessions:
            shown["nodes"] = [
                {
                    "node": node,
                    "python": session.hello.get("python_version"),
                    "kernel": session.hello.get("kernel"),
                    "machine": session.hello.get("machine"),
                    "agent": session.hello.get("version"),
                }
                for node, session in sessions.items()
            ]
    if as_json:
        console.data(json.dumps(shown, indent=2))
        return 0
    console.data(f"clusterctl {shown['clusterctl']}, Python {shown['python']}")
    for entry in shown.get("nodes", []):  # type: ignore[attr-defined]
        console.data(
            f"{entry['node']}: Python {entry['python']}, kernel {entry['kernel']} ({entry['machine']}), "
            f"agent {entry['agent']}"
        )
    return 0
