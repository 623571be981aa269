"""Launchers of other projects in a command: which of them knows of one node alone. Pure."""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Shortfall(NamedTuple):
    """A launcher, and what it lacks to know of the other nodes."""

    launcher: str
    why: str


_TORCHRUN = ("--nnodes", "--nnode", "--rdzv-endpoint", "--rdzv_endpoint")
_ACCELERATE = ("--num_machines", "--num-machines", "--config_file", "--config-file")
_DEEPSPEED = ("--hostfile", "-H", "--num_nodes", "--no_ssh")
_MPI = ("--hostfile", "-hostfile", "--host", "-host", "-H", "--machinefile", "-machinefile", "-f", "--hosts", "-hosts")
_PROGRAMS = {
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
_MODULES = {
    "torch.distributed.run": _TORCHRUN,
    "torch.distributed.launch": _TORCHRUN,
    "accelerate.commands.launch": _ACCELERATE,
    "deepspeed.launcher.runner": _DEEPSPEED,
    "paddle.distributed.launch": ("--nnodes", "--ips", "--master"),
}
_NOT_RUN = ("install", "echo", "which", "type", "import", "printf")
_SEPARATORS = re.compile(r"[;&|()]+")


def single_node_launcher(command: str | Sequence[str]) -> Shortfall | None:
    """Return the first launcher of a command that is not told of other nodes, or `None`."""
    for words in shell_words(command):
        named = _named(words)
        if named is None or any(word in _NOT_RUN for word in words[:4]):
            continue
        launcher, options, rest = named
        if options is _TORCHRUN and ("--standalone" in rest or _value(rest, "--nnodes") == "1"):
            return Shortfall(launcher, "for one node")
        if not any(word.partition("=")[0] in options for word in rest):
            return Shortfall(launcher, f"without `{options[0]}`")
    return None


def shell_words(command: str | Sequence[str]) -> Iterator[list[str]]:
    """Give the words of each simple command of a shell text, roughly; a list is one such command."""
    if not isinstance(command, str):
        yield list(command)
        if len(command) > 2 and os.path.basename(command[0]) in ("bash", "sh"):
            yield from shell_words(command[-1])
        return
    for line in command.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in _split(line):
            if _SEPARATORS.fullmatch(word):
                yield words
                words = []
            else:
                words.append(word)
        yield words


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|()")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        # A quotation goes on in the next line.
        return line.split()


def _named(words: list[str]) -> tuple[str, tuple[str, ...], list[str]] | None:
    """Return a launcher among the words of a command, the options that tell it of other nodes, and what follows it."""
    for index, word in enumerate(words):
        for name in (os.path.basename(word), " ".join((os.path.basename(word), *words[index + 1 : index + 2]))):
            if name in _PROGRAMS:
                return name, _PROGRAMS[name], words[index + 1 :]
        if words[index - 1 : index] == ["-m"] and word in _MODULES:
            return f"python -m {word}", _MODULES[word], words[index + 1 :]
    return None


def _value(words: list[str], option: str) -> str | None:
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == option:
            return after
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
