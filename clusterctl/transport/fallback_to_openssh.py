"""Connects with the built-in SSH client, and uses the user's `ssh` for hosts that only `ssh` can reach."""

from __future__ import annotations

import os
import re
from pathlib import Path

from clusterctl.config.spec import HostSpec
from clusterctl.errors import NodeError
from clusterctl.transport.interfaces import Channel, Progress, Transport, ignore_progress
from clusterctl.transport.openssh import OpenSshTransport, has_askpass
from clusterctl.transport.ssh.login_errors import find_fallback_reason
from clusterctl.transport.ssh.ssh_options import get_destination
from clusterctl.transport.ssh.underlying_stream import PreDialer

_RESTRICTED_SHELL = re.compile(r"\brestricted\b")


class FallbackTransport:
    """Connects to nodes with the built-in SSH client, or with `ssh` if the built-in client cannot log in.

    Args:
        builtin: The built-in client.
        openssh: The user's `ssh`.
        predialer: Resolves the ssh_config of hosts.
    """

    def __init__(self, builtin: Transport, openssh: OpenSshTransport, predialer: PreDialer) -> None:
        self._builtin = builtin
        self._openssh = openssh
        self._predialer = predialer
        self._reasons: dict[str, str] = {}

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> Channel:
        """Return a stream to a shell on `host` (see `Transport.open`)."""
        if host.name not in self._reasons:
            try:
                return self._builtin.open(host, progress=progress)
            except NodeError as error:
                reason = self._fallback_reason(host, error)
                if reason is None:
                    raise
                self._reasons[host.name] = reason
        channel = self._openssh.open(host, progress=progress)
        notice = (
            f"the built-in SSH client cannot {self._reasons[host.name]}, so clusterctl uses `ssh` (see `ssh.client`)"
        )
        channel.warnings = (*channel.warnings, notice)
        return channel

    def switch_to_openssh(self, host: HostSpec, error: NodeError) -> bool:
        """Return whether `error` shows a restricted login shell; if so, use `ssh` for this host from now on."""
        if not _RESTRICTED_SHELL.search(str(error)):
            return False
        # Another session may have switched this host in the meantime.
        self._reasons.setdefault(host.name, "enter a restricted shell")
        return True

    def close(self) -> None:
        """Close everything that channels share."""
        self._builtin.close()
        self._openssh.close()

    def _fallback_reason(self, host: HostSpec, error: NodeError) -> str | None:
        options = self._predialer.resolve_options(host.name, get_destination(host))
        path = options.get_openssh_only("controlpath")
        shared = Path(path).is_socket() if path is not None else self._openssh.has_shared_connection_to(host, options)
        return find_fallback_reason(error, options, answers=has_askpass(os.environ), shared=shared)
