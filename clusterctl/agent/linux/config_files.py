"""Configuration files of the machine that change how a job runs: those of logind and of NCCL."""

from __future__ import annotations

import glob
import os

from clusterctl.agent.linux.syscalls import read_bytes

TYPE_CHECKING = False
if TYPE_CHECKING:
    from clusterctl.agent.protocol.command_payload_types import LogindSettings


_LOGIND_FILES = (
    "/usr/lib/systemd/logind.conf",
    "/usr/lib/systemd/logind.conf.d/*.conf",
    "/run/systemd/logind.conf.d/*.conf",
    "/etc/systemd/logind.conf",
    "/etc/systemd/logind.conf.d/*.conf",
)


def read_logind_settings(user: str, root: str = "/") -> LogindSettings | None:
    """Return `{linger, kill_user_processes}` for a user, or `None` if logind does not run.

    Distributions ship KillUserProcesses=no, and logind spares root by default (logind.conf(5)).
    """
    running = ("run/systemd/system", "run/systemd/sessions")
    if not all(os.path.isdir(os.path.join(root, place)) for place in running):
        return None
    settings = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    for pattern in _LOGIND_FILES:
        for path in sorted(glob.glob(os.path.join(root, pattern.lstrip("/")))):
            for line in read_bytes(path).decode("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() in settings:
                    settings[name.strip()] = value.strip()
    kill = settings["KillUserProcesses"].lower() in ("yes", "true", "1", "on")
    spared = user in settings["KillExcludeUsers"].split()
    only = settings["KillOnlyUsers"].split()
    linger = os.path.exists(os.path.join(root, "var/lib/systemd/linger", user))
    return {"linger": linger, "kill_user_processes": kill and not spared and (not only or user in only)}


def read_nccl_conf(files: list[str]) -> dict[str, str]:
    """Return the settings in NCCL's configuration files; later files win."""
    values: dict[str, str] = {}
    for path in files:
        for line in read_bytes(path).decode("utf-8", "replace").splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and name.startswith("NCCL_"):
                values[name] = value.strip()
    return values
