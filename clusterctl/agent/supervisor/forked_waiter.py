"""Command of the agent: the waiter of a rank that a forkserver forked.

`wait TOLD REPORT GO READY WORKER KEEP...`, all of them numbers. The forkserver has forked the waiter and the worker;
the
waiter then executed the agent. The worker is its child, and it is a child of the supervisor, as for every worker.
"""

from __future__ import annotations

import json
import os
import select
from typing import TYPE_CHECKING, Any, NoReturn

from clusterctl.agent.linux import spawn
from clusterctl.agent.supervisor import waiter

if TYPE_CHECKING:
    from clusterctl.agent.linux.helper_process import HelperOutput, Task
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes.run_processes import KnownProcesses


_READY_TIMEOUT_S = 5.0
"""Seconds in which a forked rank may get ready; then its waiter starts it as it is."""


def main(arguments: list[str]) -> NoReturn:
    """Run the waiter."""
    told, report, go, ready, worker, *keep = map(int, arguments)
    try:
        for fd in (told, report, go, ready, *keep):
            os.set_inheritable(fd, False)
        value = json.loads(os.pread(told, os.fstat(told).st_size, 0))
        spawn.disable_core_dumps()
        if _wait_until_ready(ready):
            waiter.wait_for_forked_worker(_make_waiter_config(value, keep), worker, (report, go), value["supervisor"])
    except OSError as error:
        os.write(report, json.dumps({"error": error.strerror}).encode() + b"\n")
    except BaseException as error:
        os.write(report, json.dumps({"refused": f"its waiter failed: {error!r}"}).encode() + b"\n")
    finally:
        os._exit(1)


def _wait_until_ready(ready: int) -> bool:
    """Return whether the rank waits at its gate; a rank that fails before has reported this itself and ended."""
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    return not poll.poll(_READY_TIMEOUT_S * 1000) or bool(os.read(ready, 1))


def _make_fence_task(value: dict[str, Any]) -> Task:
    """Return the task that ends everything of the run here. It imports now, while the files still exist."""
    from clusterctl.agent.node_state.run_dir import RunDir
    from clusterctl.agent.processes import run_markers, run_processes, termination

    def enforce(_out: HelperOutput) -> dict[str, Any]:
        run = RunDir(value["root"], value["run"], value["node"])
        known_processes = run_processes.KnownProcesses(cgroup=value["folder"], stop_signal=value["stop_signal"])
        return termination.terminate_for_fence(
            run, run_markers.make_run_markers(run), value["attempt"], known_processes, value["grace"]
        )

    return enforce


def _make_waiter_config(value: dict[str, Any], keep: list[int]) -> waiter.WaiterConfig:
    # Most runs have no fence, and a start need not wait for these imports.
    return waiter.WaiterConfig(
        program=spawn.Program([], {}),
        output=-1,
        spawn_file=value["spawn_file"],
        exit_file=value["exit_file"],
        kept_descriptors=keep,
        stop_after=value["stop_after"],
        lease=value["lease"],
        enforce=None if value["stop_after"] is None else _make_fence_task(value),
        title=value["title"],
    )


def build_fence_context(run: RunDir, attempt: int, grace: float, known_processes: KnownProcesses) -> dict[str, Any]:
    """Return the values that such a waiter needs to enforce a fence."""
    who = {"root": run.root, "run": run.run, "node": run.node}
    return {
        **who,
        "attempt": attempt,
        "grace": grace,
        "folder": known_processes.cgroup,
        "stop_signal": int(known_processes.stop_signal),
    }
