"""Options that several commands share, written once."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterctl.cli.words import paths_of
from clusterctl.render.console import ColorChoice, Console

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

    from clusterctl.config.loader import LoadedClusterFile
    from clusterctl.config.sections.context import HostCommandRunner
    from clusterctl.config.spec import ClusterSpec, HealthSpec, HostSpec
    from clusterctl.config.text.overrides import Overrides

F = TypeVar("F", bound="Callable[..., Any]")


def offer(kind: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]:
    """Return what a parameter's `shell_complete` takes; see `clusterctl.cli.completion.items` for the kinds."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from clusterctl.cli.completion import items

        return items(kind, context, parameter, incomplete)

    return complete


def cluster_file(command: F) -> F:
    """`[FILE]`, `--file` (several are merged), `--set`."""
    command = click.argument("path", metavar="[FILE]", required=False, shell_complete=offer("files"))(command)
    return file_options(command)


def file_options(command: F) -> F:
    """`--file` (several are merged), `--set`."""
    command = click.option(
        "--file",
        "files",
        metavar="FILE",
        multiple=True,
        help="Cluster file; several are merged, later ones win.",
        shell_complete=offer("files"),
    )(command)
    return click.option(
        "--set",
        "sets",
        metavar="KEY=VALUE",
        multiple=True,
        help="Set a key, e.g. job.grace=30s.",
        shell_complete=offer("keys"),
    )(command)


def target_options(command: F) -> F:
    """What names one node but an argument: `--rank` of `--run`, `-w`; and the file that it is in."""
    command = click.option(
        "--run", "reference", metavar="RUN", help="The run of `--rank`.", shell_complete=offer("runs")
    )(command)
    command = click.option(
        "--rank", type=click.IntRange(0), metavar="N", help="The node of this rank.", shell_complete=offer("ranks")
    )(command)
    command = click.option("-w", "where", metavar="HOST", help="This host, without a cluster file.")(command)
    return file_options(command)


def run_argument(command: F) -> F:
    """`[RUN]`: an id or its beginning, a name, or a cluster file."""
    return click.argument("reference", metavar="[RUN]", required=False, shell_complete=offer("runs"))(command)


def refuse_together(*given: tuple[str, object]) -> None:
    """Refuse options of which one would be ignored; each comes with its value, and is given where that is true.

    Raises:
        click.UsageError: More than one was given.
    """
    names = [f"`{name}`" for name, value in given if value]
    if len(names) > 1:
        raise click.UsageError(f"{', '.join(names[:-1])} and {names[-1]} cannot be used together")


def refuse_beside(option: str, *others: tuple[str, object]) -> None:
    """Refuse what would be ignored beside an option that was given; each comes with its value.

    Raises:
        click.UsageError: Something of it was given.
    """
    names = [f"`{name}`" for name, value in others if value]
    if names:
        raise click.UsageError(f"`{option}` cannot be used together with {' and '.join(names)}")


def _not_both(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    other = "verbose" if parameter.name == "quiet" else "quiet"
    if value and context.params.get(other):
        raise click.UsageError("`--quiet` and `--verbose` cannot be used together")
    return value


def joined(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the sets that an option was given as one, `None` where it was not given."""
    return ",".join(values) or None


def nodes_option(command: F) -> F:
    """`--node SET`; given again, it adds to what was named."""
    return click.option(
        "--node",
        "nodes",
        metavar="SET",
        multiple=True,
        callback=joined,
        help="Only these nodes, e.g. gpu[01-04].",
        shell_complete=offer("nodes"),
    )(command)


def exclude_option(says: str) -> Callable[[F], F]:
    """`--exclude SET`; given again, it adds to what was named."""
    return click.option(
        "--exclude", metavar="SET", multiple=True, callback=joined, help=says, shell_complete=offer("nodes")
    )


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def output_options(command: F) -> F:
    """`--color`, `-q`."""
    command = click.option(
        "--color",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Use colours.",
    )(command)
    return click.option("--quiet", "-q", is_flag=True, callback=_not_both, help="Only print what was asked for.")(
        command
    )


def verbose_option(shows: str) -> Callable[[F], F]:
    """`--verbose`, `-v`, with what it shows of this command."""
    return click.option("--verbose", "-v", is_flag=True, callback=_not_both, help=shows)


def progress_option(command: F) -> F:
    """`--progress`."""
    return click.option(
        "--progress",
        type=click.Choice(["auto", "tty", "plain", "json", "quiet"]),
        default="auto",
        show_default=True,
        help="How to show the steps of the start.",
    )(command)


def console_of(color: str = "auto") -> Console:
    """Return the console of this process, with the colours that the user wants."""
    return Console.standard(color=ColorChoice(color))


def load_file(
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    *,
    overrides: Overrides | None = None,
    require_job: bool = False,
    with_secrets: bool = False,
    console: Console | None = None,
    run_listing: HostCommandRunner | None = None,
) -> LoadedClusterFile:
    """Read the cluster file; say what is probably not meant. Of its commands that list hosts accepted ones are run.

    Raises:
        ConfigError: Something is wrong.
        RefusedError: A command of the file was not accepted.
    """
    from clusterctl.config.loader import load_cluster_file

    loaded = load_cluster_file(
        paths_of(path, files),
        environ=os.environ,
        sets=sets,
        overrides=overrides,
        require_job=require_job,
        with_secrets=with_secrets,
        health_mistakes=_health_mistakes,
        run_listing=run_listing or _run_accepted,
    )
    if console is not None and loaded.warnings:
        from clusterctl.render.errors import render_problems

        console.narrate(*render_problems(loaded.warnings, "warning", console.err))
    return loaded


def _run_accepted(argv: tuple[str, ...]) -> str:
    from clusterctl.cli.lookup.listings import run_accepted

    return run_accepted(argv)


def _health_mistakes(health: HealthSpec) -> list[tuple[str, str, str | None]]:
    from clusterctl.health.registry import find_unknown_names

    return find_unknown_names(health)


def chosen_hosts(spec: ClusterSpec, nodes: str | None, exclude: str | None = None) -> tuple[HostSpec, ...]:
    """Return the hosts that `--node` and `--exclude` choose, in the order of the file.

    Raises:
        NotFoundError: A name that is no host of the file.
        click.UsageError: No set of names.
    """
    if nodes is None and exclude is None:
        return spec.hosts
    from clusterctl.config.host_ranges import HostRangeError, select_hosts

    try:
        names = set(select_hosts([h.name for h in spec.hosts], nodes, exclude))
    except HostRangeError as error:
        raise click.UsageError(f"these are no nodes: {error}") from error
    return tuple(h for h in spec.hosts if h.name in names)
