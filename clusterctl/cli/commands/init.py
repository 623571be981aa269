"""`clusterctl init`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options, words
from clusterctl.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.config.init import Machine
    from clusterctl.render.terminal.console import Console

_SCHEMA = "cluster.schema.json"
_SSH_HOST = re.compile(r"^\s*Host\s*[\s=]", re.IGNORECASE | re.MULTILINE)


@click.command("init")
@click.argument("target", metavar="[PATH]", required=False)
@click.option("--from", "source", metavar="FILE|-", help="Take the machines from this file, of stdin with `-`.")
@click.option("--hostfile", "kind", flag_value="hostfile", help="It is a hostfile of DeepSpeed or Open MPI.")
@click.option("--ssh-config", "kind", flag_value="ssh-config", help="It is an ssh_config; ~/.ssh/config by itself.")
@click.option("--slurm", "kind", flag_value="slurm", help="It is a Slurm node list; $SLURM_JOB_NODELIST by itself.")
@click.option("--include", default="", metavar="FILTER", help="Of a hostfile, only these: worker-1:0,2@worker-2.")
@click.option("--exclude", default="", metavar="FILTER", help="Of a hostfile, all but these.")
@click.option("--script", default="train.py", show_default=True, metavar="FILE", help="What the job runs.")
@click.option(
    "--template",
    metavar="NAME",
    help="Copy this ready-to-run job instead.",
    shell_complete=options.offer("templates"),
)
@click.option("--schema", is_flag=True, help="Write the JSON Schema beside it, and the line by which editors find it.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
@options.output_options
def command(
    target: str | None,
    source: str | None,
    kind: str | None,
    include: str,
    exclude: str,
    script: str,
    template: str | None,
    schema: bool,
    force: bool,
    color: str,
    quiet: bool,
) -> int:
    """Write a cluster file to start from: PATH, or ./cluster.yaml; with `--template` PATH is a folder.

    What kind of file `--from` names is seen from its content where no option says it.
    """
    console = options.console_of(color)
    if template is not None:
        if source is not None or kind is not None or schema:
            raise click.UsageError("`--template` cannot be used together with `--from` or `--schema`")
        _copy(template, Path(target or "."), console, force=force, quiet=quiet)
        return 0
    from clusterctl.cli.words import write
    from clusterctl.config.init import starter

    path = Path(target or words.DEFAULT_FILE)
    beside = path.with_name(_SCHEMA)
    _refuse_overwriting([path, *([beside] if schema else [])], force=force)
    machines = _machines(source, kind, include, exclude) if source or kind else []
    write(path, starter(machines, script=script, schema=_SCHEMA if schema else None))
    if schema:
        from clusterctl.config.schema import schema_text

        write(beside, schema_text())
    if not quiet:
        hosts = f" with {len(machines)} hosts" if machines else ": put your hosts into it"
        console.narrate(
            f"wrote {path}{f' and {beside}' if schema else ''}{hosts}", f"`clusterctl config {path}` checks it"
        )
    return 0


def _refuse_overwriting(paths: list[Path], *, force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise RefusedError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already", hint="`--force` overwrites"
        )


def _copy(name: str, folder: Path, console: Console, *, force: bool, quiet: bool) -> None:
    import shutil

    from clusterctl.cli.lookup.templates import find

    template = find(name)
    files = list(template.files())
    _refuse_overwriting([folder / file for file in files], force=force)
    try:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template.path / file, folder / file)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be written: {error.strerror or error}") from error
    if not quiet:
        console.narrate(
            f"wrote {', '.join(str(folder / file) for file in files)}",
            f"`clusterctl up {folder / words.DEFAULT_FILE}` runs it",
        )


def _machines(source: str | None, kind: str | None, include: str, exclude: str) -> list[Machine]:
    from clusterctl.cli.words import read
    from clusterctl.config import init

    if kind == "slurm" and (source is None or (source != "-" and not os.path.exists(source))):
        return init.from_slurm(_node_list(source))
    if source is None:
        if kind == "hostfile":
            raise click.UsageError("`--hostfile` needs `--from FILE`")
        source = "~/.ssh/config"
    text = read(source)
    match kind or _kind_of(text):
        case "ssh-config":
            return init.from_ssh_config(text, _read_include)
        case "slurm":
            return init.from_slurm(",".join(text.split()))
        case _:
            return init.from_hostfile(source, text, include=include, exclude=exclude)


def _node_list(said: str | None) -> str:
    expression = said or os.environ.get("SLURM_JOB_NODELIST", "")
    if not expression:
        raise RefusedError("this is no Slurm job: SLURM_JOB_NODELIST is not set", hint="say it: `--from 'gpu[01-04]'`")
    return expression


def _kind_of(text: str) -> str:
    if _SSH_HOST.search(text):
        return "ssh-config"
    return "slurm" if "[" in text else "hostfile"


def _read_include(pattern: str) -> Iterator[str]:
    """Give the files that an `Include` names; as ssh reads it, relative names begin in `~/.ssh`."""
    import glob

    from clusterctl.cli.words import read

    place = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern))
    for path in sorted(glob.glob(place)):
        yield read(path)
