"""`clusterctl config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.errors import NotFoundError, RefusedError

if TYPE_CHECKING:
    from clusterctl.config.load import Loaded
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.render.terminal.console import Console


@click.command("config")
@options.cluster_file
@click.option("--ranks", is_flag=True, help="Print which ranks each node has.")
@click.option(
    "--env",
    "env_rank",
    type=click.IntRange(0),
    metavar="RANK",
    help="Print what a rank's environment gets.",
    shell_complete=options.offer("ranks"),
)
@click.option("--origin", is_flag=True, help="Print where each value came from.")
@options.json_option
@options.output_options
def command(
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    ranks: bool,
    env_rank: int | None,
    origin: bool,
    as_json: bool,
    color: str,
    quiet: bool,
) -> int:
    """Check the cluster file and print it with every default. With `-q` it is only checked.

    Nothing is connected to; secrets are shown as `***`.
    """
    if ranks + origin + (env_rank is not None) > 1:
        raise click.UsageError("only one of `--ranks`, `--env` and `--origin` can be printed")
    console = options.console_of(color)
    loaded = options.load_file(path, files, sets, require_job=env_rank is not None, console=console)
    if ranks:
        shown, lines = _ranks(loaded.spec, console)
    elif env_rank is not None:
        shown, lines = _env(loaded.spec, env_rank)
    elif origin:
        shown, lines = _origins(loaded)
    else:
        return _file(loaded.spec, console, as_json=as_json, quiet=quiet)
    if not quiet:
        console.json(shown) if as_json else console.data(*lines)
    return 0


def _file(spec: ClusterSpec, console: Console, *, as_json: bool, quiet: bool) -> int:
    if not quiet:
        from clusterctl.config.resolve import resolved, to_yaml

        document = resolved(spec)
        console.json(document) if as_json else console.document(to_yaml(document))
    return 0


def _ranks(spec: ClusterSpec, console: Console) -> tuple[Any, list[str]]:
    from clusterctl.plan import layout
    from clusterctl.render.ranks import fold_ranks
    from clusterctl.render.terminal.table import Column, render_table

    entries = layout.known_entries(spec)
    if entries is None:
        raise _unknown(spec)
    shown = [
        {"node": e.host.name, "node_rank": e.node_rank, "ranks": list(e.ranks), "gpus": list(e.gpus)} for e in entries
    ]
    rows = [[e.host.name, str(e.node_rank), fold_ranks(e.ranks), fold_ranks(e.gpus) or "-"] for e in entries]
    columns = [Column(title=title) for title in ("NODE", "NODE RANK", "RANKS", "GPUS")]
    return shown, render_table(columns, rows, console.out)


def _unknown(spec: ClusterSpec) -> RefusedError:
    from clusterctl.plan.layout import worker_count
    from clusterctl.render.ranks import fold_nodes

    asked = fold_nodes(h.name for h in spec.workers if worker_count(h, None) is None)
    return RefusedError(
        f"only the nodes can tell how many ranks there are: {asked}",
        hint="write `gpus: N` or `workers: N`, or see `clusterctl health`",
    )


def _env(spec: ClusterSpec, rank: int) -> tuple[Any, list[str]]:
    from clusterctl.plan import environment, layout
    from clusterctl.plan import launch as planning

    entries = layout.known_entries(spec)
    if entries is None:
        raise _unknown(spec)
    identity = environment.RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    plan = planning.plan_json(planning.plan_launch(spec, identity, entries, {}, None, {}), spec.secrets)
    workers = {worker["rank"]: worker for node in plan["nodes"] for worker in node["workers"]}
    if rank not in workers:
        known = ", ".join(map(str, workers)) if len(workers) < 9 else f"0-{max(workers)}"
        raise NotFoundError(f"no rank {rank}", hint=f"there are: {known}")
    env = dict(sorted(workers[rank]["env"].items()))
    return env, [f"{name}={value}" for name, value in env.items()]


def _origins(loaded: Loaded) -> tuple[Any, list[str]]:
    from clusterctl.render.terminal.console import pad

    found = loaded.origins
    width = max(map(len, found), default=0)
    return found, [f"{pad(key, width)}  {place}" for key, place in found.items()]
