"""`clusterctl config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.cli.choices import FileChoices, together
from clusterctl.cli.main import WithExamples
from clusterctl.errors import NotFoundError, RefusedError
from clusterctl.plan import environment, layout
from clusterctl.plan import launch as planning
from clusterctl.render.ranks import fold_nodes, fold_ranks
from clusterctl.render.terminal.console import pad
from clusterctl.render.terminal.table import Column, render_table

if TYPE_CHECKING:
    from clusterctl.config.load import Loaded
    from clusterctl.config.spec import ClusterSpec
    from clusterctl.render.terminal.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigChoices(FileChoices):
    """What a person chose of `config`."""

    ranks: bool
    env_rank: int | None
    origin: bool
    as_json: bool


@click.command("config", cls=WithExamples)
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
@together(ConfigChoices)
def command(choices: ConfigChoices) -> int:
    """Check the cluster file and print it with every default. With `-q` it is only checked.

    Nothing is connected to; secrets are shown as `***`.
    """
    by_rank = choices.env_rank is not None
    printed = (("--ranks", choices.ranks), ("--env", by_rank), ("--origin", choices.origin))
    options.refuse_together(*printed)
    if choices.quiet:
        options.refuse_beside("--quiet", *printed, ("--json", choices.as_json))
    console = choices.console()
    loaded = options.load_file(choices.path, choices.files, choices.sets, require_job=by_rank, console=console)
    if choices.ranks:
        shown, lines = _ranks(loaded.spec, console)
    elif choices.env_rank is not None:
        shown, lines = _env(loaded.spec, choices.env_rank)
    elif choices.origin:
        shown, lines = _origins(loaded)
    else:
        return _file(loaded.spec, console, as_json=choices.as_json, quiet=choices.quiet)
    if not choices.quiet:
        console.json(shown) if choices.as_json else console.data(*lines)
    return 0


def _file(spec: ClusterSpec, console: Console, *, as_json: bool, quiet: bool) -> int:
    if not quiet:
        from clusterctl.config.resolve import resolved, to_yaml

        document = resolved(spec)
        console.json(document) if as_json else console.document(to_yaml(document))
    return 0


def _ranks(spec: ClusterSpec, console: Console) -> tuple[Any, list[str]]:
    one, two = (layout.entries_if(spec, gpus) for gpus in (1, 2))
    shown, rows = [], []
    for entry, other in zip(one, two, strict=True):
        node, number = entry.host.name, entry.node_rank
        ranks = entry.ranks if entry.ranks == other.ranks else None
        gpus = entry.gpus if entry.gpus == other.gpus else None
        shown.append({"node": node, "node_rank": number, "ranks": _listed(ranks), "gpus": _listed(gpus)})
        in_words = "counted at start" if ranks is None else fold_ranks(ranks)
        rows.append([node, str(number), in_words, "auto" if gpus is None else fold_ranks(gpus) or "-"])
    if layout.known_entries(spec) is None:
        error = _unknown(spec)
        console.narrate(str(error), f"hint: {error.hint}")
    columns = [Column(title=title) for title in ("NODE", "NODE RANK", "RANKS", "GPUS")]
    return shown, render_table(columns, rows, console.out)


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def _unknown(spec: ClusterSpec) -> RefusedError:
    silent = fold_nodes(h.name for h in spec.workers if layout.worker_count(h, None) is None)
    return RefusedError(
        f"the ranks are counted at start, one per GPU of {silent}",
        hint="write `gpus: N` or `workers: N`, or see `clusterctl health`",
    )


def _env(spec: ClusterSpec, rank: int) -> tuple[Any, list[str]]:
    entries = layout.known_entries(spec)
    if entries is None:
        raise _unknown(spec)
    identity = environment.RunIdentity(run=f"{spec.name}-dry-run", max_restarts=spec.restart.max_restarts)
    plan = planning.plan_json(planning.plan_launch(spec, identity, entries, {}, None, {}), spec.secrets)
    workers = {worker["rank"]: worker for node in plan["nodes"] for worker in node["workers"]}
    if rank not in workers:
        ranks = ", ".join(map(str, workers)) if len(workers) < 9 else f"0-{max(workers)}"
        raise NotFoundError(f"no rank {rank}", hint=f"there are: {ranks}")
    env = dict(sorted(workers[rank]["env"].items()))
    return env, [f"{name}={value}" for name, value in env.items()]


def _origins(loaded: Loaded) -> tuple[Any, list[str]]:
    width = max(map(len, loaded.origins), default=0)
    return loaded.origins, [f"{pad(key, width)}  {place}" for key, place in loaded.origins.items()]
