"""The facts of a node that planning needs, cheap enough for every connection."""

from __future__ import annotations

import os
import pwd
import sys
import time

from clusterctl.agent.linux import addresses, cgroup, gpus, helper_process, proc, sysfs
from clusterctl.agent.linux.logind import read_logind_settings
from clusterctl.agent.linux.syscalls import read_bytes
from clusterctl.agent.node_state import run_dir
from clusterctl.agent.protocol import commands

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.linux.helper_process import HelperOutput
    from clusterctl.agent.protocol.command_types import HelloAnswer

_LOOK_UP_TIMEOUT_S = 3.0


def collect_hello(root: str) -> HelloAnswer:
    """Return the facts of the machine and its user."""
    user, home, shell = read_account()
    network_home = run_dir.is_on_network_filesystem(home)
    # Of our CPU set, or fewer if a cgroup limits the CPU time.
    cores, limit = len(os.sched_getaffinity(0)), cgroup.read_cpu_limit()
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return {
        "protocol": commands.PROTOCOL_VERSION,
        "version": _read_version(),
        "python": sys.executable,
        "python_version": sys.version.split()[0],
        "hostname": os.uname().nodename,
        "boot_id": proc.read_boot_id(),
        "pid_ns": proc.read_pid_namespace(),
        "net_ns": proc.read_namespace("net"),
        "uid": os.getuid(),
        "user": user,
        "home": home,
        "shell": shell,
        "state_root": root,
        "mono": time.monotonic(),
        "wall": time.time(),
        "cores": cores if limit is None else max(1, min(cores, int(limit))),
        "memory": proc.read_meminfo().get("MemTotal", 0),
        "machine": os.uname().machine,
        "kernel": os.uname().release,
        "gpus": gpus.count_gpus(),
        "addresses": addresses.list_addresses(),
        # The address of this machine behind any jump host or translation.
        "reached_at": connection[2] if len(connection) == 4 else None,
        "rdma": bool(sysfs.list_names("/", "/sys/class/infiniband")),
        "logind": read_logind_settings(user),
        "home_is_network": network_home,
        "login": _read_login_variables(home, network_home),
    }


def _read_login_variables(home: str, network_home: bool) -> dict[str, str]:
    """Return the variables of a rank that the login sets, and those of NCCL that its configuration files set."""
    found = {name: os.environ[name] for name in commands.LOGIN_VARIABLES if name in os.environ}
    files = ["/etc/nccl.conf"] if network_home else ["/etc/nccl.conf", f"{home}/.nccl.conf"]
    if any(os.path.exists(path) for path in files):
        from clusterctl.agent.facts import host

        of_files = host.read_nccl_conf(files)
        found = {**{name: value for name, value in of_files.items() if name in commands.LOGIN_VARIABLES}, **found}
    return {n: v.encode("utf-8", "replace").decode()[: commands.MAX_LOGIN_VALUE_CHARS] for n, v in found.items()}


def read_account() -> tuple[str, str, str]:
    """Return name, home and login shell of this user; a helper asks the directory service, which may never answer."""
    env, uid = os.environ, os.getuid()
    for line in read_bytes("/etc/passwd").decode("utf-8", "surrogateescape").splitlines():
        words = line.split(":")
        if len(words) == 7 and words[2] == str(uid):
            return words[0], env.get("HOME") or words[5], words[6]
    try:
        found = helper_process.parse_result(helper_process.run_in_helper(_look_up_account, _LOOK_UP_TIMEOUT_S))
    except OSError as error:
        found = error
    if isinstance(found, Exception):
        return env.get("LOGNAME") or str(uid), env.get("HOME") or "/", env.get("SHELL", "")
    return found["name"], env.get("HOME") or found["home"], found["shell"]


def _look_up_account(_out: HelperOutput) -> dict[str, str]:
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:
        return {"name": str(os.getuid()), "home": "/", "shell": os.environ.get("SHELL", "")}
    return {"name": user.pw_name, "home": user.pw_dir, "shell": user.pw_shell}


def _read_version() -> str:
    try:
        from clusterctl import _version

        return str(_version.__version__)
    except ImportError:
        return ""
