"""What the controller's process does: build the controller of a run and let it work."""

from __future__ import annotations

import os
import pwd
import sys
import traceback
from collections.abc import Callable

from clusterctl.agent.linux.logind import read_logind_settings
from clusterctl.config.spec import ClusterSpec, HostSpec, load_spec
from clusterctl.run.controller import process
from clusterctl.run.controller.loop import Controller
from clusterctl.run.controller.run import Dial
from clusterctl.run.nodes.preflight import Preflight
from clusterctl.run.record import run_facts, saved_verdict
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.record.state_reader import load_state
from clusterctl.run.rules.logind import describe_head_warning
from clusterctl.session.connect import Transports, open_session
from clusterctl.session.inbox import ItemQueue
from clusterctl.session.session import Session

_LEAST_TURN = 0.05
"""How long a thread may keep the interpreter while others wait for it, each of which asks anew that often.

With the default of 5 ms the thousands of threads of a large run took more of the processor for asking than for work.
"""
_ASKED_EACH_SECOND = 4000
"""What asks for it, of all nodes together, where every one of them has something to say at once."""


def choose_switch_interval_s(nodes: int) -> float:
    """Return how long a thread may keep the interpreter in a run of so many nodes, in seconds."""
    return max(_LEAST_TURN, nodes / _ASKED_EACH_SECOND)


def build_dialer(spec: ClusterSpec) -> Callable[[ItemQueue], Dial]:
    """Return what makes the controller's way to open a session to one host."""
    transports = Transports(spec.ssh)

    def for_inbox(inbox: ItemQueue) -> Dial:
        def dial(host: HostSpec, progress: Callable[[str], None]) -> Session:
            return open_session(transports.of(host), host, inbox, progress=progress)

        return dial

    return for_inbox


def start_run(run: RunDir, spec: ClusterSpec, *, health: bool, strict: bool) -> int:
    """Run a new run to its end; return its exit code."""
    sys.setswitchinterval(choose_switch_interval_s(len(spec.hosts)))
    preflight = Preflight(run, spec, strict=strict) if health else None
    controller = Controller(run, spec, build_dialer(spec), preflight)
    process.report_ready()
    run_facts.save_commit(run, os.path.dirname(spec.path) or ".")
    return _save_verdict(run, controller.start(_list_head_warnings()))


def _save_verdict(run: RunDir, code: int) -> int:
    """Keep what went wrong with a run that has ended, for whoever comes back later; return its exit code."""
    if code != 0:
        # Whatever goes wrong with it: the run has ended, and with this code. `why` judges it anew.
        try:
            saved_verdict.save_verdict(run, saved_verdict.judge_saved_run(run, load_state(run)))
        except Exception:
            traceback.print_exc()
    return code


def _list_head_warnings() -> list[str]:
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return []
    warning = describe_head_warning(read_logind_settings(user), user)
    return [warning] if warning else []


def adopt_run(run: RunDir, *, cancel: bool = False, kill: bool = False) -> int:
    """Go on with a run that has no controller, or end it; return its exit code."""
    spec = load_spec(run.spec.read_text())
    sys.setswitchinterval(choose_switch_interval_s(len(spec.hosts)))
    controller = Controller(run, spec, build_dialer(spec))
    if cancel:
        controller.cancel(kill=kill)
    process.report_ready()
    return _save_verdict(run, controller.adopt())
