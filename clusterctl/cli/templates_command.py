"""`clusterctl templates`."""

from __future__ import annotations

import json

import click

from clusterctl.cli import options


@click.command("templates")
@options.json_option
@options.output_options
def command(as_json: bool, color: str, quiet: bool) -> int:
    """List ready-to-run jobs; `clusterctl init --template NAME` copies one. With `-q` only their names."""
    from clusterctl.cli.template_files import templates
    from clusterctl.render.console import pad

    console = options.console_of(color)
    found = templates()
    if as_json:
        shown = [{"name": t.name, "summary": t.summary, "path": str(t.path)} for t in found]
        console.data(json.dumps(shown, indent=2))
    elif quiet:
        console.data(*[t.name for t in found])
    elif found:
        width = max(len(t.name) for t in found)
        console.data(*[f"{pad(t.name, width)}  {t.summary}" for t in found])
        console.narrate("", "`clusterctl init --template NAME` copies one into this folder")
    else:
        console.narrate("this installation holds no templates")
    return 0
