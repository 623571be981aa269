"""`clusterctl templates`."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.command import CliCommand, CommonOptions
from clusterctl.cli.lookup.templates import templates

if TYPE_CHECKING:
    from clusterctl.cli.lookup.templates import Template


@click.command("templates", cls=CliCommand)
@options.json_option
@click.pass_obj
def command(common: CommonOptions, as_json: bool) -> int:
    """List ready-to-run jobs; `clusterctl init --template NAME` copies one. With `-q` only their names."""
    options.refuse_together(("--json", as_json), ("--quiet", common.quiet))
    console = common.console()
    jobs = templates()
    if as_json:
        console.json([{"name": t.name, "summary": t.summary, "path": str(t.path)} for t in jobs])
    elif common.quiet:
        console.data(*[t.name for t in jobs])
    elif jobs:
        console.data(*_listing(jobs, console.out.width))
        if console.err.live:
            console.narrate("", "`clusterctl init --template NAME` copies one into this folder")
    else:
        console.narrate("this installation holds no templates")
    return 0


def _listing(jobs: list[Template], width: int | None) -> list[str]:
    """Return a line a template; on a terminal a summary that does not fit goes on below itself."""
    first = max(len(t.name) for t in jobs) + 2
    if width is None or width < first + 30:
        return [f"{t.name:{first}}{t.summary}" for t in jobs]
    indent = " " * first
    return [
        line
        for t in jobs
        for line in textwrap.wrap(
            t.summary, width - 1, initial_indent=f"{t.name:{first}}", subsequent_indent=indent, break_on_hyphens=False
        )
    ]
