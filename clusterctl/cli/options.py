"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterctl.cli import accepted_commands
from clusterctl.cli.base_command import CommonOptions, make_completer
from clusterctl.cli.option_values import list_cluster_files
from clusterctl.config.host_ranges import HostRangeError, select_hosts
from clusterctl.config.spec import ClusterSpec, HealthSpec, HostSpec
from clusterctl.render.error_messages import render_problems

if TYPE_CHECKING:
    from clusterctl.config.loader import LoadedClusterFile
    from clusterctl.config.sections.build_context import HostCommandRunner
    from clusterctl.config.text.overrides import Overrides
    from clusterctl.render.console import Console

F = TypeVar("F", bound="Callable[..., Any]")


def cluster_file_argument(command: F) -> F:
    """`[FILE]`; `--file` adds more."""
    return click.argument("path", metavar="[FILE]", required=False, shell_complete=make_completer("files"))(command)


def single_node_options(command: F) -> F:
    """`--rank` of `--run` and `-w`, which name one node."""
    command = click.option(
        "--run",
        "reference",
        metavar="RUN",
        help="The run that `--rank` belongs to; the only active one by default.",
        shell_complete=make_completer("runs"),
    )(command)
    command = click.option(
        "--rank",
        type=click.IntRange(0),
        metavar="N",
        help="Use the node of this rank.",
        shell_complete=make_completer("ranks"),
    )(command)
    return click.option("-w", "host", metavar="HOST", help="Use this host, without a cluster file.")(command)


def run_argument(command: F) -> F:
    """`[RUN]`: an id or its beginning, a name, or a cluster file."""
    return click.argument("reference", metavar="[RUN]", required=False, shell_complete=make_completer("runs"))(command)


def refuse_combination(*given: tuple[str, object]) -> None:
    """Refuse options that exclude each other; each comes with its value.

    Raises:
        click.UsageError: More than one was given.
    """
    names = [f"`{name}`" for name, value in given if value]
    if len(names) > 1:
        raise click.UsageError(f"{', '.join(names[:-1])} and {names[-1]} cannot be used together")


def refuse_options_with(option: str, *others: tuple[str, object]) -> None:
    """Refuse other options that have no effect with a given option; each comes with its value.

    Raises:
        click.UsageError: One of them was given.
    """
    names = [f"`{name}`" for name, value in others if value]
    if names:
        raise click.UsageError(f"`{option}` cannot be used together with {' and '.join(names)}")


def join_repeated_option(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the values of a repeated option as one set, or `None` without a value."""
    return ",".join(values) or None


def _set_option(*names: str, description: str, candidate_type: str) -> Callable[[F], F]:
    shell_complete = make_completer(candidate_type)
    return click.option(
        *names,
        metavar="SET",
        multiple=True,
        callback=join_repeated_option,
        help=description,
        shell_complete=shell_complete,
    )


def nodes_option(command: F) -> F:
    """`--nodes SET`; a repeated option adds to the set."""
    return _set_option("--nodes", description="Only these nodes, e.g. gpu[01-04].", candidate_type="nodes")(command)


def exclude_option(description: str) -> Callable[[F], F]:
    """`--exclude SET`; a repeated option adds to the set."""
    return _set_option("--exclude", description=description, candidate_type="nodes")


def json_option(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def verbose_option(description: str) -> Callable[[F], F]:
    """`--verbose`, `-v`, with what it shows of this command."""
    return click.option("--verbose", "-v", is_flag=True, help=description)


def rank_set_option(command: F) -> F:
    """`--rank SET`; a repeated option adds to the set."""
    return _set_option("--rank", "ranks", description="Only these ranks, e.g. 0-3,7.", candidate_type="ranks")(command)


def load_chosen_cluster_file(
    common: CommonOptions,
    path: str | None,
    *,
    overrides: Overrides | None = None,
    require_job: bool = False,
    with_secrets: bool = False,
    console: Console | None = None,
    run_host_command: HostCommandRunner | None = None,
) -> LoadedClusterFile:
    """Read the cluster file, and print its warnings. Of its commands that list hosts, accepted ones are run.

    Args:
        common: Further files, and values that win over theirs.
        path: The file that the command names as its argument.
        overrides: Values of options of the command.
        require_job: A file without a job is an error.
        with_secrets: Secrets are filled in.
        console: Where warnings go; `None` for nowhere.
        run_host_command: Runs a command that lists hosts.

    Raises:
        ConfigError: Something is wrong.
        RefusedError: A command of the file was not accepted.
    """
    from clusterctl.config.loader import load_cluster_file

    loaded = load_cluster_file(
        list_cluster_files(path, common.files),
        environ=os.environ,
        sets=common.sets,
        overrides=overrides,
        require_job=require_job,
        with_secrets=with_secrets,
        find_health_mistakes=_find_health_mistakes,
        run_host_command=run_host_command or accepted_commands.run_host_list_command_if_accepted,
    )
    if console is not None and loaded.warnings:
        console.write_stderr(*render_problems(loaded.warnings, "warning", console.err))
    return loaded


def _find_health_mistakes(health: HealthSpec) -> list[tuple[str, str, str | None]]:
    # A file without health checks of its own need not wait for the registry of all checks.
    from clusterctl.health.registry import find_unknown_names

    return find_unknown_names(health)


def select_spec_hosts(spec: ClusterSpec, nodes: str | None, exclude: str | None = None) -> tuple[HostSpec, ...]:
    """Return the hosts that `--nodes` and `--exclude` choose, in the order of the file.

    Raises:
        NotFoundError: A name is not in the file.
        click.UsageError: The text is no set of names.
    """
    if nodes is None and exclude is None:
        return spec.hosts
    try:
        names = set(select_hosts([h.name for h in spec.hosts], nodes, exclude))
    except HostRangeError as error:
        raise click.UsageError(f"this is not a set of nodes: {error}") from error
    return tuple(h for h in spec.hosts if h.name in names)
