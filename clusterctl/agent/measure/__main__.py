"""The guard of a rank: starts the child that measures, limits each of its steps, and reports how the child ended."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

_MAX_TAIL = 1500
_STORE_LIMIT_S = 20.0
"""Seconds that the store may outlive the rank 0."""
_EXIT_LIMIT_S = 5.0


def main(arguments: list[str]) -> int:
    """Run the guard of this rank. The parts import torch, so each is a process of its own."""
    settings = json.loads(arguments[0])
    store = _start(arguments[0], "network_rounds")[0] if os.environ["RANK"] == "0" else None
    _guard_child(settings["mark"], *_start(arguments[0], "rank_steps"), float(settings["start_limit_s"]))
    if store is not None and _wait(store, _STORE_LIMIT_S) is None:
        os.kill(store, signal.SIGKILL)
    return 0


def _start(settings: str, part: str) -> tuple[int, int, int]:
    """Start a part; return its pid, its stdout and its stderr.

    `posix_spawn` starts it, because the shim records a failed child of `subprocess` as a failure of the rank.
    """
    outputs, output_writer = os.pipe()
    errors, error_writer = os.pipe()
    env = {name: value for name, value in os.environ.items() if name != "CLUSTERCTL_STATUS_DIR"}
    argv = [sys.executable, "-m", f"{__package__}.{part}", settings]
    moves = [(os.POSIX_SPAWN_DUP2, output_writer, 1), (os.POSIX_SPAWN_DUP2, error_writer, 2)]
    pid = os.posix_spawn(sys.executable, argv, env, file_actions=moves)
    os.close(output_writer)
    os.close(error_writer)
    return pid, outputs, errors


def _guard_child(mark: str, pid: int, outputs: int, errors: int, limit_s: float) -> None:
    """Pass the lines of the child on until it ends, or kill it once a step lasts too long."""
    step: dict[str, Any] = {"begin": "start"}
    deadline = time.monotonic() + limit_s
    buffer, tail, open_pipes = b"", b"", {outputs, errors}
    while open_pipes and time.monotonic() < deadline:
        for pipe in select.select(open_pipes, [], [], max(0.0, deadline - time.monotonic()))[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                open_pipes.discard(pipe)
            elif pipe == errors:
                tail = (tail + chunk)[-_MAX_TAIL:]
            else:
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    sys.stdout.write(line.decode(errors="replace") + "\n")
                    if b'"begin": ' in line:
                        step = json.loads(line[len(mark) :])
                        limit_s = step["limit_s"]
                        deadline = time.monotonic() + limit_s
                sys.stdout.flush()
    status = _wait(pid, _EXIT_LIMIT_S) if not open_pipes else None
    if status == 0:
        return
    if status is None:
        os.kill(pid, signal.SIGKILL)
        gone = _wait(pid, _EXIT_LIMIT_S) is not None
        reason = f"no answer within {limit_s:g} s" + ("" if gone else ", and SIGKILL did not end the process")
    elif os.WIFSIGNALED(status):
        reason = f"the process was killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        reason = f"exit code {os.WEXITSTATUS(status)}"
    last = tail.decode(errors="replace").strip().rpartition("\n")[2].strip()
    text = f"{reason}: {last}" if last else reason
    failed = {"step": "failed", "during": step["begin"], "round": step.get("round"), "is_late": status is None}
    values = {"rank": int(os.environ["RANK"]), "t": time.time(), **failed, "reason": text}
    sys.stdout.write(mark + json.dumps(values) + "\n")
    sys.stdout.flush()


def _wait(pid: int, limit_s: float) -> int | None:
    """Return the status of an ended child; `None` if it has not ended within `limit_s`."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(0.02)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
