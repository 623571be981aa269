"""The command `enter` of the agent: it executes a program in the files of a container, in the caller's terminal."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from clusterctl.agent.environment import container_keeper
from clusterctl.agent.linux import helper_process, spawn
from clusterctl.agent.protocol import command_messages


def main(arguments: list[str]) -> int:
    """Execute the program that a JSON file describes, and remove the file: it may contain secrets.

    Args:
        arguments: The path of the file. Its keys are `argv`, `cwd`, `env` and `prologue`, and `pid`, a process of the
            container. If `pid` is `None`, `container` (`command_payload_types.Container`) is started, and `root` is
            the state root.
    """
    (path,) = arguments
    with open(path, encoding="utf-8") as file:
        request: dict[str, Any] = json.load(file)
    os.unlink(path)
    env = {os.fsencode(name): os.fsencode(value) for name, value in request["env"].items()}
    pid, folder = request.get("pid"), request["cwd"]
    if pid is None:
        folders = [folder, helper_process.find_import_root()]
        try:
            keeper = container_keeper.start_program_keeper(request["root"], request["container"], folders)
        except command_messages.RequestError as error:
            sys.stderr.write(f"clusterctl: {error}\n")
            return spawn.EXIT_NOT_EXECUTABLE
        env, pid = {**keeper.read_environment(), **env}, keeper.pid
        folder = folder if os.path.isdir(folder) else "/"
    prologue = None if request["prologue"] is None else os.fsencode(request["prologue"])
    env[b"TERM"] = os.environb.get(b"TERM", b"dumb")
    argv = [os.fsencode(word) for word in request["argv"]]
    return spawn.exec_program(spawn.Program(argv, env, os.fsencode(folder), prologue, None, pid))
