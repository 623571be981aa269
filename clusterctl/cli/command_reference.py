"""Generates the reference page of all commands: `python -m clusterctl.cli.command_reference docs/cli.md`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from clusterctl.cli.base_command import COMMON_OPTIONS
from clusterctl.cli.command_table import COMMANDS
from clusterctl.cli.main import cli

_INTRO = """\
# Commands

<!-- Made by `python -m clusterctl.cli.command_reference docs/cli.md`; do not edit. -->

`clusterctl` and `cctl` are the same program. FILE is a cluster file ([cluster-file.md](cluster-file.md)),
by default `./cluster.yaml`. RUN is the id of a run or its beginning, its name, or its cluster file.
Without RUN, `status`, `logs`, `why`, `report` and `plot` use the newest run of the current folder; all other commands
use the only active run, or else the newest run (`down`: what remains of ended runs), and exit with 6 if several are
active. SET is a set of nodes (`gpu[01-04,07]`) or of ranks (`0-3,7`). Examples of a DURATION: `90` (seconds), `90s`,
`10m`, `1h30m`.

Commands print results to stdout, and messages to stderr. Colours and progress lines are printed only on a terminal.
`NO_COLOR`, `FORCE_COLOR` and `TERM=dumb` change this, and `--color` overrides them. Lines in a pipe are never
shortened. If the encoding of the output is not UTF-8, or with `LC_ALL=C`, all signs are ASCII.

Every command takes `--color` and `--quiet`. Every command that reads a cluster file takes `--file` and `--set`. These
options may also precede the name of the command.

| option | |
|---|---|
"""


def render_command_reference() -> str:
    """Return the text of `docs/cli.md`."""
    context = click.Context(cli, info_name="clusterctl")
    names = cli.list_commands(context)
    rows = [f"| [`{name}`](#clusterctl-{name}) | {COMMANDS[name].summary} |" for name in names]
    common = [_render_option(option, context) for option in COMMON_OPTIONS]
    parts = [_INTRO, "\n".join(common), "\n\n| command | |\n|---|---|\n", "\n".join(rows), "\n"]
    for name in names:
        command = cli.get_command(context, name)
        assert command is not None, "every listed command exists"
        parts += ["\n", "\n".join(_render_command(name, command, context)), "\n"]
    return "".join(parts)


def _render_command(name: str, command: click.Command, parent: click.Context) -> list[str]:
    context = click.Context(command, info_name=name, parent=parent)
    usage = " ".join(["clusterctl", name, *command.collect_usage_pieces(context)])
    options = [p for p in command.params if isinstance(p, click.Option) and p.get_help_record(context)]
    lines = [f"## clusterctl {name}", "", "```", usage, "```", "", *_render_help(command.help or "")]
    if options:
        lines += ["", "| option | |", "|---|---|", *(_render_option(option, context) for option in options)]
    lines += ["", "```console", *COMMANDS[name].examples, "```"]
    return lines


def _render_help(text: str) -> Iterator[str]:
    """Yield each paragraph of a help text as one line. A paragraph after `\\b` is code, and keeps its lines."""
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        if number:
            yield ""
        first, *rest = paragraph.splitlines()
        if first.strip() == "\b":
            yield from ("```console", *rest, "```")
        else:
            yield " ".join([first, *rest])


def _render_option(option: click.Option, context: click.Context) -> str:
    words, description = option.get_help_record(context) or ("", "")
    # The page omits the lower limit of counts, because the limit is always 0.
    words, description = words.replace("INTEGER RANGE", "N"), " ".join(description.replace("[x>=0]", "").split())
    cells = [f"`{words}`".replace("|", "\\|"), description.replace("|", "\\|")]
    return f"| {cells[0]} | {cells[1]} |"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_command_reference(), encoding="utf-8")
