"""Reaches nodes by the user's own `ssh`: its standard streams are those of a shell on the node.

`trust --login` leaves a connection that several `ssh` processes share for a while (ControlMaster). A closed channel
kills its `ssh` and drops what the kernel has not sent.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import math
import os
import secrets
import shlex
import signal
import socket
import stat
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from typing_extensions import override

from clusterctl.config.spec import HostSpec, SshSpec
from clusterctl.errors import AuthError, ConnectError, NodeError
from clusterctl.transport.interfaces import Progress, ignore_progress
from clusterctl.transport.local import LocalChannel, start_child_process
from clusterctl.transport.ssh import known_hosts
from clusterctl.transport.ssh.host_keys import accepts_new_keys
from clusterctl.transport.ssh.login_errors import explain_ssh_log
from clusterctl.transport.ssh.ssh_options import (
    Destination,
    SshOptions,
    build_query_arguments,
    get_destination,
    split_last_jump_host,
)
from clusterctl.transport.ssh.underlying_stream import PreDialer

_SHELL = "sh"
"""Without a path: a restricted shell runs nothing that contains a `/`."""
_NOISE_BYTES = 64 << 10
_LAST_OUTPUT_TIMEOUT_S = 1.0
_INTERACTIVE_LOGIN_TIMEOUT_S = 120.0
_MAX_QUOTED_CHARACTERS = 300
_CONNECTION_LOST_TEXT = 255
_Hop = tuple[Destination, SshOptions]
"""A jump host and its ssh_config."""
_NEUTRAL_OPTIONS = {
    "remotecommand": "none",
    "sessiontype": "default",
    "stdinnull": "no",
    "forkafterauthentication": "no",
}
"""Settings of ssh_config that would corrupt a byte stream and that some `ssh` do not know: reset if known."""


class OpenSshChannel(LocalChannel):
    """The stream through an `ssh` process."""

    @override
    def close(self) -> None:
        """Close the stream and drop what `ssh` and the kernel have not sent: a fence counts from here."""
        if self._process.poll() is None:
            kill_and_discard_unsent(self._process.pid)
        super().close()


class OpenSshTransport:
    """Reaches nodes by `ssh`, with the user's ssh_config, ssh-agent, certificates, tickets and shared connections.

    Args:
        spec: Time limit and host key policy of the cluster file.
        predialer: Asks `ssh` for its configuration.
        environment: The environment of `ssh`; default: that of this process.
    """

    def __init__(self, spec: SshSpec, predialer: PreDialer, environment: Mapping[str, str] | None = None) -> None:
        self._spec = spec
        self._predialer = predialer
        self._environment = dict(os.environ if environment is None else environment)
        self._asking = threading.Lock()

    def open(self, host: HostSpec, *, progress: Progress = ignore_progress) -> OpenSshChannel:
        """Log in to `host` with `ssh` and run a shell there (see `Transport.open`)."""
        progress("connecting")
        options = self._predialer.resolve_options(host.name, get_destination(host))
        if not has_askpass(self._environment):
            return self._logged_in(host, options, self._spec.connect_timeout)
        # A user could not match the questions of several nodes to their nodes.
        with self._asking:
            return self._logged_in(host, options, max(self._spec.connect_timeout, _INTERACTIVE_LOGIN_TIMEOUT_S))

    def close(self) -> None:
        """Channels share nothing; shared connections belong to the user."""

    def _logged_in(self, host: HostSpec, options: SshOptions, seconds: float) -> OpenSshChannel:
        environment = self._environment
        if not has_askpass(environment):
            # `ssh` does not pass BatchMode to jump hosts, which would open a window.
            environment = environment | {"SSH_ASKPASS_REQUIRE": "never"}
        with tempfile.NamedTemporaryFile(prefix="clusterctl-ssh-") as log:
            argv = self.build_argv(host, options, log.name)
            process, ours, stderr = start_child_process(host.name, argv, env=environment, folder="/")
            channel = OpenSshChannel(process, ours, stderr)
            try:
                _wait_for_shell(channel, time.monotonic() + seconds)
            except (OSError, ValueError) as error:
                channel.close()
                raise _describe_missing_shell(host.name, process, Path(log.name), channel, options, error) from error
            except BaseException:
                channel.close()
                raise
        return channel

    def build_argv(self, host: HostSpec, options: SshOptions, log: str) -> list[str]:
        """Return the command that connects to `host`.

        Args:
            host: The target.
            options: Its ssh_config.
            log: File for the messages of `ssh`.
        """
        batch = [] if has_askpass(self._environment) else ["BatchMode=yes"]
        hops = self._hops(host.name, options)
        shared = self._share_options(options, hops)
        logged = ["-v", "-E", log]
        to = self._arguments(get_destination(host), hops, [*logged, *_join_words(batch)])
        return ["ssh", "-T", *logged, *_join_words([*batch, *shared, *self._settings(options)]), *to, _SHELL]

    def build_terminal_argv(self, host: HostSpec, command: str) -> list[str]:
        """Return the `ssh` that runs a shell command on a terminal. It may ask its user, who sits at ours."""
        options = self._predialer.resolve_options(host.name, get_destination(host))
        hops = self._hops(host.name, options)
        words = _join_words([*self._share_options(options, hops), *self._settings(options)])
        return ["ssh", "-t", *words, *self._arguments(get_destination(host), hops), command]

    def build_forward_argv(self, host: HostSpec, forwards: Sequence[str]) -> list[str]:
        """Return the `ssh` that forwards ports, each given as for `ssh -L`.

        A forward through a shared connection would outlive this `ssh`, so it makes one of its own.
        """
        options = self._predialer.resolve_options(host.name, get_destination(host))
        own = ["ClearAllForwardings=no", "ExitOnForwardFailure=yes", "ControlMaster=no", "ControlPath=none"]
        words = [*(word for forward in forwards for word in ("-L", forward)), *_join_words(own)]
        to = self._arguments(get_destination(host), self._hops(host.name, options))
        return ["ssh", "-N", "-T", *words, *_join_words(self._settings(options)), *to]

    def _share_options(self, options: SshOptions, hops: Sequence[_Hop]) -> list[str]:
        """Return options for one connection that ends with its process, or for an existing shared connection."""
        shared = ["ControlMaster=no", "ControlPersist=no"]
        path = get_control_path(self._route(options, hops))
        if not options.get_openssh_only("controlpath") and has_shared_connection(path):
            shared.append(f"ControlPath={path}")
        return shared

    def has_shared_connection_to(self, host: HostSpec, options: SshOptions) -> bool:
        """Return whether `trust --login` left a connection to `host` that still matches ssh_config."""
        return has_shared_connection(get_control_path(self._route(options, self._hops(host.name, options))))

    def _hops(self, node: str, options: SshOptions) -> list[_Hop]:
        """Return the jump hosts to a host with their ssh_config, the nearest to the host first.

        Raises:
            ConnectError: The jump hosts form a cycle, or ssh_config is invalid.
        """
        hops: list[_Hop] = []
        chains: tuple[str, ...] = ()
        while options.proxy_jump:
            chain, hop = split_last_jump_host(node, options, chains)
            options = self._predialer.resolve_options(node, hop)
            chains = (*chains, chain)
            hops.append((hop, options))
        return hops

    def _route(self, options: SshOptions, hops: Iterable[_Hop]) -> object:
        """Return what identifies a connection: target, jump hosts, and the trusted keys of each."""
        on_the_way = [options, *(options for _, options in hops)]
        files = [(o.user_known_hosts, o.global_known_hosts, o.revoked_host_keys) for o in on_the_way]
        places = [(o.hostname, o.port, o.user, o.known_hosts_name, o.proxy_command) for o in on_the_way]
        return (
            places,
            files,
            [(accepts_new_keys(self._spec, o), _known_hosts_options(self._spec, o)) for o in on_the_way],
        )

    def _arguments(self, destination: Destination, hops: Sequence[_Hop], habits: Sequence[str] = ()) -> list[str]:
        """Return the arguments that lead to a host; jump hosts get our settings, which `ssh -J` would not pass on."""
        if not hops:
            return build_query_arguments(destination, self._predialer.config_file)[1:]
        (hop, options), *before = hops
        words = ["ssh", *habits, *_join_words(self._settings(options)), *self._arguments(hop, before, habits)]
        # `--` and the host come last; the outer `ssh` fills in the host behind the jump host.
        command = shlex.join(words[:-2]).replace("%", "%%") + " -W '[%h]:%p' " + shlex.join(words[-2:])
        to = build_query_arguments(dataclasses.replace(destination, proxy_jump=None), self._predialer.config_file)[1:]
        return [*_join_words([f"ProxyCommand={command}"]), *to]

    def _settings(self, options: SshOptions) -> list[str]:
        return [
            f"ConnectTimeout={math.ceil(self._spec.connect_timeout)}",
            *("PermitLocalCommand=no", "ClearAllForwardings=yes", "ForwardAgent=no", "ForwardX11=no", "Tunnel=no"),
            *("ServerAliveInterval=5", "ServerAliveCountMax=4"),
            f"StrictHostKeyChecking={'accept-new' if accepts_new_keys(self._spec, options) else 'yes'}",
            *_known_hosts_options(self._spec, options),
            *(f"{key}={_NEUTRAL_OPTIONS[key]}" for key, _ in options.openssh_only if key in _NEUTRAL_OPTIONS),
        ]

    def log_in(self, host: HostSpec) -> None:
        """Log in with `ssh` at this terminal and keep the connection for others to share.

        Raises:
            NodeError: The login failed.
        """
        options = self._predialer.resolve_options(host.name, get_destination(host))
        hops = self._hops(host.name, options)
        try:
            get_control_folder().mkdir(mode=0o700, exist_ok=True)
            private = is_private_folder(get_control_folder().lstat())
        except OSError as error:
            raise ConnectError(host.name, f"{get_control_folder()} cannot be made: {error.strerror}") from error
        if not private:
            hint = f"remove it; if it belongs to another user: as root, `rm -r {get_control_folder()}`"
            raise ConnectError(host.name, f"{get_control_folder()} is not this user's alone", hint=hint)
        path = get_control_path(self._route(options, hops))
        path.unlink(missing_ok=True)
        shared = ["ControlMaster=yes", f"ControlPersist={IDLE_TIMEOUT_S}", f"ControlPath={path}"]
        to = self._arguments(get_destination(host), hops)
        argv = ["ssh", "-f", "-N", "-T", *_join_words([*shared, *self._settings(options)]), *to]
        environment = self._environment | {"SSH_ASKPASS_REQUIRE": "never"}
        if subprocess.run(argv, env=environment, check=False).returncode != 0:
            raise AuthError(host.name, "`ssh` could not log in", hint=f"`ssh -v {options.address} true` shows why")
        # `ssh` detaches from this terminal only after it has reported success, and ends if the terminal is closed
        # earlier. It answers once it has detached.
        argv = ["ssh", "-O", "check", *_join_words([f"ControlPath={path}"]), *to]
        if subprocess.run(argv, env=environment, check=False, capture_output=True).returncode != 0:
            text = "`ssh` logged in, but keeps no connection that others could share"
            raise ConnectError(host.name, text, hint=f"`ssh -v {options.address} true` may show why")


def _join_words(options: Iterable[str]) -> list[str]:
    return [word for text in options for word in ("-o", text)]


def has_askpass(environment: Mapping[str, str]) -> bool:
    """Return whether a program answers the questions of `ssh`: there is no terminal to ask at."""
    required = environment.get("SSH_ASKPASS_REQUIRE") in ("force", "prefer")
    return required and bool(environment.get("SSH_ASKPASS"))


def _known_hosts_options(spec: SshSpec, options: SshOptions) -> list[str]:
    """Use the known-hosts files of the cluster file for hosts that the user's own files do not contain."""
    own = known_hosts.load_known_hosts([*options.user_known_hosts, *options.global_known_hosts])
    if not spec.known_hosts or any(entry.matches(options.known_hosts_name) for entry in own):
        return []
    paths = [*options.user_known_hosts, *spec.known_hosts]
    return ["UserKnownHostsFile=" + " ".join(f'"{path.replace("%", "%%")}"' for path in paths)]


def _wait_for_shell(channel: OpenSshChannel, deadline: float) -> None:
    """Wait until a shell answers.

    Raises:
        OSError: The stream ended (with its output), or there was no answer in time.
        ValueError: The output is not that of a shell.
    """
    word = secrets.token_hex(8)
    # In two parts, so that an echo of the line does not look like the answer.
    channel.send(f"printf '%s%s\\n' clusterctl- {word}\n".encode())
    heard = b""
    while f"clusterctl-{word}\n".encode() not in heard:
        data = channel.recv(65536, timeout=max(0.001, deadline - time.monotonic()))
        if not data:
            raise ConnectionError(heard[-_MAX_QUOTED_CHARACTERS:].decode("utf-8", "replace"))
        heard = (heard + data)[-_NOISE_BYTES:]


def _describe_missing_shell(
    node: str,
    process: subprocess.Popen[bytes],
    log: Path,
    channel: OpenSshChannel,
    options: SshOptions,
    error: Exception,
) -> NodeError:
    """Explain why no shell answered: `ssh` failed, or it started something else."""
    with contextlib.suppress(Exception):
        process.wait(_LAST_OUTPUT_TIMEOUT_S)
    output, address = log.read_text("utf-8", "replace"), options.address
    if isinstance(error, TimeoutError):
        entered = "debug1: Entering interactive session" in output
        text = "`ssh` logged in, but no shell answered in time" if entered else "`ssh` did not log in in time"
        return ConnectError(node, text, hint=f"`ssh -v {address} true` shows where it waits")
    if process.returncode == _CONNECTION_LOST_TEXT:
        return explain_ssh_log(node, output, address)
    quoted = " ".join(f"{error} {channel.stderr_tail()}".split())[-_MAX_QUOTED_CHARACTERS:]
    hint = f"a login script or a forced command may disturb the connection: see what `ssh {address} sh` prints"
    return ConnectError(
        node, "`ssh` logged in, but no shell answers" + (f"; it said: {quoted}" if quoted else ""), hint=hint
    )


_PIDFD_GETFD = 438
"""System call number, the same on all architectures (asm-generic/unistd.h); since Linux 5.6."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LINGER_ZERO = struct.pack("ii", 1, 0)


def kill_and_discard_unsent(leader: int) -> None:
    """Kill the process group of a child and its descendants, and reset their connections.

    After a plain kill the kernel still holds sent but unacknowledged data, and delivers it minutes later if a broken
    link recovers. If the kernel denies access to the sockets, that remains possible.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGSTOP)
    for pid in _list_process_tree(leader):
        with contextlib.suppress(OSError, AttributeError):
            _discard_unsent(pid)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _list_process_tree(leader: int) -> Iterator[int]:
    yield leader
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{leader}/task/{leader}/children").read_text().split():
            yield from _list_process_tree(int(child))


def _discard_unsent(pid: int) -> None:
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).startswith("socket:"):
                _reset_when_closed(process, int(link.name))
    finally:
        os.close(process)


def _reset_when_closed(process: int, descriptor: int) -> None:
    copied = _LIBC.syscall(ctypes.c_long(_PIDFD_GETFD), *map(ctypes.c_long, (process, descriptor, 0)))
    if copied >= 0:
        with socket.socket(fileno=copied) as copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_ZERO)


IDLE_TIMEOUT_S = 3600
"""How long a connection stays open after its last use. A run uses it as long as it goes on."""


def get_control_folder() -> Path:
    """Return the folder of the sockets. It is the same for every login of this user, local, and its path is short."""
    return Path("/tmp", f"clusterctl-ssh-{os.geteuid()}")


def get_control_path(route: object) -> Path:
    """Return the socket of a connection (ControlPath).

    Args:
        route: The resolved route to the host and the trusted keys: a change of ssh_config changes the path.
    """
    return get_control_folder() / hashlib.sha256(repr(route).encode()).hexdigest()[:32]


def has_shared_connection(path: Path) -> bool:
    """Return whether there is a connection to share that no other user can have created."""
    try:
        private, made = get_control_folder().lstat(), path.lstat()
    except OSError:
        return False
    return is_private_folder(private) and stat.S_ISSOCK(made.st_mode) and made.st_uid == os.geteuid()


def is_private_folder(status: os.stat_result) -> bool:
    """Return whether a folder belongs to this user alone."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
