"""`clusterctl exec`."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from clusterctl.agent.protocol.command_payload_types import ProgramArguments
from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CommonOptions, PassthroughCommand
from clusterctl.cli.node_command_runs import OutputClosedError, RemoteCommand, read_piped_input
from clusterctl.cli.node_sessions import build_ad_hoc_spec, open_reachable_sessions
from clusterctl.cli.option_values import parse_duration_option
from clusterctl.config.spec import ClusterSpec
from clusterctl.errors import ExitCode, NodeError, NodesError
from clusterctl.plan.launch import build_program_arguments
from clusterctl.render.error_messages import render_error
from clusterctl.render.exec_output import compute_exit_code, describe_exits, diff_stdout, fold_stderr, fold_stdout
from clusterctl.render.start_progress import WaitingLine

if TYPE_CHECKING:
    from clusterctl.render.console import Console
    from clusterctl.render.exec_output import CommandResult


_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish", "python", "python3", "perl", "awk", "find", "grep", "sed")
"""Programs whose arguments may contain signs such as `*` and `;`, because the programs interpret these signs."""
_BUILTINS = ("cd", "export", "source", ".", "alias", "ulimit", "module", "umask", "type")
_EARLY_OUTPUT_AFTER_S = 1.0
"""Seconds without a new answer of a node, after which the answers so far are shown."""


@click.command("exec", cls=PassthroughCommand, reads_file=True)
@options.cluster_file_argument
@click.option(
    "-w",
    "hosts_without_file",
    metavar="NODES",
    multiple=True,
    callback=options.join_repeated_option,
    help="Run on these hosts, without a cluster file.",
)
@options.nodes_option
@options.exclude_option("Leave out these nodes.")
@click.option("--timeout", metavar="DURATION", help="Stop the command after this time, e.g. 30s.")
@click.option(
    "--parallel", type=click.IntRange(1), metavar="N", help="Run on at most N nodes at once; on all by default."
)
@click.option("--shell", is_flag=True, help="Run the words with `bash -c`.")
@click.option(
    "--in-job",
    "--env",
    "in_job",
    is_flag=True,
    help="Run in the code folder, with the environment and prologue of the job.",
)
@click.option("--diff", is_flag=True, help="Show how outputs differ from the most common one.")
@click.option("--stream", is_flag=True, help="Show each line at once, with its node.")
@options.json_option
@options.verbose_option("Show the exit code of every node, even if it is 0.")
@click.pass_obj
def command(
    common: CommonOptions,
    *,
    path: str | None,
    hosts_without_file: str | None,
    nodes: str | None,
    exclude: str | None,
    timeout: str | None,
    parallel: int | None,
    shell: bool,
    in_job: bool,
    diff: bool,
    stream: bool,
    as_json: bool,
    verbose: bool,
) -> int:
    """Run a command on all nodes at once, in the home folder (or `--in-job`); equal output is shown once.

    No shell interprets the words after `--`. Each node gets a copy of standard input (at most 2 MiB). Ctrl-C
    stops the command on all nodes. `exec` exits with the largest exit code of the nodes, or with 4 if a node cannot be
    reached.

    On a terminal, the first outputs appear after a second without a new answer; later outputs follow.
    """
    words = common.passthrough_arguments
    if not words:
        raise click.UsageError("no command: write it after `--`, as in `clusterctl exec -- nvidia-smi -L`")
    if diff + stream + as_json > 1:
        raise click.UsageError("only one of `--diff`, `--stream` and `--json` can be used")
    options.refuse_combination(("--json", as_json), ("--verbose", verbose))
    seconds = parse_duration_option(timeout, "--timeout")
    console = common.console()
    spec = _load_spec(common, console, path, hosts_without_file, in_job=in_job)
    hosts = cluster_selection.select_spec_hosts(spec, nodes, exclude)
    program: ProgramArguments = {"command": " ".join(words)} if shell else {"argv": list(words)}
    if given := read_piped_input(0, console.write_stderr):
        program["stdin"] = given.decode("utf-8", "surrogateescape")
    base_programs = {host.name: build_program_arguments(spec, host.name) for host in hosts} if in_job else {}
    remote = RemoteCommand(program, seconds, parallel or len(hosts), console if stream else None, base_programs)
    # A line with the awaited nodes would mix with the output lines that `--stream` shows at once.
    tell = None if common.quiet or stream else console.err
    early_output = _EarlyOutput([host.name for host in hosts], remote, console, is_enabled=not (diff or as_json))

    def show(answers: Mapping[str, CommandResult], errors: Mapping[str, NodeError]) -> None:
        if diff:
            console.write_stdout(*diff_stdout(answers, console.out))
            console.write_stderr(*fold_stderr(answers, console.err))
        elif not stream:
            _print_output({node: answer for node, answer in answers.items() if node not in early_output.shown}, console)
        if not common.quiet:
            console.write_stderr(*describe_exits(answers, include_success=verbose))
        if errors:
            console.write_stderr(*render_error(NodesError(list(errors.values())), console.err))

    try:
        with (
            remote,
            open_reachable_sessions(
                spec, hosts, remote.start_on, progress=tell, on_update=early_output.show_new_answers
            ) as (sessions, unreached),
            WaitingLine(sessions, 0.0, tell, stage="running", meanwhile=early_output.show_new_answers) as waiting,
        ):
            try:
                answers, lost = remote.wait_for_results(sessions, waiting)
            except KeyboardInterrupt:
                if not as_json:
                    waiting.stop()
                    show(remote.collect_finished_results(), {})
                raise
    except OutputClosedError:
        return int(ExitCode.OK)
    errors = unreached | lost
    if as_json:
        console.write_stdout_json(
            [_result_to_json(host.name, answers.get(host.name), errors.get(host.name)) for host in hosts]
        )
    else:
        show(answers, errors)
    if not shell and any(map(compute_exit_code, answers.values())) and needs_shell(words):
        console.write_stderr("hint: no shell interprets these words; with `--shell`, bash interprets them")
    return int(ExitCode.NODE) if errors else max(map(compute_exit_code, answers.values()), default=0)


def _load_spec(
    common: CommonOptions, console: Console, path: str | None, hosts_without_file: str | None, *, in_job: bool
) -> ClusterSpec:
    if hosts_without_file is None:
        return cluster_selection.load_chosen_cluster_file(common, path, with_secrets=in_job, console=console).spec
    options.refuse_options_with(
        "-w", ("--in-job", in_job), ("FILE", path), ("--file", common.files), ("--set", common.sets)
    )
    return build_ad_hoc_spec(hosts_without_file)


def needs_shell(words: Sequence[str]) -> bool:
    """Return whether the words contain shell syntax, although their program is not a shell."""
    program, rest = words[0], words[1:]
    if os.path.basename(program) in _SHELLS:
        return False
    operators = {"|", "||", "&", "&&", ";", "<", ">", ">>", "2>&1"}
    return bool(
        re.search(r"[\s;|&<>$*?`=]", program)
        or program in _BUILTINS
        or operators.intersection(rest)
        or any(re.search(r"[*?]|^~|^\$", word) for word in rest)
    )


def _result_to_json(node: str, answer: CommandResult | None, error: NodeError | None) -> dict[str, Any]:
    def text(data: bytes) -> str:
        return data.decode("utf-8", "replace")

    return {
        "node": node,
        "exit_code": answer.exit_code if answer else None,
        "signal": answer.signal if answer else None,
        "stdout": text(answer.stdout) if answer else "",
        "stderr": text(answer.stderr) if answer else "",
        "error": str(error) if error else answer.error if answer else None,
    }


class _EarlyOutput:
    """Shows the answers so far on a terminal, after a second without new answers.

    In a pipe, all output is folded at the end.

    Attributes:
        shown: Nodes whose answers were shown.
    """

    def __init__(self, nodes: list[str], remote: RemoteCommand, console: Console, *, is_enabled: bool) -> None:
        self.shown: set[str] = set()
        self._nodes, self._remote, self._console = nodes, remote, console
        self._is_enabled = is_enabled and console.out.live and console.err.live

    def show_new_answers(self) -> None:
        """Show the new answers after a second of silence."""
        if not self._is_enabled or time.monotonic() - self._remote.last_answer_at < _EARLY_OUTPUT_AFTER_S:
            return
        answers = self._remote.collect_finished_results()
        fresh = {node: answers[node] for node in self._nodes if node in answers and node not in self.shown}
        self.shown.update(fresh)
        _print_output(fresh, self._console)


def _print_output(answers: Mapping[str, CommandResult], console: Console) -> None:
    console.write_stdout(*fold_stdout(answers, console.out))
    console.write_stderr(*fold_stderr(answers, console.err))
