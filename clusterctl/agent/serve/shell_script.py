"""Writes the script of `clusterctl shell`, which starts a shell in the folder and environment of a job or a rank.

The script is a file, because it may contain secrets, and all users of a machine can see command lines.
"""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from typing import TYPE_CHECKING

from clusterctl.agent import inject
from clusterctl.agent.linux import helper_process, proc, spawn
from clusterctl.agent.protocol.command_messages import ErrorKind, RequestError
from clusterctl.agent.serve.node_commands import build_program, make_python_path_setup, read_account, resolve_folder

if TYPE_CHECKING:
    from clusterctl.agent.protocol import command_payload_types
    from clusterctl.agent.serve.agent_session import AgentSession
    from clusterctl.agent.serve.run_commands import RunCommands

_RUN_VARIABLES = (b"CLUSTERCTL_NODE", b"CLUSTERCTL_STATUS_DIR", b"TORCHELASTIC_ERROR_FILE")
"""Variables of a rank that the shell must not have, because they mark processes of the run or name files of the run."""
_LOGIN_PREFIXES = (b"SSH_", b"XDG_", b"DBUS_")
_LOGIN_VARIABLES = (b"TERM", b"PWD", b"OLDPWD", b"SHLVL", b"_")
"""Variables that the script does not set, because the shell keeps the values of the user's terminal."""


def write_shell_script(
    session: AgentSession,
    runs: RunCommands,
    request_id: int,
    arguments: command_payload_types.WriteScriptArguments,
    _epoch: int | None,
) -> None:
    """Write a script that removes itself and executes the shell; answer with the path of the script."""
    rank = arguments.get("rank")
    program = _copy_rank_environment(runs, rank) if rank else None
    container = arguments.get("container")
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else session.state_root

    def write() -> command_payload_types.ShellScriptAnswer:
        argv = [str(word) for word in arguments.get("argv") or [read_account()[2] or "/bin/sh"]]
        if program is not None:
            words = [spawn.encode_text(word) for word in argv]
            whole = spawn.Program(words, program.env, program.cwd, container=program.container)
        else:
            whole = build_program(arguments, argv, resolve_folder(arguments.get("cwd")))
            prepare = None if container else make_python_path_setup(arguments)
            whole = prepare(whole) if prepare else whole
        if container or whole.container is not None:
            whole = _enter_container(session, arguments, program, os.fsdecode(whole.cwd), folder)
        descriptor, path = tempfile.mkstemp(prefix="clusterctl-shell-", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(format_script(whole))
        return {"path": path}

    # Run `write` in a helper process, because a directory service or a file server may hang.
    session.run_task(request_id, lambda _out: write())


def _enter_container(
    session: AgentSession,
    arguments: command_payload_types.WriteScriptArguments,
    rank: spawn.Program | None,
    cwd: str,
    folder: str,
) -> spawn.Program:
    """Return a program that runs the shell in the container of a rank, or in a container of its own.

    Args:
        session: The session.
        arguments: The request.
        rank: The environment of the rank, or `None`.
        cwd: The working directory.
        folder: Folder for a file that the program removes.
    """
    request = {
        "argv": arguments.get("argv") or ["/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh"],
        "cwd": cwd,
        "env": {os.fsdecode(name): os.fsdecode(value) for name, value in rank.env.items()}
        if rank
        else arguments.get("env") or {},
        "prologue": None if rank else arguments.get("prologue"),
        "pid": rank.container if rank else None,
        "container": arguments.get("container"),
        "root": session.state_root,
    }
    descriptor, path = tempfile.mkstemp(prefix="clusterctl-shell-", dir=folder)
    with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(request, file)
    argv = [spawn.encode_text(word) for word in helper_process.build_agent_command("enter", path)]
    return spawn.Program(argv, dict(os.environb))


def format_script(program: spawn.Program) -> bytes:
    """Return a script for `sh` that sets folder and environment and then executes the program."""
    own = dict(os.environb)
    lines = [b'rm -f -- "$0"']
    for name, value in program.env.items():
        is_login = name in _LOGIN_VARIABLES or name.startswith(_LOGIN_PREFIXES)
        if own.get(name) != value and not is_login and os.fsdecode(name).isidentifier():
            lines.append(b"export " + name + b"=" + _quote(value))
    lines.append(b"cd -- " + _quote(program.cwd) + b" || exit 126")
    lines.append(b"exec " + b" ".join(map(_quote, spawn.build_command_line(program))))
    return b"\n".join(lines) + b"\n"


def _quote(text: bytes) -> bytes:
    return os.fsencode(shlex.quote(os.fsdecode(text)))


def _copy_rank_environment(runs: RunCommands, arguments: command_payload_types.RankArguments) -> spawn.Program:
    """Return a program without `argv`, with the folder and environment of a rank but not the markers of the run."""
    run, rank = runs.find_run(arguments), int(arguments["rank"])
    started = runs.journal_states.read_state(run).started.get(rank)
    process = None if started is None else proc.read_identity(started.pid)
    if started is None or process is None or process.start_time != started.start_time:
        raise RequestError(ErrorKind.NOT_FOUND, f"rank {rank} of run {run.run} is not running here")
    env = {name: value for name, value in proc.read_environment(process.pid).items() if name not in _RUN_VARIABLES}
    entries = [entry for entry in env.pop(b"PYTHONPATH", b"").split(b":") if entry and not inject.is_shim_folder(entry)]
    if entries:
        env[b"PYTHONPATH"] = b":".join(entries)
    try:
        cwd = os.readlink(os.fsencode(f"/proc/{process.pid}/cwd"))
    except OSError as error:
        text = f"cannot read the working directory of rank {rank}: {error.strerror}"
        raise RequestError(ErrorKind.REFUSED, text) from error
    is_elsewhere = not os.path.samefile(f"/proc/{process.pid}/root", "/")
    return spawn.Program(argv=[], env=env, cwd=cwd, container=process.pid if is_elsewhere else None)
