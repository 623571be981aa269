"""`clusterctl config`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.command_payload_types import ProgramArguments
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.node_command_runs import RemoteCommand
from clusterctl.cli.node_sessions import open_all_sessions
from clusterctl.cli.option_values import write_text_file
from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.loader import LoadedClusterFile
from clusterctl.config.resolved_file import build_resolved_document, render_yaml
from clusterctl.config.schema import render_schema
from clusterctl.config.secret_redaction import REDACTED, is_secret_name
from clusterctl.config.spec import ClusterSpec, HostSpec, TransportKind
from clusterctl.errors import ConfigError, NodeError, NotFoundError, Problem, RefusedError
from clusterctl.formatting import fold_ranks
from clusterctl.plan import layout
from clusterctl.plan.launch import explain_environment
from clusterctl.plan.layout import NodeLayout
from clusterctl.plan.roles import assign_roles
from clusterctl.render.console import pad, safe
from clusterctl.render.start_progress import WaitingLine
from clusterctl.render.table import Column, render_table
from clusterctl.run.nodes.code_exclusions import list_arguments_with_unsent_files
from clusterctl.run.nodes.fan_out import raise_first
from clusterctl.run.nodes.network_probe import build_node_facts, resolve_rendezvous
from clusterctl.transport.ssh.ssh_options import (
    CONFIG_VARIABLE,
    SshOptions,
    find_duplicate_hosts,
    get_destination,
    resolve_options,
)

if TYPE_CHECKING:
    from clusterctl.render.console import Console

_ENV_TIMEOUT_S = 30.0
_MAX_PADDED_WIDTH = 60
"""Maximum width of the column of variables. After a longer variable, the source is printed further to the right."""


@click.command("config", cls=CliCommand, reads_file=True)
@options.cluster_file_argument
@click.option("--ranks", is_flag=True, help="Print the ranks of each node.")
@click.option(
    "--env",
    "env_rank",
    type=click.IntRange(0),
    metavar="RANK",
    help="Print the environment of this rank, with the source of each variable.",
    shell_complete=make_completer("ranks"),
)
@click.option(
    "--live", is_flag=True, help="With --env: ask the nodes, and also print the variables of their login shells."
)
@click.option("--origin", is_flag=True, help="Print where each value comes from.")
@click.option(
    "--schema",
    is_flag=True,
    help="Print the JSON Schema of cluster files, which editors use for completion and checks.",
)
@click.option("--output", "-o", metavar="FILE", help="With --schema: write the schema to this file.")
@options.json_option
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    path: str | None,
    ranks: bool,
    env_rank: int | None,
    live: bool,
    origin: bool,
    schema: bool,
    output: str | None,
    as_json: bool,
) -> int:
    """Check the cluster file and print it with all defaults. `-q` only checks the file.

    `config` connects to nodes only with `--live`. `config` resolves host names with `ssh -G`, and prints secrets as
    `***`.
    """
    by_rank = env_rank is not None
    if live and not by_rank:
        raise click.UsageError("`--live` needs `--env RANK`")
    if output is not None and not schema:
        raise click.UsageError("`--output` needs `--schema`")
    printed = (("--ranks", ranks), ("--env", by_rank), ("--origin", origin))
    if schema:
        options.refuse_options_with("--schema", *printed, ("--json", as_json), ("FILE", path), ("--file", common.files))
        return _print_schema(common, output)
    options.refuse_combination(*printed)
    if common.quiet:
        options.refuse_options_with("--quiet", *printed, ("--json", as_json))
    console = common.console()
    loaded = cluster_selection.load_chosen_cluster_file(common, path, require_job=by_rank, console=console)
    _refuse_names_of_one_host(loaded.spec)
    for warning in list_arguments_with_unsent_files(loaded.spec):
        console.write_stderr(f"warning: {safe(warning)}")
    if ranks:
        shown, lines = _render_ranks(assign_roles(loaded.spec), console)
    elif env_rank is not None:
        shown, lines = _render_environment(loaded, env_rank, console, live=live)
    elif origin:
        width = max(map(len, loaded.origins), default=0)
        shown, lines = loaded.origins, [f"{pad(key, width)}  {place}" for key, place in loaded.origins.items()]
    else:
        shown = build_resolved_document(loaded.spec)
        lines = render_yaml(shown).rstrip("\n").split("\n")
    if not common.quiet:
        console.write_stdout_json(shown) if as_json else console.write_stdout(*lines)
    return 0


def _print_schema(common: CommonOptions, output: str | None) -> int:
    console = common.console()
    if output is None:
        console.write_stdout_text(render_schema())
        return 0
    write_text_file(output, render_schema())
    if not common.quiet:
        console.write_stderr(
            f"wrote {output}", f"for editors, begin a cluster file with `# yaml-language-server: $schema={output}`"
        )
    return 0


def _refuse_names_of_one_host(spec: ClusterSpec) -> None:
    """Raise an error if ssh_config maps two names to one machine.

    The start of a run also compares the identities of the machines.
    """
    file = os.environ.get(CONFIG_VARIABLE) or None

    def options_of(host: HostSpec) -> SshOptions | None:
        try:
            return resolve_options(host.name, get_destination(host), config_file=file)
        except NodeError:
            return None

    hosts = [host for host in spec.hosts if host.transport is TransportKind.SSH and not isinstance(host.gpus, tuple)]
    if len(hosts) < 2:
        return
    with ThreadPoolExecutor(spec.ssh.parallel) as pool:
        found = zip(hosts, pool.map(options_of, hosts), strict=True)
        options = {host.name: one for host, one in found if one is not None}
    doubles = find_duplicate_hosts(options)
    if doubles:
        text = f"hosts: {' and '.join(f'`{name}`' for name in doubles[0])} are the same machine for ssh"
        address = f"both have the address {options[doubles[0][0]].address}; leave out one of them"
        raise ConfigError([Problem(spec.path, 0, 0, text, address)])


def _render_ranks(spec: ClusterSpec, console: Console) -> tuple[Any, list[str]]:
    one, two = (layout.assign_ranks_assuming_gpus(spec, gpus) for gpus in (1, 2))
    shown, rows = [], []
    for entry, other in zip(one, two, strict=True):
        node, number = entry.host.name, entry.node_rank
        ranks = entry.ranks if entry.ranks == other.ranks else None
        gpus = entry.gpus if entry.gpus == other.gpus else None
        shown.append({"node": node, "node_rank": number, "ranks": _to_list(ranks), "gpus": _to_list(gpus)})
        in_words = "counted at start" if ranks is None else fold_ranks(ranks)
        rows.append([node, str(number), in_words, "auto" if gpus is None else fold_ranks(gpus) or "-"])
    if layout.assign_ranks_from_file(spec) is None:
        error = _make_unknown_gpus_error(spec)
        console.write_stderr(str(error), f"hint: {error.hint}")
    columns = [Column(title=title) for title in ("NODE", "NODE RANK", "RANKS", "GPUS")]
    return shown, render_table(columns, rows, console.out)


def _to_list(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def _make_unknown_gpus_error(spec: ClusterSpec) -> RefusedError:
    silent = fold_hosts(h.name for h in spec.worker_hosts if layout.count_workers(h, None) is None)
    return RefusedError(
        f"each GPU of {silent} gets a rank, but the cluster file does not say how many GPUs there are",
        hint="write `gpus: N` or `workers: N`, or see `clusterctl health`",
    )


def _render_environment(loaded: LoadedClusterFile, rank: int, console: Console, *, live: bool) -> tuple[Any, list[str]]:
    spec = assign_roles(loaded.spec)
    if live:
        entries, sourced = _read_live_environment(spec, rank, console)
    else:
        known = layout.assign_ranks_from_file(spec)
        if known is None:
            raise _make_unknown_gpus_error(spec)
        entries, sourced = known, explain_environment(spec, known, _require_rank(rank, known), {}, None)
    entry = next(entry for entry in entries if rank in entry.ranks)
    host = [host.name for host in loaded.spec.hosts].index(entry.host.name)
    shown = {
        name: {"value": value, "source": _describe_source(loaded, name, source, host)}
        for name, (value, source) in sorted(sourced.items())
    }
    if spec.job is not None and spec.job.prologue is not None:
        console.write_stderr("`job.prologue` may change these variables on the node")
    rows = [(f"{name}={entry['value']}", entry["source"]) for name, entry in shown.items()]
    width = min(_MAX_PADDED_WIDTH, max(len(text) for text, _ in rows))
    return shown, [f"{pad(text, width)}  {source}" for text, source in rows]


def _require_rank(rank: int, entries: Sequence[NodeLayout]) -> int:
    """Return the rank if the job has this rank.

    Raises:
        NotFoundError: There is no such rank.
    """
    ranks = [rank for entry in entries for rank in entry.ranks]
    if rank not in ranks:
        names = ", ".join(map(str, ranks)) if len(ranks) < 9 else f"0-{max(ranks)}"
        raise NotFoundError(f"no rank {rank}", hint=f"there are: {names}")
    return rank


def _read_live_environment(
    spec: ClusterSpec, rank: int, console: Console
) -> tuple[tuple[NodeLayout, ...], dict[str, tuple[str, str]]]:
    with open_all_sessions(spec, spec.worker_hosts, progress=console.err) as sessions:
        answers = {host.name: build_node_facts(host, sessions[host.name].hello) for host in spec.worker_hosts}
        entries = layout.assign_ranks(spec.worker_hosts, {node: answer.gpus for node, answer in answers.items()})
        node = next(entry.host.name for entry in entries if _require_rank(rank, entries) in entry.ranks)
        given = explain_environment(spec, entries, rank, answers, resolve_rendezvous(spec, entries, answers, sessions))
        program: ProgramArguments = {"argv": ["env", "-0"]}
        with (
            RemoteCommand(program, _ENV_TIMEOUT_S, 1, None) as remote,
            WaitingLine([node], _ENV_TIMEOUT_S, None, stage="running") as waiting,
        ):
            remote.start_on(sessions[node])
            ends, lost = remote.wait_for_results([node], waiting)
        raise_first(lost)
    variables = ends[node].stdout.decode("utf-8", "replace").split("\0")
    of_login = {name: value for name, equals, value in (line.partition("=") for line in variables) if equals}
    for name in ("PWD", "OLDPWD", "_"):
        of_login.pop(name, None)
    hidden = {name: REDACTED if is_secret_name(name) else value for name, value in of_login.items()}
    return entries, {name: (value, f"login of {node}") for name, value in hidden.items()} | given


_KEYS_OF_ALL_HOSTS = ("network.interface", "job.framework")


def _describe_source(loaded: LoadedClusterFile, name: str, source: str, host: int) -> str:
    """Return the source of a variable as text: a word, or a key of the cluster file with its line."""
    if source in ("env", "secrets"):
        return loaded.origins.get(f"{source}.{name}", source)
    if source == "hosts[].env":
        return loaded.origins.get(f"hosts[{host}].env.{name}", source)
    key = f"hosts[{host}].gpus" if source == "gpus" else source
    place = loaded.origins.get(key, "default") if source in (*_KEYS_OF_ALL_HOSTS, "gpus") else "default"
    if place == "default":
        return "network" if source == "network.interface" else source
    return f"{source}, {place}"
