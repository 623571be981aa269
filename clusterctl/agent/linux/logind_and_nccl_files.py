"""Readers of the configuration files of systemd-logind and of NCCL."""

from __future__ import annotations

import glob
import os

from clusterctl.agent.linux.syscalls import read_or_empty

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
    """Return whether a user lingers and whether logind kills the user's processes at logout; `None` without logind.

    Defaults are those of most distributions: KillUserProcesses=no, KillExcludeUsers=root (logind.conf(5)).
    """
    running = ("run/systemd/system", "run/systemd/sessions")
    if not all(os.path.isdir(os.path.join(root, place)) for place in running):
        return None
    settings = {"KillUserProcesses": "no", "KillOnlyUsers": "", "KillExcludeUsers": "root"}
    for pattern in _LOGIND_FILES:
        for path in sorted(glob.glob(os.path.join(root, pattern.lstrip("/")))):
            for line in read_or_empty(path).decode("utf-8", "replace").splitlines():
                name, equals, value = line.partition("=")
                if equals and name.strip() in settings:
                    settings[name.strip()] = value.strip()
    kill = settings["KillUserProcesses"].lower() in ("yes", "true", "1", "on")
    excluded = user in settings["KillExcludeUsers"].split()
    only_users = settings["KillOnlyUsers"].split()
    linger = os.path.exists(os.path.join(root, "var/lib/systemd/linger", user))
    return {"linger": linger, "kill_user_processes": kill and not excluded and (not only_users or user in only_users)}


def read_nccl_conf(files: list[str]) -> dict[str, str]:
    """Return the `NCCL_*` settings in NCCL's configuration files; a later file overrides an earlier one."""
    values: dict[str, str] = {}
    for path in files:
        for line in read_or_empty(path).decode("utf-8", "replace").splitlines():
            name, equals, value = line.strip().partition("=")
            if equals and name.startswith("NCCL_"):
                values[name] = value.strip()
    return values
