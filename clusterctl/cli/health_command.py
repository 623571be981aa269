"""`clusterctl health`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.errors import ExitCode

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.health.model import Finding
    from clusterctl.render.console import Console
    from clusterctl.render.findings import HealthView


@click.command("health")
@options.cluster_file
@options.nodes_option
@click.option(
    "--only",
    metavar="CHECKS",
    help="Only these checks, e.g. gpu.count,host.disk.",
    shell_complete=options.offer("checks"),
)
@click.option("--skip", metavar="CHECKS", help="Not these checks.", shell_complete=options.offer("checks"))
@click.option("--strict", is_flag=True, help="WARN and UNKNOWN fail too.")
@click.option("--watch", metavar="DURATION", help="Repeat with this pause until Ctrl-C.")
@click.option(
    "--format", "form", type=click.Choice(["table", "json", "ndjson", "prometheus"]), default="table", show_default=True
)
@options.verbose_option("Show what passed, too.")
@options.json_option
@options.output_options
def command(
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: str | None,
    only: str | None,
    skip: str | None,
    strict: bool,
    watch: str | None,
    form: str,
    verbose: bool,
    as_json: bool,
    color: str,
    quiet: bool,
) -> int:
    """Check GPUs, drivers, disks, clocks and network of all nodes, and compare the nodes with each other.

    Exits with 5 where a check failed; a node that cannot be reached has failed. UNKNOWN is never a pass.
    """
    from clusterctl.cli.durations import parse_duration

    console = options.console_of(color)
    spec = options.load_file(path, files, sets, console=console).spec
    hosts = options.chosen_hosts(spec, nodes)
    pause = parse_duration(watch, "--watch")
    chosen = _checks(only, skip)
    while True:
        view = _look(spec, hosts, chosen, strict=strict)
        _show(view, "json" if as_json else form, console, verbose=verbose, quiet=quiet)
        if pause is None or not console.out.has_reader(pause):
            return int(ExitCode.UNHEALTHY) if _failed(view, strict=strict) else 0


def _failed(view: HealthView, *, strict: bool) -> bool:
    verdict = getattr(view.verdict, "value", view.verdict)
    return verdict == "FAIL" or (strict and verdict != "PASS")


def _checks(only: str | None, skip: str | None) -> list[str] | None:
    """Return the names of the checks to make, or `None` for all.

    Raises:
        click.BadParameter: A name that is no check.
    """
    if only is None and skip is None:
        return None
    import fnmatch

    from clusterctl.health.registry import CHECKS

    names = list(CHECKS)

    def named(text: str, option: str) -> set[str]:
        found: set[str] = set()
        for pattern in text.split(","):
            matching = fnmatch.filter(names, pattern.strip())
            if not matching:
                raise click.BadParameter(f"no check `{pattern}`; `docs/health.md` lists them", param_hint=option)
            found |= set(matching)
        return found

    wanted = named(only, "--only") if only else set(names)
    return [n for n in names if n in wanted - (named(skip, "--skip") if skip else set())]


def _look(spec: ClusterSpec, hosts: tuple[HostSpec, ...], checks: list[str] | None, *, strict: bool) -> HealthView:
    from clusterctl.cli.reach import reachable
    from clusterctl.run.launch import Progress
    from clusterctl.run.preflight import judge_all, probe_all

    with reachable(spec, hosts) as (sessions, errors):
        step = Progress("health", len(hosts), lambda _: None)
        facts: dict[str, dict[str, Any]] = probe_all(spec, sessions, step, code=True)
    facts |= {node: {"unreachable": str(error)} for node, error in errors.items()}
    ordered = {h.name: facts[h.name] for h in hosts}
    return _view(ordered, judge_all(spec, ordered, checks), strict=strict)


def _view(facts: dict[str, dict[str, Any]], findings: list[Finding], *, strict: bool) -> HealthView:
    from clusterctl.health.judge import verdict
    from clusterctl.render.findings import HealthView, NodeHealth

    views = []
    for node, known in facts.items():
        own = tuple(f for f in findings if f.node == node)
        views.append(NodeHealth(node=node, verdict=verdict(own, strict), findings=own, facts=known))
    return HealthView(
        verdict=verdict(findings, strict), nodes=tuple(views), cluster=tuple(f for f in findings if f.node is None)
    )


def _show(view: HealthView, form: str, console: Console, *, verbose: bool, quiet: bool) -> None:
    from clusterctl.render import findings as render

    match form:
        case "json":
            console.data(json.dumps(render.health_json(view), indent=2))
        case "ndjson":
            console.data(*render.health_ndjson(view))
        case "prometheus":
            console.data(*render.health_prometheus(view))
        case _ if not quiet:
            console.data(*render.render_health(view, console.out, verbose=verbose))
        case _:
            pass
