"""`clusterctl init`."""

from __future__ import annotations

import glob
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from clusterctl.cli import cluster_selection, options
from clusterctl.cli.base_command import CliCommand, CommonOptions, make_completer
from clusterctl.cli.option_values import DEFAULT_FILE, read_text_file, write_text_file
from clusterctl.cli.templates import Template, find_template, list_templates
from clusterctl.config import starter_file
from clusterctl.config.host_ranges import HostRangeError
from clusterctl.config.sections import hostfiles_and_slurm
from clusterctl.config.sections.foreign_host_lists import is_ssh_config, parse_host_list
from clusterctl.config.sections.hostfiles_and_slurm import HostListError, ListedHost, parse_hosts_with_users
from clusterctl.errors import ConfigError, Problem, RefusedError
from clusterctl.formatting import plural

if TYPE_CHECKING:
    from clusterctl.render.console import Console


_SCHEMA_FILE = "cluster.schema.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class _InitOptions:
    """The options of `init`, and the hosts and the path from its arguments."""

    hosts: str | None
    path: str | None
    gpus: str | None
    source: str | None
    script: str | None
    template: str | None
    schema: bool
    force: bool
    quiet: bool
    console: Console


@click.command("init", cls=CliCommand)
@click.argument("words", metavar="[HOSTS] [PATH]", nargs=-1)
@click.option("--gpus", metavar="N", help="GPUs of each host for which the host list has no number; all by default.")
@click.option(
    "--from",
    "source",
    metavar="FILE",
    help="Read hosts from a hostfile, ssh_config, Ansible inventory or Slurm node list (`-`: stdin; `slurm`: the "
    "nodes of this allocation).",
)
@click.option("--script", metavar="FILE", help="Script of the job; the only Python file of the folder by default.")
@click.option(
    "--template",
    metavar="NAME",
    help="Copy this ready-to-run job, and put HOSTS into it.",
    shell_complete=make_completer("templates"),
)
@click.option("--list", "is_listing", is_flag=True, help="List the ready-to-run jobs for --template.")
@options.json_option
@click.option("--schema", is_flag=True, help="Also write the JSON Schema, and a line for editors with its path.")
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.pass_obj
def command(
    common: CommonOptions, /, *, words: tuple[str, ...], is_listing: bool, as_json: bool, **other_options: Any
) -> int:
    """Write a cluster file for HOSTS (`gpu[01-08]`, `a,b`) to PATH, by default to ./cluster.yaml.

    On a terminal, without any argument, `init` asks for hosts, GPUs, script and Python. Arguments that contain `/` or
    end with .yaml or .yml are paths; all others are hosts. `--from` recognises the kind of the file by its content.

    `clusterctl init --list` lists ready-to-run jobs (`-q`: only their names), and `clusterctl init --template NAME`
    copies one. With `--template`, PATH is a folder, and a single argument is a path unless it is a range or a list.
    """
    if is_listing:
        others = ((f"--{name.replace('source', 'from')}", value) for name, value in other_options.items())
        options.refuse_options_with("--list", ("HOSTS", words), *others)
        options.refuse_combination(("--json", as_json), ("--quiet", common.quiet))
        _list_templates(common.console(), as_json=as_json, quiet=common.quiet)
        return 0
    if as_json:
        raise click.UsageError("`--json` needs `--list`")
    hosts, path = _split_arguments(words, other_options["template"], other_options["source"])
    given = _InitOptions(hosts=hosts, path=path, quiet=common.quiet, console=common.console(), **other_options)
    if given.template is None:
        _write_starter_file(given)
        return 0
    if given.schema or given.script:
        raise click.UsageError("`--template` cannot be used together with `--schema` or `--script`")
    _copy_template(given.template, Path(path or "."), _list_hosts(given), given)
    return 0


def _list_templates(console: Console, *, as_json: bool, quiet: bool) -> None:
    jobs = list_templates()
    if as_json:
        console.write_stdout_json([{"name": t.name, "summary": t.summary, "path": str(t.path)} for t in jobs])
    elif quiet:
        console.write_stdout(*[t.name for t in jobs])
    elif jobs:
        console.write_stdout(*render_templates(jobs, console.out.width))
        if console.err.live:
            console.write_stderr("", "`clusterctl init --template NAME` copies one into this folder")
    else:
        console.write_stderr("this installation has no templates")


def render_templates(jobs: list[Template], width: int | None) -> list[str]:
    """Return a line for each template; on a terminal, long summaries are wrapped."""
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


def _split_arguments(words: tuple[str, ...], template: str | None, source: str | None) -> tuple[str | None, str | None]:
    """Split the arguments into the host list and the path; each may be `None`."""

    def is_path(word: str) -> bool:
        if "/" in word or word.endswith((".yaml", ".yml")) or word in (".", ".."):
            return True
        return template is not None and len(words) == 1 and not set(word) & set("[,@")

    paths = [word for word in words if is_path(word)]
    hosts = [word for word in words if word not in paths]
    if len(hosts) == 2 and template is not None:
        hosts, paths = hosts[:1], hosts[1:]
    if len(paths) > 1:
        raise click.UsageError(f"give only one path (got `{paths[0]}` and `{paths[1]}`)")
    if hosts and source is not None:
        raise click.UsageError(f"give hosts (`{hosts[0]}`) or `--from`, not both")
    return ",".join(hosts) or None, paths[0] if paths else None


def _list_hosts(given: _InitOptions) -> list[ListedHost]:
    """Return the hosts of the arguments or of `--from`; no hosts if neither is given."""
    try:
        gpus = None if given.gpus is None else parse_gpus_or_auto(given.gpus)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--gpus") from error
    if given.hosts is None and given.source is None and given.gpus is not None:
        raise click.UsageError("`--gpus` needs hosts, as in `clusterctl init gpu[01-08] --gpus 8`")
    try:
        listed = (
            hostfiles_and_slurm.parse_hosts_with_users(given.hosts) if given.hosts else _read_host_list(given.source)
        )
    except HostRangeError as error:
        raise ConfigError([Problem("HOSTS", 0, 0, f"`{given.hosts}`: {error}", error.hint)]) from error
    except HostListError as error:
        text = str(error).removeprefix(f"line {error.line}: ")
        column = 1 if error.line else 0
        raise ConfigError([Problem(str(given.source), error.line, column, text, error.hint)]) from error
    return [starter_file.set_gpus_if_unknown(host, gpus) for host in listed]


def _read_host_list(source: str | None) -> list[ListedHost]:
    """Return the hosts of `--from`. The slots of a hostfile are numbers of GPUs, as in DeepSpeed."""
    if source is None:
        return []
    if source == "slurm":
        return [replace(host, transport=None) for host in hostfiles_and_slurm.list_slurm_hosts(os.environ)]
    listed = parse_host_list(read_text_file(source), _read_include)
    return [replace(host, gpus=host.workers, workers=None) if host.gpus is None else host for host in listed]


def _read_include(pattern: str) -> Iterator[str]:
    """Yield the texts of the files that an `Include` names. Relative names start at `~/.ssh`, as in ssh."""
    for path in sorted(glob.glob(os.path.join(os.path.expanduser("~/.ssh"), os.path.expanduser(pattern)))):
        yield read_text_file(path)


def _write_starter_file(given: _InitOptions) -> None:
    path = Path(given.path or DEFAULT_FILE)
    schema = path.with_name(_SCHEMA_FILE)
    _refuse_overwriting([path, *([schema] if given.schema else [])], force=given.force)
    hosts, script, python = _list_hosts(given), given.script or find_job_script(path.parent), None
    arguments = (given.hosts, given.path, given.script, given.source, given.gpus, given.schema, given.quiet)
    if not any(arguments) and is_interactive():
        answers = ask_questions(script, given.console.write_stderr)
        hosts, script, python = answers.hosts, answers.script, answers.python
    text = starter_file.render_starter_file(
        hosts, script=script or "train.py", python=python, schema=_SCHEMA_FILE if given.schema else None
    )
    write_text_file(path, text)
    if given.schema:
        from clusterctl.config.schema import render_schema

        write_text_file(schema, render_schema())
    suffix = f" with {plural(len(hosts), 'host')}" if hosts else ": put your hosts into it"
    message = f"wrote {path}{f' and {schema}' if given.schema else ''}{suffix}"
    _report_and_check(message, path, given, has_hosts=bool(hosts))
    if hosts and not given.quiet and _is_foreign_ssh_config(given.source):
        given.console.write_stderr(f"hint: only {given.source} defines these names: `Include` it in ~/.ssh/config")


def _report_and_check(message: str, path: Path, given: _InitOptions, *, has_hosts: bool) -> None:
    """Print the names of the new files, and the problems of the cluster file. `--quiet` does not hide problems."""
    shown = "" if str(path) == DEFAULT_FILE else f" {path}"
    try:
        loaded = cluster_selection.load_chosen_cluster_file(CommonOptions(), str(path), require_job=True)
    except ConfigError as error:
        problems = [f"warning: the new file has an error: {problem.text}" for problem in error.problems]
        hint = f"hint: `clusterctl config{shown}` checks it again"
        given.console.write_stderr(*([] if given.quiet else [message]), *problems, hint)
        return
    if given.quiet:
        return
    if any(host.gpus is None for host in loaded.spec.hosts):
        message += "; `auto` means all GPUs of a host, or one rank on the CPU if it has no GPU"
    next_step = f"`clusterctl up{shown}` runs it" if has_hosts else f"`clusterctl config{shown}` checks it"
    given.console.write_stderr(message, next_step)


def _refuse_overwriting(paths: list[Path], *, force: bool) -> None:
    existing = [str(path) for path in paths if path.exists()]
    if existing and not force:
        verb = "exists" if len(existing) == 1 else "exist"
        raise RefusedError(f"{', '.join(existing)} {verb} already", hint="`--force` overwrites")


def _copy_template(name: str, folder: Path, hosts: list[ListedHost], given: _InitOptions) -> None:
    template = find_template(name)
    files = list(template.list_files())
    _refuse_overwriting([folder / file for file in files], force=given.force)
    text = (template.path / DEFAULT_FILE).read_text(encoding="utf-8")
    try:
        text = starter_file.render_template_for_hosts(text, hosts) if hosts else text
    except ValueError as error:
        raise RefusedError(f"{name}: {error}") from error
    try:
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(template.path / file, folder / file)
    except OSError as error:
        raise RefusedError(f"{folder} cannot be written: {error.strerror or error}") from error
    path = folder / DEFAULT_FILE
    write_text_file(path, text)
    suffix = f"; {path} has {plural(len(hosts), 'host')}" if hosts else ""
    _report_and_check(f"wrote {', '.join(str(folder / file) for file in files)}{suffix}", path, given, has_hosts=True)
    if hosts and "\n#" in text and not given.quiet:
        given.console.write_stderr(f"hint: comments at the end of {path} list more settings that real machines need")


def _is_foreign_ssh_config(source: str | None) -> bool:
    """Return whether the hosts come from an ssh_config that ssh does not read by default."""
    if source is None or not os.path.isfile(source) or not is_ssh_config(read_text_file(source)):
        return False
    own = os.path.expanduser("~/.ssh/config")
    return not (os.path.exists(own) and os.path.samefile(source, own))


T = TypeVar("T")

_NOT_JOB_SCRIPTS = ("setup.py", "conftest.py", "__init__.py")


@dataclass(frozen=True, slots=True)
class InitAnswers:
    """The answers of the user to the questions of `ask_questions`."""

    hosts: list[ListedHost]
    script: str
    python: str | None


def is_interactive() -> bool:
    """Return whether a user can answer questions on the terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_questions(script: str | None, print_error: Callable[[str], None]) -> InitAnswers:
    """Ask the user for hosts, GPUs, script and Python.

    Args:
        script: The default script, or `None` if no file in the folder looks like a job script.
        print_error: A function that prints the error of an invalid answer.
    """
    hosts = _ask_until_valid(
        "Hosts, as ssh knows them (gpu[01-08], or a,b,c)", None, parse_hosts_with_users, print_error
    )
    gpus = _ask_until_valid("GPUs each (a number, or auto)", "auto", parse_gpus_or_auto, print_error)
    job_script = _ask_until_valid("Script of the job", script or "train.py", str, print_error)
    python = _ask_until_valid(
        "Python on the hosts that has the libraries of the script (a path, or auto)", "auto", str, print_error
    )
    hosts = [starter_file.set_gpus_if_unknown(host, gpus) for host in hosts]
    return InitAnswers(hosts, job_script, None if python == "auto" else python)


def parse_gpus_or_auto(text: str) -> int | None:
    """Return the number of GPUs; `None` for `auto`, which means all GPUs of a host.

    Raises:
        ValueError: The text is neither a number nor `auto`.
    """
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) > 1024:
        raise ValueError(f"`{text}` is not a number of GPUs; write e.g. 8, or auto")
    return int(text)


def find_job_script(folder: Path) -> str | None:
    """Return the script in a folder: `train.py`, or the only Python file that may be a job; `None` otherwise."""
    found = [path.name for path in sorted(folder.glob("*.py")) if path.name not in _NOT_JOB_SCRIPTS]
    return "train.py" if "train.py" in found else found[0] if len(found) == 1 else None


def _ask_until_valid(
    question: str, default: str | None, read: Callable[[str], T], print_error: Callable[[str], None]
) -> T:
    """Ask until the answer is valid. Ctrl-C and the end of the input raise `click.Abort`."""
    while True:
        answer = click.prompt(question, default=default, err=True, prompt_suffix=": ").strip()
        try:
            return read(answer)
        except ValueError as error:
            print_error(f"  {error}")
