"""`clusterctl schema`."""

from __future__ import annotations

import click

from clusterctl.cli.command import CliCommand, CommonOptions
from clusterctl.cli.words import write


@click.command("schema", cls=CliCommand)
@click.option("--output", "-o", metavar="FILE", help="Write it to this file instead.")
@click.pass_obj
def command(common: CommonOptions, output: str | None) -> int:
    """Print the JSON Schema of the cluster file, which lets editors complete and check it."""
    from clusterctl.config.schema import render_schema

    console = common.console()
    if output is None:
        console.document(render_schema())
        return 0
    write(output, render_schema())
    if not common.quiet:
        console.narrate(
            f"wrote {output}", f"editors find it by the first line `# yaml-language-server: $schema={output}`"
        )
    return 0
