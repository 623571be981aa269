"""Workers that a launcher of the node starts, as torchrun does, rather than we: each behind a waiter of its own.

The launcher is told to start `hosted` in place of a worker. That is a small process of ours in the worker's place: it
sends the worker's output to the file of its rank, waits for it, writes down how it ended, and ends in the same way. So
every rank has its output, its exit and its errors, as if we had started it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import TYPE_CHECKING, NoReturn

from clusterctl.agent.linux import helper_process, spawn, syscalls
from clusterctl.agent.supervisor import waiter

if TYPE_CHECKING:
    from clusterctl.agent.protocol import requests
    from clusterctl.agent.record.rundir import RunDir

FILES = "launcher."
"""What stands before the kind in the names of a launcher's own files, so that they are not those of its first rank."""

_GROUP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def places(one: requests.WorkerStart) -> list[list[int]]:
    """Return rank and local rank of each worker that comes of one start."""
    return [[rank, local] for local, rank in enumerate(one.hosts)] if one.hosts else [[one.rank, one.local_rank]]


def argv(run: RunDir, attempt: int, one: requests.WorkerStart, python: str) -> list[str]:
    """Return the command line of a launcher, which starts `hosted` once for each of its workers."""
    inner = [
        python if word == spawn.PYTHON_PLACEHOLDER and not index else word for index, word in enumerate(one.hosted)
    ]
    return [
        *one.argv,
        *helper_process.build_agent_command("hosted", os.path.join(run.attempt(attempt), "rank-"), *inner),
    ]


def environment(run: RunDir, attempt: int, one: requests.WorkerStart) -> dict[bytes, bytes]:
    """Return what a launcher is told beyond what a worker is: where its logs and the errors of its workers go."""
    return {
        b"TORCHELASTIC_ERROR_FILE": spawn.encode_peer_text(run.of_rank(attempt, one.rank, FILES + "error.json")),
        b"PET_LOG_DIR": spawn.encode_peer_text(os.path.join(run.attempt(attempt), "torchrun")),
    }


def main(arguments: list[str]) -> NoReturn:
    """Be the waiter of one worker: `PREFIX ARGV...`, where PREFIX and $RANK give the names of its files."""
    prefix, *command = arguments
    files = f"{prefix}{int(os.environ['RANK'])}."
    with contextlib.suppress(KeyError, OSError):
        # Written by the worker, read by the launcher for its own report and by the supervisor for ours.
        os.symlink(os.environ["TORCHELASTIC_ERROR_FILE"], files + "error.json")
    output = os.open(files + "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    program = spawn.Program([spawn.encode_peer_text(word) for word in command], dict(os.environb), os.getcwdb())
    post = waiter.Post(program=program, output=output, spawn_file=files + "spawn", exit_file=files + "exit")
    spawn.disable_core_dumps()
    # The launcher signals the whole group, so the worker hears it by itself.
    for number in _GROUP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    _end_like(waiter.stand_in(post))


def _end_like(status: int) -> NoReturn:
    """End as the worker did, without a second core."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        syscalls.write_all(2, b"clusterctl: a signal that should end this process did not\n")
        os._exit(128 + number)
    os._exit(os.WEXITSTATUS(status))
