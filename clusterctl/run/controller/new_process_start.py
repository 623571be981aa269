"""Starts the controller of a new run from a process with threads, such as a program that uses `clusterctl.api`.

This module imports nothing of the controller, so that a command which rarely starts a run begins quickly.
"""

from __future__ import annotations

import json
import subprocess
import sys

from clusterctl.config.spec import ClusterSpec, dump_spec
from clusterctl.errors import ClusterctlError, ExitCode, RefusedError
from clusterctl.run.record import rundir
from clusterctl.run.record.rundir import RunDir


def start_controller_in_new_process(spec: ClusterSpec, *, health: bool, strict: bool) -> RunDir:
    """Create a run and start its controller by `run_start`, in a process without threads.

    Raises:
        ClusterctlError: The run cannot be started; `exit_code` says why.
    """
    request = {"spec": dump_spec(spec), "secrets": spec.secrets, "health": health, "strict": strict}
    argv = [sys.executable, "-m", "clusterctl.run.controller.run_start"]
    done = subprocess.run(argv, input=json.dumps(request), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise ClusterctlError(f"the process that starts controllers failed: {done.stderr.strip()[-500:]}") from None
    if "error" in answer:
        code = ExitCode(answer["exit_code"])
        error_class = RefusedError if code is ExitCode.REFUSED else ClusterctlError
        error = error_class(answer["error"], hint=answer["hint"])
        error.exit_code = code
        raise error
    return RunDir(rundir.find_runs_root() / answer["run"])
