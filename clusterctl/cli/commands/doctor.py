"""`clusterctl doctor`."""

from __future__ import annotations

import contextlib
import os
import pwd
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import psutil

from clusterctl.agent.linux import filesystems
from clusterctl.agent.linux.logind_and_nccl_files import read_logind_settings
from clusterctl.agent.linux.syscalls import read_clock_error
from clusterctl.cli import options
from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.errors import ClusterctlError, ExitCode
from clusterctl.formatting import format_size
from clusterctl.health.findings import Status
from clusterctl.health.head_self_checks import (
    ControllerFacts,
    HeadFacts,
    SshAgentFacts,
    StateFolderFacts,
    compute_head_verdict,
    judge_head,
)
from clusterctl.render.health_report import render_head_checks
from clusterctl.run.record import lock_files
from clusterctl.run.record.disk_files import make_private_folder
from clusterctl.run.record.rundir import RunDir, find_runs_root
from clusterctl.run.record.state_reader import list_runs
from clusterctl.run.rules.logout_check import kills_at_logout
from clusterctl.transport.ssh.login_keys import SshAgent, SshAgentError

_SSH_TIMEOUT_S = 5.0


@click.command("doctor", cls=CliCommand)
@options.json_option
@click.pass_obj
def command(common: CommonOptions, as_json: bool) -> int:
    """Check whether this machine can start and control runs.

    `doctor` checks ssh and its agent, the folder of the runs, the limit of open files, the clock, and whether a logout
    kills processes. `doctor` also lists the controllers on this machine, and exits with 5 if no run can start from
    here.
    """
    console = common.console()
    facts = read_head_facts()
    findings = judge_head(facts, format_size)
    worst = compute_head_verdict(findings)
    if as_json:
        console.write_stdout_json(
            {
                "verdict": worst.value,
                "findings": [finding.to_json() for finding in findings],
                "controllers": [controller.to_json() for controller in facts.controllers],
            }
        )
    else:
        console.write_stdout(*render_head_checks(findings, worst, console.out))
    return int(ExitCode.UNHEALTHY if worst is Status.FAIL else ExitCode.OK)


def read_head_facts() -> HeadFacts:
    """Return facts about this machine. Create the state folder if there is none; change nothing else."""
    user = _get_user_name()
    return HeadFacts(
        python=sys.version_info[:3],
        ssh=_read_ssh_version(),
        ssh_agent=_read_ssh_agent_facts(),
        folder=_read_state_folder_facts(find_runs_root().parent),
        open_files=_read_open_files_limits(),
        killed_at_logout=kills_at_logout(read_logind_settings(user)),
        user=user,
        clock_error=read_clock_error(),
        controllers=tuple(_list_controllers()),
    )


def _get_user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _read_ssh_version() -> str | None:
    program = shutil.which("ssh")
    if program is None:
        return None
    try:
        done = subprocess.run(
            [program, "-V"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SSH_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stderr or done.stdout).strip().partition("\n")[0].partition(",")[0] or None


def _read_ssh_agent_facts() -> SshAgentFacts | None:
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        return None
    try:
        return SshAgentFacts(keys=len(SshAgent(path).identities()))
    except SshAgentError as error:
        return SshAgentFacts(error=str(error))


def _read_state_folder_facts(folder: Path) -> StateFolderFacts:
    error = _try_folder(folder)
    existing = next(place for place in (folder, *folder.parents) if place.exists()).resolve()
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kind = next((mounts[above] for above in (existing, *existing.parents) if above in mounts), None)
    free = None
    with contextlib.suppress(OSError):
        usage = psutil.disk_usage(str(existing))
        free = usage.free if usage.total else None  # a pseudo file system such as /proc has no size
    shared = kind is not None and filesystems.may_hang(kind)
    return StateFolderFacts(path=str(folder), filesystem=kind, shared=shared, free=free, error=error)


def _try_folder(folder: Path) -> str | None:
    """Write a file and take a lock as a controller does. Return the reason of a failure, or `None`."""
    try:
        make_private_folder(folder)
        with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as trial:
            os.close(lock_files.take_lock(Path(trial) / "lock"))
    except OSError as error:
        return error.strerror or str(error)
    except ClusterctlError as error:
        return str(error)
    return None


def _read_open_files_limits() -> tuple[int | None, int | None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (None if soft == unlimited else soft, None if hard == unlimited else hard)


def _list_controllers() -> list[ControllerFacts]:
    found = (_read_controller_facts(run) for run in list_runs() if run.is_attended)
    return [controller for controller in found if controller is not None]


def _read_controller_facts(run: RunDir) -> ControllerFacts | None:
    """Return facts about the controller of a run; `None` if it is on another machine or has just ended."""
    holder = run.last_controller
    if holder is None or holder.host != socket.gethostname():
        return None
    try:
        process = psutil.Process(holder.pid)
        with process.oneshot():
            times = process.cpu_times()
            return ControllerFacts(
                run=run.run, pid=holder.pid, cpu_s=times.user + times.system, memory=process.memory_info().rss
            )
    except psutil.Error:
        return None
