"""Static analysis of a job's program: other launchers in a command, Python syntax, activated environments. Pure."""

from __future__ import annotations

import ast
import itertools
import os
import re
import shlex
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class SingleNodeLauncher(NamedTuple):
    """A launcher in a command that starts workers on one node only, with the reason, such as a missing option."""

    launcher: str
    reason: str


_TORCHRUN = ("--nnodes", "--nnode", "--rdzv-endpoint", "--rdzv_endpoint")
_ACCELERATE = ("--num_machines", "--num-machines", "--config_file", "--config-file")
_DEEPSPEED = ("--hostfile", "-H", "--num_nodes", "--no_ssh")
_MPI = ("--hostfile", "-hostfile", "--host", "-host", "-H", "--machinefile", "-machinefile", "-f", "--hosts", "-hosts")
_LAUNCHER_PROGRAMS = {
    "torchrun": _TORCHRUN,
    "accelerate launch": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "colossalai run": ("--hostfile", "--host"),
    "composer": ("--world_size", "--node_rank"),
    "fabric run": ("--num-nodes", "--num_nodes"),
    "lightning run": ("--num-nodes", "--num_nodes"),
    "horovodrun": ("-H", "--hosts", "-hostfile", "--hostfile"),
    "mpirun": _MPI,
    "mpiexec": _MPI,
}
_LAUNCHER_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "paddle.distributed.launch": ("--nnodes", "--ips", "--master"),
}
_NON_RUNNERS = ("install", "echo", "which", "type", "import", "printf")
_SEPARATORS = re.compile(r"[;&|()]+")


def find_single_node_launcher(command: str | Sequence[str]) -> SingleNodeLauncher | None:
    """Return the first launcher of a command that starts workers on one node only, or `None`."""
    for words in split_shell_commands(command):
        found = _find_launcher(words)
        if found is None or any(word in _NON_RUNNERS for word in words[:4]):
            continue
        launcher, options, rest = found
        if options is _TORCHRUN and ("--standalone" in rest or _find_option_value(rest, "--nnodes") == "1"):
            return SingleNodeLauncher(launcher, "for one node")
        if not any(word.partition("=")[0] in options for word in rest):
            return SingleNodeLauncher(launcher, f"without `{options[0]}`")
    return None


def split_shell_commands(command: str | Sequence[str]) -> Iterator[list[str]]:
    """Yield the words of each simple command of a shell text (not a full parser); a list of words is one command."""
    if not isinstance(command, str):
        yield list(command)
        if len(command) > 2 and os.path.basename(command[0]) in ("bash", "sh"):
            yield from split_shell_commands(command[-1])
        return
    for line in command.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in _split_line(line):
            if _SEPARATORS.fullmatch(word):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def _split_line(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        # The line cannot be split exactly, because a quoted text continues in the next line.
        return line.split()


def _find_launcher(words: list[str]) -> tuple[str, tuple[str, ...], list[str]] | None:
    """Return the first launcher among the words, its options for several nodes, and the words after it."""
    for index, word in enumerate(words):
        for name in (os.path.basename(word), " ".join((os.path.basename(word), *words[index + 1 : index + 2]))):
            if name in _LAUNCHER_PROGRAMS:
                return name, _LAUNCHER_PROGRAMS[name], words[index + 1 :]
        if words[index - 1 : index] == ["-m"] and word in _LAUNCHER_MODULES:
            return f"python -m {word}", _LAUNCHER_MODULES[word], words[index + 1 :]
    return None


def _find_option_value(words: list[str], option: str) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None


_ARCHIVE_SUFFIXES = (".pyc", ".pyz", ".zip", ".egg", ".whl")
"""Suffixes of binary files that Python can run."""
_DATA_SUFFIXES = tuple(
    ".json .jsonl .yaml .yml .toml .ini .cfg .conf .csv .tsv .xml .html .md .txt .env .lock .log .rst".split()  # noqa: SIM905
)
_SHELL_SUFFIXES = (".sh", ".bash", ".zsh", ".ksh", ".csh", ".slurm", ".sbatch", ".pbs")
_PYTHON_RUNNERS = ("uv", "uvx", "pixi", "pdm", "hatch", "poetry", "rye", "conda", "mamba", "micromamba", "sage")
"""Programs that the shebang of a Python file may name in place of Python."""


class NonPythonFile(NamedTuple):
    """A description of a file that is not Python, and a hint that names the key to run it with."""

    description: str
    hint: str


def find_python_problem(name: str, data: bytes) -> NonPythonFile | str | None:
    """Return why Python cannot run a file: it is not Python, or it has a syntax error; `None` if Python can run it."""
    suffix = os.path.splitext(name)[1].lower()
    if suffix in _ARCHIVE_SUFFIXES or data.startswith(b"PK\3\4"):
        return None
    path = name if "/" in name else f"./{name}"
    interpreter = _find_interpreter(data)
    is_python = interpreter in (None, *_PYTHON_RUNNERS) or any(name in interpreter for name in ("python", "pypy"))
    if not is_python:
        return NonPythonFile(f"is run by `{interpreter}`, not by Python", f"`command: {path}` runs it")
    if b"\0" in data:
        return NonPythonFile("is a binary file, not Python", f"`command: {path}` runs it, if it is a program")
    if suffix == ".ipynb" or (data.lstrip().startswith(b"{") and b'"cells"' in data and b'"nbformat"' in data):
        hint = f"`command: jupyter nbconvert --to notebook --execute {name}` runs it; `--to script` converts it"
        return NonPythonFile("is a notebook, not Python", hint)
    if suffix in _SHELL_SUFFIXES:
        return NonPythonFile("is a shell script, not Python", f"`command: bash {name}` runs it")
    if suffix in _DATA_SUFFIXES:
        hint = f"set `script` to the program, and pass this file in `args: [{name}]`"
        return NonPythonFile("is a data file, not Python", hint)
    return _check_syntax(name, data, suffix)


def _find_interpreter(data: bytes) -> str | None:
    """Return the name of the program in the shebang, or `None` if the file has no shebang."""
    if not data.startswith(b"#!"):
        return None
    words = data[2:512].partition(b"\n")[0].decode("utf-8", "replace").split()
    if words and os.path.basename(words[0]) == "env":
        words = [word for word in words[1:] if not word.startswith("-") and "=" not in word]
    return os.path.basename(words[0]) if words else None


def _check_syntax(name: str, data: bytes, suffix: str) -> NonPythonFile | str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(data)
    except SyntaxError as error:
        if suffix.startswith(".py"):
            return f"line {error.lineno}: {error.msg}"
        return NonPythonFile(f"is not Python: line {error.lineno}: {error.msg}", f"`command: bash {name}` runs it")
    except (ValueError, RecursionError, MemoryError):
        return None
    return None


class EnvironmentActivation(NamedTuple):
    """A shell command that puts the Python of an environment first on PATH.

    Attributes:
        command: The command as written.
        environment: Folder or name of the environment; empty if the command contains neither.
    """

    command: str
    environment: str


_CONDA = ("conda", "mamba", "micromamba")
_KEYWORDS = ("then", "do", "else", "{", "!", "export", "eval", "declare", "-x")
_PYTHON_MODULE = re.compile(
    r"(?i)(?:.*[-_/])?(?:c?python|(?:ana|mini)?conda|miniforge|mambaforge|mamba|(?:py)?torch|tensorflow)[\d.]*(?:[-_/].*)?"
)
_OTHER_TOOLS = re.compile(
    r"(?i)[/_.-](?:cuda|rocm|nccl|rccl|(?:open)?mpi|mpich|hpcx|ucx|nsight|nvidia|libfabric|efa|slurm|gcc|llvm|sbin)"
)
"""Matches folders of PATH that belong to other tools and contain no Python."""


def find_last_environment_activation(shell_text: str) -> EnvironmentActivation | None:
    """Return the last command of a shell text that activates an environment, or `None`."""
    found = None
    for line in split_shell_commands(shell_text):
        words = [*itertools.dropwhile(_KEYWORDS.__contains__, line)]
        environment = _find_environment(words)
        if environment is not None:
            found = EnvironmentActivation(" ".join(words), environment)
    return found


def _find_environment(words: Sequence[str]) -> str | None:
    match words:
        case ["source" | ".", script, *names] if os.path.basename(script) == "activate":
            return names[0] if names else os.path.dirname(os.path.dirname(script))
        case [program, "activate", *names] if os.path.basename(program) in _CONDA:
            return next((name for name in names if not name.startswith("-")), "base")
        case ["pyenv", "shell" | "activate", *names] | ["workon", *names]:
            return names[0] if names else ""
        case [("module" | "ml"), *names] if any(map(_PYTHON_MODULE.fullmatch, names)) and "unload" not in names:
            return ""
        case [first, *_] if first.startswith("PATH="):
            folder = first.removeprefix("PATH=").partition(":")[0]
            is_python = (
                folder.strip("/") and not folder.startswith(("$PATH", "${PATH")) and not _OTHER_TOOLS.search(folder)
            )
            return os.path.dirname(folder) if is_python else None
    return None


def is_python_in_environment(python: str, environment: str) -> bool:
    """Return whether the path of a Python seems to lie in an environment; only the two texts are compared."""
    own = os.path.dirname(os.path.dirname(_expand_home(python)))
    other = _expand_home(environment).rstrip("/")
    if own.startswith("/") and other.startswith("/"):
        return os.path.normpath(own) == os.path.normpath(other)
    name = os.path.basename(os.path.normpath(other)) if other else ""
    if name == "base" and "/" not in other:
        return "/envs/" not in own
    return name == os.path.basename(os.path.normpath(own))


def _expand_home(path: str) -> str:
    return re.sub(r"^(?:\$HOME|\$\{HOME\})(?=/)", "~", path)
