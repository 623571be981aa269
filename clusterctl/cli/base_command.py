"""Base classes of all commands. The classes handle common options, examples in the help, and arguments after `--`.

`clusterctl --help` imports this module, so slow imports are inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from clusterctl.cli.command_table import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem
    from typing_extensions import override as override  # noqa: PLC0414 - `main` imports it from here

    from clusterctl.render.console import Console
else:
    # Importing `typing_extensions` would take a tenth of the time of `clusterctl --help`.
    def override(method: Any) -> Any:
        """Return the method unchanged."""
        return method


class CommonOptions:
    """The options that every command accepts, before or after the command's name.

    Attributes:
        color: When to print colours: `auto`, `always` or `never`.
        quiet: Whether to print only the result.
        files: The cluster files of `--file`. A later file overrides an earlier file.
        sets: The values of `--set`, each `KEY=VALUE`.
        passthrough_arguments: The arguments after `--`.
    """

    def __init__(self) -> None:
        self.color = "auto"
        self.quiet = False
        self.files: tuple[str, ...] = ()
        self.sets: tuple[str, ...] = ()
        self.passthrough_arguments: tuple[str, ...] = ()

    def console(self) -> Console:
        """Return the console of this process."""
        from clusterctl.render.console import ColorChoice, Console

        return Console.for_standard_streams(color=ColorChoice(self.color))


def make_completer(candidate_type: str) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem[str]]]:
    """Return a function for click's `shell_complete`; `completion_candidates` defines the candidate types."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
        from clusterctl.cli.completion_candidates import list_completions

        return list_completions(candidate_type, context, parameter, incomplete)

    return complete


def _store_common_option(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    common = context.ensure_object(CommonOptions)
    if parameter.name == "color" and value:
        common.color = value
    elif parameter.name == "quiet" and value:
        common.quiet = True
    elif parameter.name == "files":
        common.files += value
    elif parameter.name == "sets":
        common.sets += value


class _CommonOption(click.Option):
    """An option of every command. `clusterctl --help` describes the option; the help of a command omits it."""

    def __init__(self, *names: str, **attributes: Any) -> None:
        super().__init__(names, expose_value=False, callback=_store_common_option, **attributes)

    @override
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the names and the help text of the option; `None` in the help of a command."""
        return super().get_help_record(ctx) if ctx.parent is None else None


_OUTPUT_OPTIONS = (
    _CommonOption("--color", type=click.Choice(["auto", "always", "never"]), help="Use colours; auto by default."),
    _CommonOption("--quiet", "-q", is_flag=True, help="Print only the result, without hints and progress."),
)
_FILE_OPTIONS = (
    _CommonOption(
        "--file",
        "files",
        metavar="FILE",
        multiple=True,
        help="Use this cluster file; several are merged, and later ones win.",
        shell_complete=make_completer("files"),
    ),
    _CommonOption(
        "--set",
        "sets",
        metavar="KEY=VALUE",
        multiple=True,
        help="Set a key of the cluster file, e.g. job.grace=30s.",
        shell_complete=make_completer("keys"),
    ),
)
COMMON_OPTIONS = (*_OUTPUT_OPTIONS, *_FILE_OPTIONS)


class CliCommand(click.Command):
    """A command that has the common options, and examples at the end of its help.

    Attributes:
        reads_file: Whether the command reads a cluster file, and so accepts `--file` and `--set`.
    """

    def __init__(self, *arguments: Any, reads_file: bool = False, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.reads_file = reads_file
        self.params += COMMON_OPTIONS if reads_file else _OUTPUT_OPTIONS

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run the command, or raise a usage error if a common option would have no effect."""
        common = ctx.ensure_object(CommonOptions)
        if common.quiet and ctx.params.get("verbose"):
            raise click.UsageError("`--quiet` and `--verbose` cannot be used together")
        if not self.reads_file and (common.files or common.sets):
            raise click.UsageError(f"`{self.name}` reads no cluster file: leave out `--file` and `--set`")
        return super().invoke(ctx)

    @override
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options of the command, then the names of the common options."""
        super().format_options(ctx, formatter)
        names = "--color, --quiet, --file and --set" if self.reads_file else "--color and --quiet"
        formatter.write_paragraph()
        formatter.write(f"`clusterctl --help` describes {names}.\n")

    @override
    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples of the command."""
        if self.name and self.name in COMMANDS:
            formatter.write_paragraph()
            formatter.write("Examples:\n" + "".join(f"  {line}\n" for line in COMMANDS[self.name].examples))


class PassthroughCommand(CliCommand):
    """A command that does not parse the arguments after `--`."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Store the arguments after `--`, and let click parse the other arguments."""
        own = args[: args.index("--")] if "--" in args else args
        ctx.ensure_object(CommonOptions).passthrough_arguments = tuple(args[len(own) + 1 :])
        ctx.meta["clusterctl.dashes"] = len(own) < len(args)
        return super().parse_args(ctx, own)

    @override
    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Add `[-- ARGS...]` to the usage line."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGS...]"]
