"""Declares arguments and options that several commands share, and refuses invalid combinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from clusterctl.cli.base_command import make_completer

F = TypeVar("F", bound="Callable[..., Any]")


def cluster_file_argument(command: F) -> F:
    """Add the argument `[FILE]`, which names the cluster file."""
    return click.argument("path", metavar="[FILE]", required=False, shell_complete=make_completer("files"))(command)


def single_node_options(command: F) -> F:
    """Add the options `--rank`, `--run` and `-w`, which name one node."""
    command = click.option(
        "--run",
        "reference",
        metavar="RUN",
        help="The run of `--rank`; by default the only active run, or else the newest one.",
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
    """Add the argument `[RUN]`: the id of a run or its beginning, its name, or its cluster file."""
    return click.argument("reference", metavar="[RUN]", required=False, shell_complete=make_completer("runs"))(command)


def refuse_combination(*given: tuple[str, object]) -> None:
    """Raise an error if more than one of these options has a value; `given` has their names and values.

    Raises:
        click.UsageError: More than one option was given.
    """
    names = [f"`{name}`" for name, value in given if value]
    if len(names) > 1:
        raise click.UsageError(f"{', '.join(names[:-1])} and {names[-1]} cannot be used together")


def refuse_options_with(option: str, *others: tuple[str, object]) -> None:
    """Raise an error if one of `others` has a value, because it would have no effect together with `option`.

    Raises:
        click.UsageError: One of the other options was given.
    """
    names = [f"`{name}`" for name, value in others if value]
    if names:
        raise click.UsageError(f"`{option}` cannot be used together with {' and '.join(names)}")


def join_repeated_option(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> str | None:
    """Return the values of a repeated option as one set; `None` if the option is not given."""
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
    """Add the option `--nodes SET`; repeated options form one set."""
    return _set_option("--nodes", description="Only these nodes, e.g. gpu[01-04].", candidate_type="nodes")(command)


def exclude_option(description: str) -> Callable[[F], F]:
    """Add the option `--exclude SET`; repeated options form one set."""
    return _set_option("--exclude", description=description, candidate_type="nodes")


def exclude_file_option(command: F) -> F:
    """Add the option `--exclude-file FILE`."""
    text = "Leave out the hosts in this file: one per line, or a range such as gpu[01-04]; `#` begins a comment."
    return click.option("--exclude-file", metavar="FILE", type=click.Path(dir_okay=False), help=text)(command)


def output_option(default: str, beginning: str = "Write") -> Callable[[F], F]:
    """Add the option `-o FILE`; `default` describes the file that is written without the option."""
    text = f"{beginning} to this file; {default} by default, `-` for stdout."
    return click.option("-o", "--output", metavar="FILE", help=text)


def json_option(command: F) -> F:
    """Add the option `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def verbose_option(description: str) -> Callable[[F], F]:
    """Add the option `--verbose`; `description` is the option's help."""
    return click.option("--verbose", "-v", is_flag=True, help=description)


def rank_set_option(command: F) -> F:
    """Add the option `--rank SET`; repeated options form one set."""
    return _set_option("--rank", "ranks", description="Only these ranks, e.g. 0-3,7.", candidate_type="ranks")(command)
