"""The entry points of the controller's process: start a run, or adopt one."""

from __future__ import annotations

import contextlib
import os
import pwd
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from clusterctl.agent.linux.logind_and_nccl_files import read_logind_settings
from clusterctl.config.spec import ClusterSpec, HostSpec, NotifySpec, load_spec
from clusterctl.errors import NoPythonError
from clusterctl.run.controller import detached_process
from clusterctl.run.controller.controlled_run import Dial
from clusterctl.run.controller.loop import Controller
from clusterctl.run.nodes.preflight import Preflight
from clusterctl.run.record import machine_ledger, run_origin, saved_verdict
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules.logout_check import describe_head_logout_warning
from clusterctl.session.connect import Transports, open_session
from clusterctl.session.controller_inbox import InboxItemQueue
from clusterctl.session.node_session import Session

_MIN_SWITCH_INTERVAL_S = 0.05
"""The shortest switch interval of the interpreter, in seconds.

Each waiting thread requests the interpreter once per interval.

With the default interval of 5 ms, the thousands of threads of a large run spent more CPU time on requests than on work.
"""
_MAX_REQUESTS_PER_S = 4000
"""The most requests for the interpreter per second, of all threads together, while every node sends data."""


def choose_switch_interval_s(nodes: int) -> float:
    """Return the switch interval of the interpreter for a run of `nodes` nodes, in seconds."""
    return max(_MIN_SWITCH_INTERVAL_S, nodes / _MAX_REQUESTS_PER_S)


def build_dialer(spec: ClusterSpec) -> Dial:
    """Return the function that opens a session to a host. A host without a Python gets one with its environment."""
    transports = Transports(spec.ssh)

    def dial(host: HostSpec, inbox: InboxItemQueue, progress: Callable[[str], None]) -> Session:
        transport = transports.get_transport(host)
        try:
            return open_session(transport, host, inbox, progress=progress)
        except NoPythonError:
            if spec.environment is None or spec.environment.container is not None:
                raise
        from clusterctl.run.environments.bare_node import send_python  # It loads what downloads packages.

        send_python(transport, host, spec.environment, progress)
        return open_session(transport, host, inbox, progress=progress)

    return dial


def start_run(run: RunDir, spec: ClusterSpec, *, health: bool, strict: bool, max_wait_s: float = 0.0) -> int:
    """Start a new run and control it until it ends; return the exit code of the run.

    `max_wait_s` limits the wait for GPUs that other runs hold.
    """
    sys.setswitchinterval(choose_switch_interval_s(len(spec.hosts)))
    preflight = Preflight(run, spec, strict=strict) if health else None
    controller = Controller(run, spec, build_dialer(spec), preflight, max_wait_s)
    detached_process.report_ready()
    run_origin.save_commit(run, os.path.dirname(spec.path) or ".")
    with _send_messages(run, spec, controller):
        return _save_verdict(run, controller.start(_list_head_warnings()))


@contextlib.contextmanager
def _send_messages(run: RunDir, spec: ClusterSpec, controller: Controller) -> Iterator[None]:
    """Send the messages of `notify` while the run lasts, and afterwards for a limited time."""
    if spec.notify == NotifySpec():
        yield
        return
    from clusterctl.run.controller.notifier import Notifier  # It loads clients of HTTP, which most runs do not need.

    notifier = Notifier(run, spec, controller.post_note)
    notifier.start()
    yield
    notifier.finish()


def _save_verdict(run: RunDir, code: int) -> int:
    """Save the verdict of a failed run, and the history of its machines. Return `code`, the exit code of the run."""
    # An error here must not change the exit code of the run. `why` computes the verdict again.
    try:
        verdict = saved_verdict.judge_saved_run(run, load_state(run)) if code != 0 else None
        if verdict is not None:
            saved_verdict.save_verdict(run, verdict)
        machine_ledger.record_run(run, time.time(), verdict)
    except Exception:
        traceback.print_exc()
    return code


def _list_head_warnings() -> list[str]:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return []
    warning = describe_head_logout_warning(read_logind_settings(user), user)
    return [warning] if warning else []


def adopt_run(run: RunDir, *, cancel: bool = False, kill: bool = False) -> int:
    """Adopt a run without a controller, or cancel the run; return the exit code of the run."""
    spec = load_spec(run.spec.read_text())
    sys.setswitchinterval(choose_switch_interval_s(len(spec.hosts)))
    controller = Controller(run, spec, build_dialer(spec))
    if cancel:
        controller.cancel(kill=kill)
    detached_process.report_ready()
    with _send_messages(run, spec, controller):
        return _save_verdict(run, controller.adopt())
