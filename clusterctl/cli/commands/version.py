"""`clusterctl version`."""

from __future__ import annotations

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
    nodes: list[dict[str, str]] = []
    if with_nodes:
        from clusterctl.cli.lookup.reach import sessions_of

        spec = options.load_file(path, files, sets, console=console).spec
        with sessions_of(spec, spec.hosts) as sessions:
            nodes = [
                {
                    "node": node,
                    "python": session.hello["python_version"],
                    "kernel": session.hello["kernel"],
                    "machine": session.hello["machine"],
                    "agent": session.hello["version"],
                }
                for node, session in sessions.items()
            ]
        shown["nodes"] = nodes
    if as_json:
        console.json(shown)
        return 0
    console.data(f"clusterctl {shown['clusterctl']}, Python {shown['python']}")
    console.data(*_folded(nodes))
    return 0


def _folded(nodes: list[dict[str, str]]) -> list[str]:
    """Return a line for the nodes that are alike."""
    from clusterctl.render.ranks import fold_nodes

    alike: dict[str, list[str]] = {}
    for entry in nodes:
        words = f"Python {entry['python']}, kernel {entry['kernel']} ({entry['machine']}), agent {entry['agent']}"
        alike.setdefault(words, []).append(entry["node"])
    return [f"{fold_nodes(names)}: {words}" for words, names in alike.items()]
