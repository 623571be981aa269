"""Resolves hosts and dials their SSH port while paramiko is still being imported.

The import takes a few tenths of a second. The machines can use that time to start the sshd process for the connection.
"""

from __future__ import annotations

import os
import threading
import time

from clusterctl.config.spec import HostSpec
from clusterctl.errors import NodeError
from clusterctl.transport.ssh.config import CONFIG_VARIABLE, Destination, SshOptions, get_destination, resolve_options
from clusterctl.transport.ssh.stream import BufferedStream, open_stream


class PreDialer:
    """Resolves and dials. Each result, also an error, is used once, so that none grows old.

    Args:
        config_file: Replaces the user's ssh_config; default: the variable `CLUSTERCTL_SSH_CONFIG`.
    """

    def __init__(self, config_file: str | None = None) -> None:
        self.config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
        self._lock = threading.Lock()
        self._options: dict[tuple[str, Destination], SshOptions | NodeError] = {}
        self._wires: dict[tuple[str, SshOptions], BufferedStream | NodeError] = {}
        self._closed = False

    def prefetch(self, host: HostSpec, timeout: float) -> None:
        """Resolve `host` and connect to it if there is no jump host. Errors are raised when the result is used.

        Args:
            host: The target.
            timeout: Time limit of the connection in seconds.
        """
        deadline = time.monotonic() + timeout
        destination = get_destination(host)
        try:
            options = resolve_options(host.name, destination, config_file=self.config_file)
        except NodeError as error:
            self._options[host.name, destination] = error
            return
        self._options[host.name, destination] = options
        if options.proxy_jump or options.proxy_command:
            return
        found: BufferedStream | NodeError
        try:
            found = open_stream(host.name, options, deadline)
        except NodeError as error:
            found = error
        with self._lock:
            if not self._closed:
                self._wires[host.name, options] = found
                return
        if isinstance(found, BufferedStream):
            found.close()

    def resolve_options(self, node: str, destination: Destination) -> SshOptions:
        """Return the ssh_config of `destination`.

        Raises:
            ConnectError: ssh_config is invalid, or the name of the host is not allowed.
        """
        options = self._options.pop((node, destination), None)
        if isinstance(options, NodeError):
            raise options
        return options or resolve_options(node, destination, config_file=self.config_file)

    def list_own_known_hosts(self, node: str, destination: Destination) -> tuple[str, ...]:
        """Return the known-hosts files that ssh_config names for a host, whatever the cluster file says.

        Raises:
            ConnectError: ssh_config is invalid.
        """
        alone = Destination(host=destination.host)
        return resolve_options(node, alone, config_file=self.config_file).user_known_hosts

    def open_wire(self, node: str, options: SshOptions, deadline: float) -> BufferedStream:
        """Return a stream to the SSH port in `options` (see `open_stream`)."""
        with self._lock:
            held = self._wires.pop((node, options), None)
        if isinstance(held, NodeError):
            raise held
        return held or open_stream(node, options, deadline)

    def close(self) -> None:
        """Close unused connections."""
        with self._lock:
            self._closed = True
            left = list(self._wires.values())
            self._wires.clear()
        for stream in left:
            if isinstance(stream, BufferedStream):
                stream.close()
