"""The command `environment` of the agent: it makes an entry in the folder of environments, once."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from clusterctl.agent.environment import store
from clusterctl.agent.linux import syscalls


def main(_arguments: list[str]) -> int:
    """Make the entry that the JSON on stdin describes; return an exit code."""
    return make_entry(json.load(sys.stdin))


def make_entry(request: dict[str, Any]) -> int:
    """Run the steps that make an entry, unless it is made; return the exit code of the first step that fails, or 0.

    Only one process makes an entry, also if nodes share the folder. Output goes to stdout.

    Args:
        request: `folder`, `name`, `cwd`, `env`, `path` (a folder to put first on PATH, or missing), `uses` (names of
            other entries and packages that the entry needs), `proof` (a path that a whole entry contains) and `steps`,
            each with `argv` and `stdin`.
    """
    folder, place = request["folder"], f"{request['folder']}/{request['name']}"
    store.make_folder(folder)
    with open(f"{folder}/.locks/{request['name']}", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another run that makes the same")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if store.is_made(place):
            return 0
        store.remove(place)
        env = {**os.environ, **request["env"]}
        if request.get("path"):
            env["PATH"] = os.pathsep.join([os.path.expanduser(request["path"]), env.get("PATH", os.defpath)])
        began = time.monotonic()
        for step in request["steps"]:
            try:
                done = subprocess.run(
                    step["argv"],
                    input=step.get("stdin", "").encode(),
                    cwd=os.path.expanduser(request["cwd"]),
                    env=env,
                    stderr=1,
                    check=False,
                    preexec_fn=functools.partial(syscalls.set_parent_death_signal, signal.SIGKILL),
                )
            except OSError as error:
                _say(f"cannot run {step['argv'][0]}: {error.strerror}")
                return 127
            if done.returncode:
                return done.returncode if done.returncode > 0 else 128 - done.returncode
        os.makedirs(place, exist_ok=True)
        made = {"proof": request["proof"], "uses": request["uses"], "bytes": store.measure(place)}
        syscalls.write_atomically(f"{place}/{store.MARKER}", json.dumps(made).encode(), durable=True)
        _say(f"made in {time.monotonic() - began:.1f} s")
        return 0


def _say(text: str) -> None:
    sys.stdout.write(f"clusterctl: {text}\n")
    sys.stdout.flush()
