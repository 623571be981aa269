"""Writes the script of `clusterctl shell`, which starts a shell in the folder and environment of a job or a rank.

The script is a file, because it may contain secrets, and all users of a machine can see command lines.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from typing import TYPE_CHECKING

from clusterctl.agent import inject
from clusterctl.agent.linux import proc, spawn
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
    if arguments.get("container"):
        hint = "`clusterctl exec --env -- COMMAND` runs a command in a container"
        raise RequestError(ErrorKind.REFUSED, "a shell in the container of the workers is not possible", hint)
    program = _copy_rank_environment(runs, rank) if rank else None
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else session.state_root

    def write() -> command_payload_types.ShellScriptAnswer:
        argv = [str(word) for word in arguments.get("argv") or [read_account()[2] or "/bin/sh"]]
        if program is not None:
            whole = spawn.Program([spawn.encode_text(word) for word in argv], program.env, program.cwd)
        else:
            whole = build_program(arguments, argv, resolve_folder(arguments.get("cwd")))
            prepare = make_python_path_setup(arguments)
            whole = prepare(whole) if prepare else whole
        descriptor, path = tempfile.mkstemp(prefix="clusterctl-shell-", dir=folder)
        with open(descriptor, "wb") as file:
            file.write(format_script(whole))
        return {"path": path}

    # Run `write` in a helper process, because a directory service or a file server may hang.
    session.run_task(request_id, lambda _out: write())


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
    return spawn.Program(argv=[], env=env, cwd=cwd)
