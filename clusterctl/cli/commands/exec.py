"""`clusterctl exec`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli import options
from clusterctl.cli.main import WithJobArguments
from clusterctl.errors import ExitCode

if TYPE_CHECKING:
    from clusterctl.errors import NodeError
    from clusterctl.render.exec import Answer
    from clusterctl.render.terminal.console import Console


@click.command("exec", cls=WithJobArguments)
@options.cluster_file
@options.nodes_option
@click.option("--exclude", metavar="SET", help="Not on these nodes.", shell_complete=options.offer("nodes"))
@click.option("--timeout", metavar="DURATION", help="End what takes longer, e.g. 30s.")
@click.option("--parallel", type=click.IntRange(1), metavar="N", help="On at most N nodes at once; all by default.")
@click.option("--shell", is_flag=True, help="Give the words to one `bash -c`.")
@click.option("--diff", is_flag=True, help="Show how other outputs differ from the one of most nodes.")
@click.option("--stream", is_flag=True, help="Show lines as they come, not folded.")
@options.json_option
@options.verbose_option("Say the exit code of every node, also where it is 0.")
@options.output_options
@click.pass_context
def command(
    context: click.Context,
    path: str | None,
    files: tuple[str, ...],
    sets: tuple[str, ...],
    nodes: str | None,
    exclude: str | None,
    timeout: str | None,
    parallel: int | None,
    shell: bool,
    diff: bool,
    stream: bool,
    as_json: bool,
    verbose: bool,
    color: str,
    quiet: bool,
) -> int:
    """Run a command on all nodes at once, in the user's home; equal output is shown once.

    What stands after `--` is executed as it is, without a shell. Ctrl-C ends it everywhere. Exits with the largest
    exit code of the nodes, or with 4 if any node could not be reached.
    """
    from clusterctl.cli.lookup.reach import reachable
    from clusterctl.cli.lookup.remote import Remote, UnreadError
    from clusterctl.cli.words import parse_duration
    from clusterctl.render.exec import exit_code_of

    argv = context.meta["clusterctl.args"]
    if not argv:
        raise click.UsageError("no command: write it after `--`, as in `clusterctl exec -- nvidia-smi -L`")
    if diff + stream + as_json > 1:
        raise click.UsageError("only one of `--diff`, `--stream` and `--json` can be used")
    seconds = parse_duration(timeout, "--timeout")
    console = options.console_of(color)
    spec = options.load_file(path, files, sets, console=console).spec
    hosts = options.chosen_hosts(spec, nodes, exclude)
    request: dict[str, Any] = {"command": " ".join(argv)} if shell else {"argv": list(argv)}
    remote = Remote(request, seconds, parallel or len(hosts), console if stream else None)
    try:
        with reachable(spec, hosts, remote.begin) as (sessions, errors):
            answers, lost = remote.ends(sessions)
    except UnreadError:
        return int(ExitCode.OK)
    errors = errors | lost
    if as_json:
        order = [h.name for h in hosts]
        console.json([_entry(n, answers.get(n), errors.get(n)) for n in order])
    else:
        _show(answers, errors, console, diff=diff, stream=stream, verbose=verbose, quiet=quiet)
    return int(ExitCode.NODE) if errors else max(map(exit_code_of, answers.values()), default=0)


def _entry(node: str, answer: Answer | None, error: NodeError | None) -> dict[str, Any]:
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


def _show(
    answers: dict[str, Answer],
    errors: dict[str, NodeError],
    console: Console,
    *,
    diff: bool,
    stream: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    from clusterctl.errors import NodesError
    from clusterctl.render.errors import render_error
    from clusterctl.render.exec import diff_lines, end_lines, folded_errors, folded_output

    if not stream:
        console.data(*(diff_lines if diff else folded_output)(answers, console.out))
        console.narrate(*folded_errors(answers, console.err))
    if not quiet:
        console.narrate(*end_lines(answers, every=verbose))
    if errors:
        console.narrate(*render_error(NodesError(list(errors.values())), console.err))
