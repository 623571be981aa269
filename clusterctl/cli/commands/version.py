"""`clusterctl version`."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import click

from clusterctl._version import __version__
from clusterctl.cli import options
from clusterctl.cli.command import CliCommand, CommonOptions
from clusterctl.errors import ExitCode

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.health.head import HeadFacts
    from clusterctl.health.model import Finding, Status


@click.command("version", cls=CliCommand, reads_file=True)
@click.option("--nodes", "with_nodes", is_flag=True, help="Also ask the nodes of the cluster file.")
@click.option("--check", is_flag=True, help="Also tell whether this head is fit to start and command runs.")
@options.cluster_file
@options.json_option
@click.pass_obj
def command(
    common: CommonOptions,
    with_nodes: bool,
    check: bool,
    path: str | None,
    as_json: bool,
) -> int:
    """Show versions: of this program, and with `--nodes` of Python, kernel and agent on every node.

    With `--check` a line for each thing that a head needs: ssh and its agent, the folder of runs, open files, what a
    logout does, the clock; and for each controller that lives here. Ends with 5 where a run could not start.
    """
    if not with_nodes and (path or common.files or common.sets):
        raise click.UsageError("only `--nodes` reads a cluster file: leave out FILE, --file and --set")
    console = common.console()
    shown: dict[str, Any] = {"clusterctl": __version__, "python": platform.python_version()}
    head = _Head() if check else None
    if head is not None:
        shown["head"] = head.to_json()
    nodes: list[dict[str, str]] = []
    if with_nodes:
        nodes = shown["nodes"] = _nodes(options.load_file(common, path, console=console).spec)
    code = int(ExitCode.UNHEALTHY if head is not None and head.unfit else ExitCode.OK)
    if as_json:
        console.json(shown)
        return code
    console.data(f"clusterctl {shown['clusterctl']}, Python {shown['python']}")
    console.data(*_folded(nodes))
    if head is not None:
        from clusterctl.render.health import render_head

        console.data("", *render_head(head.findings, head.verdict, console.out))
    return code


def _nodes(spec: ClusterSpec) -> list[dict[str, str]]:
    from clusterctl.cli.lookup.reach import sessions_of

    with sessions_of(spec, spec.hosts) as sessions:
        return [
            {
                "node": node,
                "python": session.hello["python_version"],
                "kernel": session.hello["kernel"],
                "machine": session.hello["machine"],
                "agent": session.hello["version"],
            }
            for node, session in sessions.items()
        ]


class _Head:
    """What is to be said of this head."""

    def __init__(self) -> None:
        from clusterctl.cli.lookup.head import look
        from clusterctl.formatting import format_size
        from clusterctl.health.head import judge_head, verdict

        self._seen: HeadFacts = look()
        self.findings: list[Finding] = judge_head(self._seen, format_size)
        self.verdict: Status = verdict(self.findings)

    @property
    def unfit(self) -> bool:
        """Something would keep a run from starting."""
        from clusterctl.health.model import Status

        return self.verdict is Status.FAIL

    def to_json(self) -> dict[str, Any]:
        """Return `head` of `version --check --json`."""
        return {
            "verdict": self.verdict.value,
            "findings": [finding.to_json() for finding in self.findings],
            "controllers": [controller.to_json() for controller in self._seen.controllers],
        }


def _folded(nodes: list[dict[str, str]]) -> list[str]:
    """Return a line for the nodes that are alike."""
    from clusterctl.config.host_ranges import fold_hosts

    alike: dict[str, list[str]] = {}
    for entry in nodes:
        words = f"Python {entry['python']}, kernel {entry['kernel']} ({entry['machine']}), agent {entry['agent']}"
        alike.setdefault(words, []).append(entry["node"])
    return [f"{fold_hosts(names)}: {words}" for words, names in alike.items()]
