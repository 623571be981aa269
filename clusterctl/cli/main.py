"""The entry point of clusterctl: finds and runs the command, and turns errors into messages and exit codes.

`clusterctl --help` may take at most 1.5 times as long as `import click`. To save time, functions import the modules
that the help does not need.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

import click

from clusterctl._version import __version__
from clusterctl.cli.base_command import COMMON_OPTIONS, PassthroughCommand, override
from clusterctl.cli.command_table import ALIASES, COMMANDS, GROUPS
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.render import standard_streams
from clusterctl.suggestion import find_similar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

_GC_THRESHOLD = 200_000
"""The number of new objects after which the garbage collector runs."""


class LazyCommandGroup(click.Group):
    """A group of commands that imports the module of a command when the command runs."""

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.params += COMMON_OPTIONS

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order of the help."""
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        cmd_name = ALIASES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"clusterctl.cli.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Return the names of matching commands without importing the commands."""
        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        from click.shell_completion import CompletionItem

        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name].summary) for name in names]

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        The standard streams ignore broken pipes (`render.standard_streams`), so a broken pipe or the end of a file here
        is a bug. Without this method click would exit with code 1 or 130 and print no message.
        """
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError(f"unexpected broken pipe or end of file: {error!r}") from error

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        column = max(map(len, COMMANDS))
        for group, commands in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(column), info.summary) for name, info in commands.items()])

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest a similar command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = _find_similar_command(args[0])
            if args[0].startswith("-") or meant is None:
                raise
            raise click.UsageError(f"No such command `{args[0]}`. Did you mean `{meant}`?", ctx) from error


def _find_similar_command(word: str) -> str | None:
    """Return the command that the user probably meant by an unknown word, or `None`."""
    if os.path.isfile(word):
        return f"up --script {word}" if word.endswith(".py") else f"up {word}"
    synonyms = {synonym: name for name, info in COMMANDS.items() for synonym in info.synonyms.split()}
    lower = word.lower()
    close = find_similar(lower, [*COMMANDS, *synonyms], 0.7) or find_similar(lower, COMMANDS)
    return None if close is None else synonyms.get(close, close)


def _print_usage_error(error: click.UsageError) -> None:
    """Print a usage error in the format of all other errors."""
    program = error.ctx.command_path if error.ctx is not None else "clusterctl"
    text, hint = error.format_message(), f"see `{program} --help`"
    if (word := _find_argument_before_dashes(error)) is not None:
        text, hint = error.message, f"arguments of the job come after `--`, as in `{program} -- {word}`"
    _print_error(re.sub(r"'([^'\s]+)'", r"`\1`", " ".join(text.split())).removesuffix("."), hint)


def _find_argument_before_dashes(error: click.UsageError) -> str | None:
    """Return the first argument before which the user probably forgot `--`; `None` if there is no such argument."""
    context = error.ctx
    if context is None or not isinstance(context.command, PassthroughCommand) or context.meta.get("clusterctl.dashes"):
        return None
    if isinstance(error, click.NoSuchOption):
        ours = [name for parameter in context.command.params for name in parameter.opts]
        return error.option_name if find_similar(error.option_name, ours, 0.75) is None else None
    _, _, words = error.message.partition("unexpected extra argument")
    return next(iter(words.partition("(")[2].rstrip(")").split()), None)


def _print_error(text: str, hint: str | None = None) -> None:
    from clusterctl.render.console import Console
    from clusterctl.render.error_messages import error_line, hint_lines

    terminal = Console.for_standard_streams().err
    terminal.write_wrapped([error_line(text, terminal), *hint_lines(hint, terminal)])


@click.group(
    cls=LazyCommandGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, "--version", "-V", message="clusterctl %(version)s", help="Print the version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Run multi-node training over SSH: start every rank, collect all output, find the bad node, leave no process.

    \b
    clusterctl up cluster.yaml        start a run and follow it
    clusterctl health cluster.yaml    check every node
    clusterctl down                   stop it, and verify that no process is left
    """
    if ctx.invoked_subcommand is None:
        from clusterctl.cli import overview

        overview.print_overview()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # In a large run, garbage collection would take a tenth of the time and free almost no memory.
    gc.set_threshold(_GC_THRESHOLD)
    standard_streams.replace_standard_streams()
    code = run(arguments)
    _flush_streams()
    # End the process without waiting for threads of libraries.
    os._exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    try:
        result = cli.main(
            args=arguments, prog_name=_get_program_name(), complete_var="_CLUSTERCTL_COMPLETE", standalone_mode=False
        )
    except ClusterctlError as error:
        from clusterctl.render.error_messages import print_error

        print_error(error)
        return int(error.exit_code)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        _flush_streams()
        _print_usage_error(error)
        return int(ExitCode.USAGE)
    except click.ClickException as error:
        _print_error(error.format_message())
        return int(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    except SystemExit as stop:
        return _get_completion_exit_code(is_known=not stop.code)
    except Exception:
        return _report_bug()
    return result if isinstance(result, int) else 0


def _get_completion_exit_code(*, is_known: bool) -> int:
    """Return the exit code of a request for shell completion; print an error if click does not know the request."""
    if is_known:
        return int(ExitCode.OK)
    click.echo("error: `_CLUSTERCTL_COMPLETE` has an unknown value", err=True)
    click.echo(
        "hint: run `unset _CLUSTERCTL_COMPLETE`; `clusterctl completion bash` prints the correct set-up", err=True
    )
    return int(ExitCode.USAGE)


def _get_program_name() -> str:
    name = os.path.basename(sys.argv[0])
    return name if name in ("clusterctl", "cctl") else "clusterctl"


def _report_bug() -> int:
    import traceback

    from clusterctl.run.record.disk_files import make_private_folder
    from clusterctl.run.record.rundir import find_runs_root

    path = find_runs_root().parent / "bug.log"
    try:
        make_private_folder(path.parent)
        with open(path, "a", opener=lambda name, flags: os.open(name, flags, 0o600)) as log:
            os.fchmod(log.fileno(), 0o600)
            traceback.print_exc(file=log)
    except OSError:
        from clusterctl.render.console import Console

        Console.for_standard_streams().write_stderr(*traceback.format_exc().splitlines())
        return int(ExitCode.BUG)
    last = traceback.format_exc().strip().splitlines()[-1]
    _print_error(f"this is a bug of clusterctl: {last}", f"the traceback is in {path}")
    return int(ExitCode.BUG)


def _flush_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ClusterctlError, OSError, ValueError):
            stream.flush()
