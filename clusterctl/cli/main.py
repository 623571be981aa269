"""The door: which command, in which module, and how errors leave."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from clusterctl.cli.front import GROUPS
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.render import streams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from click.shell_completion import CompletionItem

COMMANDS: dict[str, str] = {
    "up": "Start a run: check, sync, launch every rank, follow",
    "down": "Tear a run down and prove that nothing is left",
    "ps": "List runs",
    "status": "Show one run: nodes, workers, what failed first",
    "logs": "Show or follow the output of all ranks",
    "attach": "Follow a run; `d` or Ctrl-C leaves it running",
    "wait": "Wait until a run ends; exit with its code",
    "health": "Check GPUs, drivers, disks, clocks and network of all nodes",
    "why": "Say what went wrong with a run, and who",
    "diff": "Show what was different between two runs",
    "report": "Write a run as one page of HTML",
    "stacks": "Show where every rank is, equal stacks folded",
    "stats": "Show utilisation, memory, temperature and power",
    "top": "Keep ranks, GPUs and nodes on the screen",
    "exec": "Run a command on all nodes, equal output folded",
    "shell": "Open a terminal on a node, or with the environment of a rank",
    "port-forward": "Reach ports of a node from this machine",
    "cp": "Copy files to the nodes, or from them",
    "sync": "Push code to the nodes, or pull results home",
    "config": "Check and print the cluster file",
    "init": "Write a cluster file to start from",
    "export": "Print the cluster file for Slurm or Kubernetes",
    "templates": "List ready-to-run jobs",
    "trust": "Accept the host keys of the nodes",
    "clean": "Remove old runs from head and nodes",
    "schema": "Print the JSON Schema of the cluster file",
    "completion": "Print the completion script of a shell",
    "version": "Show versions",
}
"""Every command with its line of help, so that `--help` imports none of them."""

_VALUES = 200_000
"""How many more there may be before they are looked through."""
OTHER_NAMES = {"diagnose": "why"}
"""What people may type as well."""

ELSEWHERE = {
    "up": "run start launch submit train begin go sbatch srun torchrun mpirun resume plan",
    "down": "stop kill cancel end abort terminate halt delete scancel shutdown destroy quit",
    "ps": "list ls runs jobs squeue qstat sacct history",
    "status": "info show describe inspect state detail details get",
    "logs": "tail log output cat stdout stderr print",
    "attach": "follow reattach adopt join",
    "shell": "ssh login connect bash sh terminal enter console",
    "exec": "pdsh clush do each parallel",
    "cp": "copy scp upload download put fetch",
    "sync": "rsync push pull deploy",
    "clean": "rm remove prune purge gc cleanup",
    "health": "check test doctor verify probe nodes hosts sinfo",
    "config": "validate lint env ranks settings view",
    "init": "new create setup generate add",
    "stats": "gpus gpu nvidia-smi usage utilisation utilization",
    "top": "monitor watch htop nvtop dashboard",
    "port-forward": "forward tunnel proxy ports tensorboard jupyter",
    "why": "debug explain reason error errors",
    "stacks": "trace traceback py-spy pystack",
    "diff": "compare",
    "templates": "examples example template",
    "trust": "accept keys known-hosts",
    "report": "html page",
}
"""Our commands, and the words by which other programs, and people, call what they do."""


class LazyGroup(click.Group):
    """A group that imports a command when it is run."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people meet them."""
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command."""
        cmd_name = OTHER_NAMES.get(cmd_name, cmd_name)
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"clusterctl.cli.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Offer the commands without importing them."""
        from click.shell_completion import CompletionItem

        if incomplete.startswith("-"):
            return click.Command.shell_complete(self, ctx, incomplete)
        names = [name for name in self.list_commands(ctx) if name.startswith(incomplete)]
        return [CompletionItem(name, help=COMMANDS[name]) for name in names]

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Our standard streams break no pipe (`render.streams`). A broken pipe is thus a bug of ours, and so is
        the unexpected end of a file: click would end with 1 or 130 for them, and without a word.
        """
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError(f"nobody was expected to end what broke here: {error!r}") from error

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        known = self.list_commands(ctx)
        column = max(map(len, known))
        for group, names in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(name.ljust(column), COMMANDS[name]) for name in names if name in known])

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or suggest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            meant = _meant(args[0], self.list_commands(ctx))
            if args[0].startswith("-") or meant is None:
                raise
            raise click.UsageError(f"No such command `{args[0]}`. Did you mean `{meant}`?", ctx) from error


def _meant(word: str, commands: Sequence[str]) -> str | None:
    """Return what to type behind `clusterctl` in place of a word that is no command."""
    from clusterctl.suggestion import similar

    if os.path.isfile(word):
        return f"up --script {word}" if word.endswith(".py") else f"up {word}"
    named = {other: ours for ours, others in ELSEWHERE.items() for other in others.split()}
    lower = word.lower()
    close = similar(lower, [*commands, *named], 0.7) or similar(lower, commands)
    return None if close is None else named.get(close, close)


def _show_usage(error: click.UsageError) -> None:
    """Write a mistake on the command line as every other error is written."""
    import re

    program = error.ctx.command_path if error.ctx is not None else "clusterctl"
    text, hint = error.format_message(), f"see `{program} --help`"
    if (word := _meant_for_the_job(error)) is not None:
        text, hint = error.message, f"arguments of the job come after `--`, as in `{program} -- {word}`"
    _say_error(re.sub(r"'([^'\s]+)'", r"`\1`", " ".join(text.split())).removesuffix("."), hint)


def _meant_for_the_job(error: click.UsageError) -> str | None:
    """Return the first word that belongs behind `--`, where somebody gave the job's arguments without it.

    What is nearly an option of ours is a slip.
    """
    import difflib

    context = error.ctx
    if context is None or not isinstance(context.command, WithJobArguments) or context.meta.get("clusterctl.dashes"):
        return None
    if isinstance(error, click.NoSuchOption):
        ours = [name for parameter in context.command.params for name in parameter.opts]
        return None if difflib.get_close_matches(error.option_name, ours, cutoff=0.75) else error.option_name
    _, _, words = error.message.partition("unexpected extra argument")
    return next(iter(words.partition("(")[2].rstrip(")").split()), None)


def _say_error(text: str, hint: str | None = None) -> None:
    from clusterctl.render.console import Console
    from clusterctl.render.errors import error_line, hint_lines

    terminal = Console.standard().err
    terminal.prose([error_line(text, terminal), *hint_lines(hint, terminal)])


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from clusterctl._version import __version__

        click.echo(f"clusterctl {__version__}")
        ctx.exit()


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    "-V",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Print the version.",
)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Multi-node training over SSH: start every rank, collect every log, find the bad machine, leave nothing behind.

    \b
    clusterctl up cluster.yaml        start a run and follow it
    clusterctl health cluster.yaml    check every machine
    clusterctl down                   end it, and prove that nothing is left
    """
    if ctx.invoked_subcommand is None:
        from clusterctl.cli import front

        front.show()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    # To look through all values for circles, each time that there are some hundreds more, is a tenth of what it takes
    # to show a large run; there are next to none.
    gc.set_threshold(_VALUES)
    streams.install()
    code = run(arguments)
    _flush()
    # Threads of a library must not hold up the end of a command that is through.
    os._exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    try:
        result = cli.main(
            args=arguments, prog_name=_program(), complete_var="_CLUSTERCTL_COMPLETE", standalone_mode=False
        )
    except ClusterctlError as error:
        from clusterctl.render.errors import print_error

        print_error(error)
        return int(error.exit_code)
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        _flush()
        _show_usage(error)
        return int(ExitCode.USAGE)
    except click.ClickException as error:
        _say_error(error.format_message())
        return int(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        return int(ExitCode.INTERRUPTED)
    except SystemExit as stop:
        return _completed(known=not stop.code)
    except Exception:
        return _bug()
    return result if isinstance(result, int) else 0


def _completed(*, known: bool) -> int:
    """Return the exit code of a request for completion; say of an unknown request that it is, for click does not."""
    if known:
        return int(ExitCode.OK)
    click.echo("error: `_CLUSTERCTL_COMPLETE` asks for nothing that completion knows", err=True)
    click.echo("hint: `clusterctl completion bash` prints what sets it; `unset _CLUSTERCTL_COMPLETE`", err=True)
    return int(ExitCode.USAGE)


def _program() -> str:
    name = os.path.basename(sys.argv[0])
    return name if name in ("clusterctl", "cctl") else "clusterctl"


def _bug() -> int:
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

        Console.standard().narrate(*traceback.format_exc().splitlines())
        return int(ExitCode.BUG)
    last = traceback.format_exc().strip().splitlines()[-1]
    _say_error(f"this is a bug of clusterctl: {last}", f"the traceback is in {path}")
    return int(ExitCode.BUG)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ClusterctlError, OSError, ValueError):
            stream.flush()


def parameters_after_dashes(arguments: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split at the first `--`: ours before it, the job's after it."""
    if "--" not in arguments:
        return arguments, ()
    at = arguments.index("--")
    return arguments[:at], tuple(arguments[at + 1 :])


class WithExamples(click.Command):
    """A command whose help ends with what to type."""

    @override
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, as they are typed."""
        from clusterctl.cli.examples import EXAMPLES

        lines = EXAMPLES.get(self.name or "", ())
        if lines:
            formatter.write_paragraph()
            formatter.write("Examples:\n" + "".join(f"  {line}\n" for line in lines))


class WithJobArguments(WithExamples):
    """A command that takes everything after `--` as it is, in `ctx.meta["clusterctl.args"]`."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the job's arguments off before click looks at them."""
        own, rest = parameters_after_dashes(args)
        ctx.meta["clusterctl.args"] = rest
        ctx.meta["clusterctl.dashes"] = len(own) < len(args)
        return super().parse_args(ctx, own)

    @override
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show that there may be more."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]


__all__ = ["COMMANDS", "WithExamples", "WithJobArguments", "cli", "main", "run"]
