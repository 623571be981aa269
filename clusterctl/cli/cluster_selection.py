"""Loads the cluster file that a command line names, and selects its hosts by options."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from clusterctl.cli import trusted_commands
from clusterctl.cli.base_command import CommonOptions
from clusterctl.cli.option_values import list_cluster_files, read_text_file
from clusterctl.config.host_ranges import HostRangeError, remove_listed_hosts, select_hosts
from clusterctl.config.spec import ClusterSpec, HealthSpec, HostSpec
from clusterctl.errors import NotFoundError
from clusterctl.render.error_messages import render_problems

if TYPE_CHECKING:
    from clusterctl.config.loader import LoadedClusterFile
    from clusterctl.config.sections.build_context import HostCommandRunner
    from clusterctl.config.text.overrides import Overrides
    from clusterctl.render.console import Console


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
    """Read the cluster file and print warnings. A command that lists hosts runs only if the user has accepted it.

    Args:
        common: The common options: `--file` names further cluster files, and `--set` overrides values of the files.
        path: The cluster file that the command's argument names; `None` without this argument.
        overrides: Values of the command's own options, which override values of the files.
        require_job: Whether a file without a job is an error.
        with_secrets: Whether to read the values of secrets.
        console: The console that prints warnings; `None` discards warnings.
        run_host_command: A function that runs a command that lists hosts.

    Raises:
        ConfigError: A cluster file has mistakes or cannot be read.
        RefusedError: The user has not accepted a command of the file.
    """
    from clusterctl.config.loader import load_cluster_file

    loaded = load_cluster_file(
        list_cluster_files(path, common.files),
        environ=os.environ,
        sets=common.sets,
        overrides=overrides,
        require_job=require_job,
        with_secrets=with_secrets,
        find_health_mistakes=find_health_mistakes,
        run_host_command=run_host_command or trusted_commands.run_accepted_host_command,
    )
    if console is not None and loaded.warnings:
        console.write_stderr(*render_problems(loaded.warnings, "warning", console.err))
    return loaded


def find_health_mistakes(health: HealthSpec) -> list[tuple[str, str, str | None]]:
    """Return the unknown names in a `health` section: key, name, and a similar known name."""
    # The registry imports all checks, so it is imported only for a file with health settings.
    from clusterctl.health.registry import find_unknown_names

    return find_unknown_names(health)


def select_spec_hosts(
    spec: ClusterSpec, nodes: str | None, exclude: str | None = None, exclude_file: str | None = None
) -> tuple[HostSpec, ...]:
    """Return the hosts that `--nodes`, `--exclude` and `--exclude-file` choose, in the order of the file.

    Raises:
        NotFoundError: The cluster file has no host with a given name, there is no file, or no host remains.
        click.UsageError: The value of an option is not a set of names.
    """
    if nodes is None and exclude is None and exclude_file is None:
        return spec.hosts
    try:
        names = select_hosts([h.name for h in spec.hosts], nodes, exclude)
    except HostRangeError as error:
        raise click.UsageError(f"this is not a set of nodes: {error}") from error
    if exclude_file is not None:
        try:
            names = remove_listed_hosts(names, read_text_file(exclude_file))
        except HostRangeError as error:
            raise click.UsageError(f"{exclude_file} is not a list of hosts: {error}") from error
        if not names:
            raise NotFoundError("no node is selected", hint=f"{exclude_file} contains all chosen nodes")
    return tuple(h for h in spec.hosts if h.name in names)
