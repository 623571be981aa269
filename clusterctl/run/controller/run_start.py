"""Starts the controller of a new run: by a fork of this process, or from a new process.

A fork without exec keeps secrets and imported modules, but a process with threads must not fork. It runs this module
(`new_process_start`), which reads the spec from stdin and prints the run or the error.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace

from clusterctl.config.spec import ClusterSpec, dump_spec, load_spec
from clusterctl.errors import ClusterctlError, ExitCode, RefusedError
from clusterctl.run.controller import detached_process
from clusterctl.run.controller.main import start_run
from clusterctl.run.record import disk_files, run_origin, rundir
from clusterctl.run.record.rundir import RunDir


def start_controller(spec: ClusterSpec, *, health: bool, strict: bool, max_wait_s: float = 0.0) -> RunDir:
    """Create a run and start its controller, which continues after this process. Ctrl-C is deferred from then on.

    `max_wait_s` limits the wait for GPUs that other runs hold.

    Raises:
        RefusedError: The folder of the run cannot be created, or the controller refuses the run.
        ClusterctlError: The controller ended during its start.
    """
    detached_process.defer_signals()
    try:
        run = rundir.create_run_dir(spec.name)
        disk_files.write_atomically(run.spec, dump_spec(spec).encode(), durable=True)
        run_origin.save_origin(run, spec)
    except OSError as error:
        hint = "set XDG_STATE_HOME to a writable folder"
        raise RefusedError(f"the folder of the run cannot be created: {error}", hint=hint) from error
    try:
        detached_process.run_detached(
            run, lambda: start_run(run, spec, health=health, strict=strict, max_wait_s=max_wait_s)
        )
    except ClusterctlError as error:
        if error.exit_code == ExitCode.REFUSED:
            shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def main() -> None:
    """Start the run that stdin describes, and print its id or the error."""
    request = json.load(sys.stdin)
    spec = replace(load_spec(request["spec"]), secrets=request["secrets"])
    try:
        answer: dict[str, object] = {
            "run": start_controller(spec, health=request["health"], strict=request["strict"]).run
        }
    except ClusterctlError as error:
        answer = {"error": str(error), "hint": error.hint, "exit_code": int(error.exit_code)}
    print(json.dumps(answer))  # noqa: T201


if __name__ == "__main__":
    main()
