"""`clusterctl health`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.errors import ExitCode, RefusedError

if TYPE_CHECKING:
    from clusterctl.config.spec import ClusterSpec, HostSpec
    from clusterctl.health.model import Finding
    from clusterctl.render.findings import HealthView
    from clusterctl.render.terminal.console import Console


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
@click.option(
    "--record",
    metavar="PATH",
    help="Write what the nodes told to a file that names nobody (docs/recordings.md).",
    type=click.Path(dir_okay=False),
)
@click.option("--replay", metavar="PATH", help="Judge such a file, and ask no node.", type=click.Path(dir_okay=False))
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
    record: str | None,
    replay: str | None,
    verbose: bool,
    as_json: bool,
    color: str,
    quiet: bool,
) -> int:
    """Check GPUs, drivers, disks, clocks and network of all nodes, and compare the nodes with each other.

    Exits with 5 where a check failed; a node that cannot be reached has failed. UNKNOWN is never a pass.
    """
    console = options.console_of(color)
    chosen = _checks(only, skip)

    def show(view: HealthView) -> int:
        _show(view, "json" if as_json else form, console, verbose=verbose, quiet=quiet)
        return int(ExitCode.UNHEALTHY) if _failed(view, strict=strict) else 0

    if replay is not None:
        if path or files or sets or nodes or watch or record:
            raise click.UsageError("`--replay` judges a file by itself: leave out FILE, --file, --set, --node, ...")
        return show(_replayed(replay, chosen, strict=strict))
    if record and watch:
        raise click.UsageError("only one of `--record` and `--watch` can be used")
    from clusterctl.cli.words import parse_duration

    spec = options.load_file(path, files, sets, console=console).spec
    hosts = options.chosen_hosts(spec, nodes)
    pause = parse_duration(watch, "--watch")
    _say_what_is_run(spec, hosts, console)
    while True:
        view = _look(spec, hosts, chosen, strict=strict)
        if record:
            _record(record, spec, view, console)
        code = show(view)
        if pause is None or not console.out.has_reader(pause):
            return code


def _say_what_is_run(spec: ClusterSpec, hosts: tuple[HostSpec, ...], console: Console) -> None:
    """Say what of the file is started on this very machine: a node is looked at as a worker would find it."""
    from clusterctl.config.spec import TransportKind

    here = [host for host in hosts if host.transport is TransportKind.LOCAL]
    parts = [
        *(["job.prologue"] if spec.job and spec.job.prologue else []),
        *(["python"] if any(h.python for h in here) else []),
    ]
    if here and parts:
        words = " and ".join(f"`{part}`" for part in parts)
        console.narrate(f"warning: {words} of {spec.path} will be run on this machine, as for a worker")


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
    from clusterctl.cli.lookup.reach import reachable
    from clusterctl.run.nodes.preflight import judge_all, probe_all
    from clusterctl.run.nodes.progress import Progress

    with reachable(spec, hosts) as (sessions, errors):
        step = Progress("health", len(hosts), lambda _: None)
        facts: dict[str, dict[str, Any]] = probe_all(spec, sessions, step, code=True)
    facts |= {node: {"unreachable": str(error)} for node, error in errors.items()}
    ordered = {h.name: facts[h.name] for h in hosts}
    return _view(ordered, judge_all(spec, ordered, checks), strict=strict)


def _record(path: str, spec: ClusterSpec, view: HealthView, console: Console) -> None:
    from clusterctl.cli import words as words_module
    from clusterctl.health.context import Context
    from clusterctl.health.recording import recorded

    facts = {node.node: dict(node.facts) for node in view.nodes}
    reached_as = [
        name
        for host in spec.hosts
        for text in (host.host, host.address, host.internal_ip, host.user, host.proxy_jump)
        for name in re.split(r"[@,]", text or "")
        if name
    ]
    told = recorded(facts, Context.from_spec(spec), reached_as)
    words_module.write(path, json.dumps(told, indent=1) + "\n")
    console.narrate(f"what {len(facts)} nodes told is in {path}; read it before you send it (docs/recordings.md)")


def _replayed(path: str, checks: list[str] | None, *, strict: bool) -> HealthView:
    from clusterctl.cli import words as words_module
    from clusterctl.health.recording import replayed

    try:
        told = json.loads(words_module.read(path))
        facts, findings = replayed(told, checks)
    except ValueError as error:
        raise RefusedError(f"{path}: not JSON: {error}", hint="`clusterctl health --record PATH` writes one") from error
    except RefusedError as error:
        raise RefusedError(f"{path}: {error}", hint=error.hint) from error
    return _view(facts, findings, strict=strict)


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
            console.json(render.health_json(view))
        case "ndjson":
            console.data(*render.health_ndjson(view))
        case "prometheus":
            console.data(*render.health_prometheus(view))
        case _ if not quiet:
            console.data(*render.render_health(view, console.out, verbose=verbose))
        case _:
            pass
