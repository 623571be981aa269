"""`clusterctl schema`."""

from __future__ import annotations

import click

from clusterctl.cli import options
from clusterctl.cli.main import WithExamples
from clusterctl.cli.words import write


@click.command("schema", cls=WithExamples)
@click.option("--output", "-o", metavar="FILE", help="Write it to this file instead.")
@options.output_options
def command(output: str | None, color: str, quiet: bool) -> int:
    """Print the JSON Schema of the cluster file, which lets editors complete and check it."""
    from clusterctl.config.schema import render_schema

    console = options.console_of(color)
    if output is None:
        console.document(render_schema())
        return 0
    write(output, render_schema())
    if not quiet:
        console.narrate(
            f"wrote {output}", f"editors find it by the first line `# yaml-language-server: $schema={output}`"
        )
    return 0
