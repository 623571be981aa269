"""The deep check before a run, with the key `health.deep` of the cluster file.

It is a process of its own, because `up` forks its controller, and a process that has had threads must not fork.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

from clusterctl.config.spec import ClusterSpec, dump_spec
from clusterctl.errors import ClusterctlError, UnhealthyError
from clusterctl.formatting import plural
from clusterctl.health.findings import Finding, Status, finding_from_json
from clusterctl.plan.layout import choose_nodes
from clusterctl.run.record.health_history import read_deep_results
from clusterctl.run.record.rundir import find_runs_root

_NIGHTLY_S = 24 * 3600.0


def check_before_start(spec: ClusterSpec, *, strict: bool) -> None:
    """Measure the nodes of a run if the cluster file demands it. Progress goes to stderr.

    With `nightly`, the results of the last day are used if they concern all nodes of the run.

    Raises:
        UnhealthyError: A check of the measurements failed.
        ClusterctlError: The process that measures failed.
    """
    if spec.health.deep is None:
        return
    nodes = {host.name for host in choose_nodes(spec).worker_hosts}
    last = read_deep_results(find_runs_root().parent, spec) if spec.health.deep == "nightly" else None
    if last is not None and last.time > time.time() - _NIGHTLY_S and nodes <= {*last.nodes}:
        findings = list(last.findings)
    else:
        findings = _measure_in_new_process(spec)
    bad_statuses = (Status.FAIL, Status.WARN, Status.UNKNOWN) if strict else (Status.FAIL,)
    bad = [f for f in findings if f.status in bad_statuses and (f.node is None or f.node in nodes)]
    if bad:
        raise UnhealthyError(
            f"{plural(len(bad), 'check')} failed under load; nothing was started",
            bad,
            hint="`--exclude NODE` starts without a node; `clusterctl health --deep` measures again",
        )


def _measure_in_new_process(spec: ClusterSpec) -> list[Finding]:
    argv = [sys.executable, "-m", "clusterctl.cli.deep_start_process"]
    done = subprocess.run(argv, input=dump_spec(choose_nodes(spec)), stdout=subprocess.PIPE, text=True, check=False)
    try:
        return [finding_from_json(entry) for entry in json.loads(done.stdout)]
    except ValueError:
        raise ClusterctlError(f"the process of the deep check failed with exit code {done.returncode}") from None
