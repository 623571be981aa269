"""`clusterctl init`."""

from __future__ import annotations

import glob
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clusterctl.cli import options
from clusterctl.cli.choices import Choices, together
from clusterctl.cli.lookup.templates import find
from clusterctl.cli.words import DEFAULT_FILE, read, write
from clusterctl.config import init
from clusterctl.errors import RefusedError
from clusterctl.render.ranks import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.render.terminal.console import Console

_SCHEMA = "cluster.schema.json"
_SSH_HOST = re.compile(r"^\s*Host\s*[\s=]", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitChoices(Choices):
    """What a person chose of `init`."""

    target: str | None
    source: str | None
    kind: str | None
    include: str
    exclude: str
    script: str
    template: str | None
    schema: bool
    force: bool


@click.command("init")
@click.argument("target", metavar="[PATH]", required=False)
@click.option("--from", "source", metavar="FILE|-", help="Take the machines from this file, of stdin with `-`.")
@click.option("--hostfile", "kind", flag_value="hostfile", help="It is a hostfile of DeepSpeed or Open MPI.")
@click.option("--ssh-config", "kind", flag_value="ssh-config", help="It is an ssh_config; ~/.ssh/config by itself.")
@click.option("--ansible", "kind", flag_value="ansible", help="It is an Ansible inventory, as INI or YAML.")
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
@together(InitChoices)
def command(choices: InitChoices) -> int:
    """Write a cluster file to start from: PATH, or ./cluster.yaml; with `--template` PATH is a folder.

    What kind of file `--from` names is seen from its content where no option says it.
    """
    console = choices.console()
    if choices.template is None:
        _write_starter(choices, console)
        return 0
    if choices.source is not None or choices.kind is not None or choices.schema:
        raise click.UsageError("`--template` cannot be used together with `--from` or `--schema`")
    _copy(choices.template, Path(choices.target or "."), console, force=choices.force, quiet=choices.quiet)
    return 0


def _write_starter(choices: InitChoices, console: Console) -> None:
    path = Path(choices.target or DEFAULT_FILE)
    beside = path.with_name(_SCHEMA)
    _refuse_overwriting([path, *([beside] if choices.schema else [])], force=choices.force)
    machines = _machines(choices) if choices.source or choices.kind else []
    write(path, init.starter(machines, script=choices.script, schema=_SCHEMA if choices.schema else None))
    if choices.schema:
        from clusterctl.config.schema import schema_text

        write(beside, schema_text())
    if not choices.quiet:
        hosts = f" with {count(len(machines), 'host')}" if machines else ": put your hosts into it"
        console.narrate(
            f"wrote {path}{f' and {beside}' if choices.schema else ''}{hosts}", f"`clusterctl config {path}` checks it"
        )
        if machines and _is_foreign_ssh_config(choices):
            console.narrate(f"hint: ssh finds these names by {choices.source} alone: `Include` it in ~/.ssh/config")


def _refuse_overwriting(paths: list[Path], *, force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise RefusedError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already", hint="`--force` overwrites"
        )


def _copy(name: str, folder: Path, console: Console, *, force: bool, quiet: bool) -> None:
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
            f"`clusterctl up {folder / DEFAULT_FILE}` runs it",
        )


def _machines(choices: InitChoices) -> list[init.Machine]:
    source, kind = choices.source, choices.kind
    named = source is not None and source != "-" and not os.path.exists(source)
    if (kind == "slurm" and (source is None or named)) or (kind is None and named and "[" in str(source)):
        return init.from_slurm(_node_list(source))
    if source is None:
        if kind in ("hostfile", "ansible"):
            raise click.UsageError(f"`--{kind}` needs `--from FILE`")
        source = "~/.ssh/config"
    text = read(source)
    match kind or _kind_of(text):
        case "ssh-config":
            return init.from_ssh_config(text, _read_include)
        case "slurm":
            return init.from_slurm(",".join(text.split()))
        case "ansible":
            from clusterctl.config.inventory import from_inventory

            return from_inventory(source, text)
        case _:
            return init.from_hostfile(source, text, include=choices.include, exclude=choices.exclude)


def _is_foreign_ssh_config(choices: InitChoices) -> bool:
    source = choices.source
    if source is None or source == "-" or choices.kind not in (None, "ssh-config") or not os.path.isfile(source):
        return False
    own = os.path.expanduser("~/.ssh/config")
    same = os.path.exists(own) and os.path.samefile(source, own)
    return not same and _kind_of(read(source)) == "ssh-config"


def _node_list(source: str | None) -> str:
    expression = source or os.environ.get("SLURM_JOB_NODELIST", "")
    if not expression:
        hint = "name the nodes: `clusterctl init --slurm --from 'gpu[01-04]'`"
        raise RefusedError("this is no Slurm job: SLURM_JOB_NODELIST is not set", hint=hint)
    return expression


def _kind_of(text: str) -> str:
    if _SSH_HOST.search(text):
        return "ssh-config"
    from clusterctl.config.inventory import looks_like_one

    if looks_like_one(text):
        return "ansible"
    return "slurm" if "[" in text else "hostfile"


def _read_include(pattern: str) -> Iterator[str]:
    """Give the files that an `Include` names; as ssh reads it, relative names begin in `~/.ssh`."""
    place = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern))
    for path in sorted(glob.glob(place)):
        yield read(path)
