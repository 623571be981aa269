"""The way to a host as far as it can be gone before the SSH library is there: `ssh` is asked, and its port is dialed.

Importing the library takes a few tenths of a second, in which the machines themselves can do something already: start
the process of sshd that serves the connection.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from clusterctl.errors import NodeError
from clusterctl.transport.ssh.config import CONFIG_VARIABLE, Destination, SshOptions, destination_of, resolve
from clusterctl.transport.ssh.stream import BufferedStream, open_stream

if TYPE_CHECKING:
    from clusterctl.config.spec import HostSpec


class PreDialer:
    """Resolves and dials; what was found ahead, an error too, is given once, so that nothing grows old.

    Args:
        config_file: In place of the user's ssh_config; default: the environment's `CLUSTERCTL_SSH_CONFIG`.
    """

    def __init__(self, config_file: str | None = None) -> None:
        self.config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
        self._lock = threading.Lock()
        self._options: dict[tuple[str, Destination], SshOptions | NodeError] = {}
        self._wires: dict[tuple[str, SshOptions], BufferedStream | NodeError] = {}
        self._closed = False

    def prefetch(self, host: HostSpec, timeout: float) -> None:
        """Ask for `host`, and connect to it where nothing lies between; what goes wrong is raised when it is needed.

        Args:
            host: Where to.
            timeout: Seconds within which there has to be a connection.
        """
        deadline = time.monotonic() + timeout
        destination = destination_of(host)
        try:
            options = resolve(host.name, destination, config_file=self.config_file)
        except NodeError as error:
            self._options[host.name, destination] = error
            return
        self._options[host.name, destination] = options
        if not options.proxy_jump and not options.proxy_command:
            self._keep(host.name, options, _dial(host.name, options, deadline))

    def _keep(self, node: str, options: SshOptions, found: BufferedStream | NodeError) -> None:
        with self._lock:
            if not self._closed:
                self._wires[node, options] = found
                return
        _close(found)

    def resolve(self, node: str, destination: Destination) -> SshOptions:
        """Return how `destination` is reached.

        Raises:
            ConnectError: The config is broken, or the host's name cannot be one.
        """
        options = self._options.pop((node, destination), None)
        if isinstance(options, NodeError):
            raise options
        return options or resolve(node, destination, config_file=self.config_file)

    def own_known_hosts(self, node: str, destination: Destination) -> tuple[str, ...]:
        """Return the known-hosts files that ssh_config names for a host, whatever the cluster file says of it.

        Raises:
            ConnectError: The config is broken.
        """
        alone = Destination(host=destination.host)
        return resolve(node, alone, config_file=self.config_file).user_known_hosts

    def wire(self, node: str, options: SshOptions, deadline: float) -> BufferedStream:
        """Return a stream to the SSH port that `options` name (see `open_wire`)."""
        with self._lock:
            held = self._wires.pop((node, options), None)
        if isinstance(held, NodeError):
            raise held
        return held or open_stream(node, options, deadline)

    def close(self) -> None:
        """Close connections that nobody asked for."""
        with self._lock:
            self._closed = True
            left = list(self._wires.values())
            self._wires.clear()
        for held in left:
            _close(held)


def _dial(node: str, options: SshOptions, deadline: float) -> BufferedStream | NodeError:
    try:
        return open_stream(node, options, deadline)
    except NodeError as error:
        return error


def _close(found: BufferedStream | NodeError) -> None:
    if isinstance(found, BufferedStream):
        found.close()
