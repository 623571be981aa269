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

from clusterctl.cli import asking, options
from clusterctl.cli.choices import Choices, together
from clusterctl.cli.lookup.templates import find
from clusterctl.cli.main import WithExamples
from clusterctl.cli.words import DEFAULT_FILE, read, write
from clusterctl.config import starter_file
from clusterctl.config.sections.host_lists import strip_bom
from clusterctl.errors import ConfigError, RefusedError
from clusterctl.formatting import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

    from clusterctl.config.sections.host_lists import ListedHost
    from clusterctl.render.console import Console

_SCHEMA = "cluster.schema.json"
_KINDS = {
    "hostfile": "a hostfile",
    "ssh-config": "an ssh_config",
    "ansible": "an Ansible inventory",
    "slurm": "a Slurm node list",
}
_SSH_HOST = re.compile(r"^\s*Host\s*[\s=]", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InitChoices(Choices):
    """What a person chose of `init`."""

    words: tuple[str, ...]
    gpus: str | None
    source: str | None
    hostfile: bool
    ssh_config: bool
    ansible: bool
    slurm: bool
    include: str
    exclude: str
    script: str | None
    template: str | None
    schema: bool
    force: bool

    @property
    def kinds(self) -> dict[str, bool]:
        """For each kind of file whether an option says that it is one."""
        given = (self.hostfile, self.ssh_config, self.ansible, self.slurm)
        return dict(zip(_KINDS, given, strict=True))

    @property
    def kind(self) -> str | None:
        """The kind of file that an option says it is."""
        return next((kind for kind, is_given in self.kinds.items() if is_given), None)


@click.command("init", cls=WithExamples)
@click.argument("words", metavar="[HOSTS] [PATH]", nargs=-1)
@click.option("--gpus", metavar="N", help="GPUs of each host, where nothing else says it; all there are by default.")
@click.option("--from", "source", metavar="FILE|-", help="Take the machines from this file, of stdin with `-`.")
@click.option("--hostfile", is_flag=True, help="It is a hostfile of DeepSpeed or Open MPI.")
@click.option("--ssh-config", is_flag=True, help="It is an ssh_config; ~/.ssh/config by itself.")
@click.option("--ansible", is_flag=True, help="It is an Ansible inventory, as INI or YAML.")
@click.option("--slurm", is_flag=True, help="It is a Slurm node list; $SLURM_JOB_NODELIST by itself.")
@click.option("--include", default="", metavar="FILTER", help="Of a hostfile, only these: worker-1:0,2@worker-2.")
@click.option("--exclude", default="", metavar="FILTER", help="Of a hostfile, all but these.")
@click.option("--script", metavar="FILE", help="What the job runs; by default the one Python file of the folder.")
@click.option(
    "--template",
    metavar="NAME",
    help="Copy this ready-to-run job, for these hosts where any are named.",
    shell_complete=options.offer("templates"),
)
@click.option("--schema", is_flag=True, help="Write the JSON Schema beside it, and the line by which editors find it.")
@click.option("--force", is_flag=True, help="Overwrite what is there.")
@options.output_options
@together(InitChoices)
def command(choices: InitChoices) -> int:
    """Write a cluster file: for HOSTS (`gpu[01-08]`, `a,b`) into PATH, or ./cluster.yaml.

    On a terminal, and without any argument, it asks for hosts, GPUs, script and Python. Arguments with `/` in them or
    .yaml or .yml at their end are paths, all others hosts. With `--template` PATH is a folder, and a single word that
    is no range or list is a path too. What kind of file `--from` names is seen from its content where no option says
    it.
    """
    options.refuse_together(*((f"--{kind}", is_given) for kind, is_given in choices.kinds.items()))
    console = choices.console()
    place = _place(choices)
    if not (choices.source or choices.kind):
        _refuse_filter(choices)
    if choices.template is None:
        _write_starter(choices, place, console)
        return 0
    if choices.schema or choices.script:
        raise click.UsageError("`--template` cannot be used together with `--schema` or `--script`")
    machines = _given(choices, place)
    _copy(choices.template, Path(place.path or "."), machines, console, choices)
    return 0


@dataclass(frozen=True, slots=True)
class _Place:
    """What the words of the command line name."""

    hosts: str | None
    path: str | None


def _place(choices: InitChoices) -> _Place:
    paths = [word for word in choices.words if _is_path(word, choices)]
    hosts = [word for word in choices.words if word not in paths]
    if len(hosts) == 2 and choices.template is not None:
        hosts, paths = hosts[:1], hosts[1:]
    if len(paths) > 1:
        raise click.UsageError(f"`{paths[0]}` and `{paths[1]}` are two places; name one")
    if len(hosts) > 1 and choices.template is None:
        hosts = [",".join(hosts)]
    if hosts and (choices.source is not None or choices.kind is not None):
        raise click.UsageError(f"the hosts are `{hosts[0]}`, or those of `--from`: name one")
    return _Place(hosts[0] if hosts else None, paths[0] if paths else None)


def _is_path(word: str, choices: InitChoices) -> bool:
    if "/" in word or word.endswith((".yaml", ".yml")) or word in (".", ".."):
        return True
    return choices.template is not None and len(choices.words) == 1 and not set(word) & set("[,@")


def _given(choices: InitChoices, place: _Place) -> list[ListedHost]:
    """Return the machines that are named, in whichever way."""
    try:
        gpus = None if choices.gpus is None else asking.gpus_of(choices.gpus)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpus") from error
    if place.hosts is not None:
        found = starter_file.parse_host_words(place.hosts)
    elif choices.source or choices.kind:
        found = _machines(choices)
    elif choices.gpus is not None:
        raise click.UsageError("`--gpus` needs hosts, as in `clusterctl init gpu[01-08] --gpus 8`")
    else:
        return []
    return [starter_file.set_gpus(machine, gpus) for machine in found]


def _write_starter(choices: InitChoices, place: _Place, console: Console) -> None:
    path = Path(place.path or DEFAULT_FILE)
    beside = path.with_name(_SCHEMA)
    _refuse_overwriting([path, *([beside] if choices.schema else [])], force=choices.force)
    machines, script, python = _given(choices, place), choices.script or asking.script_here(path.parent), None
    said = (choices.script, choices.source, choices.kind, choices.gpus, *choices.words)
    if not any(said) and not choices.schema and not choices.quiet and asking.possible():
        answers = asking.ask(script, console.narrate)
        machines, script, python = answers.machines, answers.script, answers.python
    text = starter_file.render_starter_file(
        machines, script=script or "train.py", python=python, schema=_SCHEMA if choices.schema else None
    )
    write(path, text)
    if choices.schema:
        from clusterctl.config.schema import render_schema

        write(beside, render_schema())
    hosts = f" with {plural(len(machines), 'host')}" if machines else ": put your hosts into it"
    wrote = f"wrote {path}{f' and {beside}' if choices.schema else ''}{hosts}"
    _say_whether_it_checks(wrote, path, console, choices, told=bool(machines))
    if machines and not choices.quiet and _is_foreign_ssh_config(choices):
        console.narrate(f"hint: ssh finds these names by {choices.source} alone: `Include` it in ~/.ssh/config")


def _say_whether_it_checks(wrote: str, path: Path, console: Console, choices: InitChoices, *, told: bool) -> None:
    """Say what was written, and what it still lacks, which is said also where little is to be said."""
    shown = "" if str(path) == DEFAULT_FILE else f" {path}"
    try:
        loaded = options.load_file(str(path), (), (), require_job=True)
    except ConfigError as error:
        lacks = [f"warning: it does not check yet: {problem.text}" for problem in error.problems]
        console.narrate(
            *([] if choices.quiet else [wrote]), *lacks, f"hint: `clusterctl config{shown}` checks it again"
        )
    else:
        if not choices.quiet:
            if any(host.gpus is None for host in loaded.spec.hosts):
                wrote += "; `auto` takes all GPUs of a host, and is one rank on the CPU where there is none"
            then = f"`clusterctl up{shown}` runs it" if told else f"`clusterctl config{shown}` checks it"
            console.narrate(wrote, then)


def _refuse_overwriting(paths: list[Path], *, force: bool) -> None:
    there = [str(path) for path in paths if path.exists()]
    if there and not force:
        raise RefusedError(
            f"{', '.join(there)} {'is' if len(there) == 1 else 'are'} there already", hint="`--force` overwrites"
        )


def _copy(name: str, folder: Path, machines: list[ListedHost], console: Console, choices: InitChoices) -> None:
    template = find(name)
    files = list(template.files())
    _refuse_overwriting([folder / file for file in files], force=choices.force)
    text = (template.path / DEFAULT_FILE).read_text(encoding="utf-8")
    try:
        text = starter_file.render_template(text, machines) if machines else text
    except ValueError as error:
        raise RefusedError(f"{name}: {error}") from error
    try:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template.path / file, folder / file)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be written: {error.strerror or error}") from error
    path = folder / DEFAULT_FILE
    write(path, text)
    hosts = f"; {path} has {plural(len(machines), 'host')}" if machines else ""
    wrote = f"wrote {', '.join(str(folder / file) for file in files)}{hosts}"
    _say_whether_it_checks(wrote, path, console, choices, told=True)
    if machines and "\n#" in text and not choices.quiet:
        console.narrate(f"hint: comments at the end of {path} say what else real machines need")


def _machines(choices: InitChoices) -> list[ListedHost]:
    source, kind = choices.source, choices.kind
    if kind not in (None, "hostfile"):
        _refuse_filter(choices)
    named = source is not None and source != "-" and not os.path.exists(source)
    if (kind == "slurm" and (source is None or named)) or (kind is None and named and "[" in str(source)):
        return starter_file.import_slurm_nodes(_node_list(source))
    if source is None:
        if kind in ("hostfile", "ansible"):
            raise click.UsageError(f"`--{kind}` needs `--from FILE`")
        source = "~/.ssh/config"
    text = strip_bom(read(source))
    if kind is not None:
        _refuse_another_kind(source, text, kind)
    kind = kind or _kind_of(text)
    if kind != "hostfile":
        _refuse_filter(choices)
    match kind:
        case "ssh-config":
            return starter_file.import_ssh_config(text, _read_include)
        case "slurm":
            return starter_file.import_slurm_nodes(",".join(text.split()), source)
        case "ansible":
            return starter_file.import_ansible_inventory(source, text)
        case _:
            return starter_file.import_hostfile(source, text, include=choices.include, exclude=choices.exclude)


def _is_foreign_ssh_config(choices: InitChoices) -> bool:
    source = choices.source
    if source is None or source == "-" or choices.kind not in (None, "ssh-config") or not os.path.isfile(source):
        return False
    own = os.path.expanduser("~/.ssh/config")
    same = os.path.exists(own) and os.path.samefile(source, own)
    return not same and _kind_of(read(source)) == "ssh-config"


def _refuse_filter(choices: InitChoices) -> None:
    """Refuse what chooses lines of a hostfile where there is none.

    Raises:
        click.UsageError: It was given.
    """
    for option, value in (("--include", choices.include), ("--exclude", choices.exclude)):
        if value:
            raise click.UsageError(f"`{option}` needs a hostfile: `--hostfile --from FILE`")


def _node_list(source: str | None) -> str:
    expression = source or os.environ.get("SLURM_JOB_NODELIST", "")
    if not expression:
        hint = "name the nodes: `clusterctl init --slurm --from 'gpu[01-04]'`"
        raise RefusedError("this is no Slurm job: SLURM_JOB_NODELIST is not set", hint=hint)
    return expression


def _kind_of(text: str) -> str:
    looks = _looks(text)
    return next((kind for kind in ("ssh-config", "ansible") if kind in looks), "slurm" if "[" in text else "hostfile")


def _looks(text: str) -> list[str]:
    """Return the kinds of file that a text may be by what it shows; none where it shows nothing."""
    from clusterctl.config.host_ranges import HostRangeError, expand_hosts
    from clusterctl.config.sections.ansible_inventory import is_ansible_inventory
    from clusterctl.config.sections.other_formats import is_hostfile

    found = ["ssh-config"] if _SSH_HOST.search(text) else []
    found += ["ansible"] if is_ansible_inventory(text) else []
    found += ["hostfile"] if is_hostfile(text) else []
    try:
        expand_hosts(",".join(line for line in text.splitlines() if line.strip()))
    except HostRangeError:
        return found
    return [*found, "slurm"]


def _refuse_another_kind(source: str, text: str, kind: str) -> None:
    """Refuse an option that calls a file what it clearly is not: read so, each of its lines would be a mistake."""
    looks = [found for found in _looks(text) if found != "slurm" or kind == "slurm"]
    if looks and kind not in looks:
        shown = "what stdin gives" if source == "-" else f"`{source}`"
        raise click.UsageError(f"{shown} looks like {_KINDS[looks[0]]}, not {_KINDS[kind]}: leave out `--{kind}`")


def _read_include(pattern: str) -> Iterator[str]:
    """Give the files that an `Include` names; as ssh reads it, relative names begin in `~/.ssh`."""
    place = os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern))
    for path in sorted(glob.glob(place)):
        yield read(path)
