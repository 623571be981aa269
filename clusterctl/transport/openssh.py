"""The transport by the user's `ssh`: a child process whose standard streams lead to a shell on the node.

`trust --login` opens a connection that several `ssh` processes can share for a while (ControlMaster). Closing a channel
kills its `ssh` and discards unsent data.
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
"""Name of the shell on the node, without its path: a restricted login shell runs no command that contains a `/`."""
_NOISE_BYTES = 64 << 10
_LAST_OUTPUT_TIMEOUT_S = 1.0
_INTERACTIVE_LOGIN_TIMEOUT_S = 120.0
_MAX_QUOTED_CHARACTERS = 300
_CONNECTION_LOST_TEXT = 255
_Hop = tuple[Destination, SshOptions]
"""A jump host and the ssh_config of this jump host."""
_NEUTRAL_OPTIONS = {
    "remotecommand": "none",
    "sessiontype": "default",
    "stdinnull": "no",
    "forkafterauthentication": "no",
}
"""Options of ssh_config that would corrupt the byte stream, with harmless values. An option unknown to `ssh` is not
set."""


class OpenSshChannel(LocalChannel):
    """The stream through an `ssh` process."""

    @override
    def close(self) -> None:
        """Close the stream and discard unsent data: the fence of the node counts from the last received data."""
        if self._process.poll() is None:
            kill_and_discard_unsent(self._process.pid)
        super().close()


class OpenSshTransport:
    """Connects with `ssh`, which uses the user's ssh_config, ssh-agent, certificates, tickets and shared connections.

    Args:
        spec: The `ssh` section of the cluster file.
        predialer: Resolves the ssh_config of hosts.
        environment: The environment of `ssh`; `None` for the environment of this process.
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
        # Connect to one node at a time: the user cannot see which node asks a question.
        with self._asking:
            return self._logged_in(host, options, max(self._spec.connect_timeout, _INTERACTIVE_LOGIN_TIMEOUT_S))

    def close(self) -> None:
        """Do nothing: channels share nothing, and shared connections of `trust --login` stay open."""

    def _logged_in(self, host: HostSpec, options: SshOptions, seconds: float) -> OpenSshChannel:
        environment = self._environment
        if not has_askpass(environment):
            # `ssh` does not pass BatchMode to its processes for jump hosts, which would open a window without this
            # variable.
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
        """Return the `ssh` command that connects to `host`.

        Args:
            host: The host.
            options: The ssh_config of the host.
            log: Path of the file for the messages of `ssh`.
        """
        batch = [] if has_askpass(self._environment) else ["BatchMode=yes"]
        hops = self._hops(host.name, options)
        shared = self._share_options(options, hops)
        logged = ["-v", "-E", log]
        to = self._arguments(get_destination(host), hops, [*logged, *_join_words(batch)])
        return ["ssh", "-T", *logged, *_join_words([*batch, *shared, *self._settings(options)]), *to, _SHELL]

    def build_terminal_argv(self, host: HostSpec, command: str) -> list[str]:
        """Return the `ssh` command that runs a shell command on a terminal. This `ssh` may ask the user questions."""
        options = self._predialer.resolve_options(host.name, get_destination(host))
        hops = self._hops(host.name, options)
        words = _join_words([*self._share_options(options, hops), *self._settings(options)])
        return ["ssh", "-t", *words, *self._arguments(get_destination(host), hops), command]

    def build_forward_argv(self, host: HostSpec, forwards: Sequence[str]) -> list[str]:
        """Return the `ssh` command that forwards ports.

        The command opens its own connection: a forward through a shared connection would outlive the command.

        Args:
            host: The host.
            forwards: Arguments of `ssh -L`.
        """
        options = self._predialer.resolve_options(host.name, get_destination(host))
        own = ["ClearAllForwardings=no", "ExitOnForwardFailure=yes", "ControlMaster=no", "ControlPath=none"]
        words = [*(word for forward in forwards for word in ("-L", forward)), *_join_words(own)]
        to = self._arguments(get_destination(host), self._hops(host.name, options))
        return ["ssh", "-N", "-T", *words, *_join_words(self._settings(options)), *to]

    def _share_options(self, options: SshOptions, hops: Sequence[_Hop]) -> list[str]:
        """Return the options for an existing shared connection, else for a connection that ends with its process."""
        shared = ["ControlMaster=no", "ControlPersist=no"]
        path = get_control_path(self._route(options, hops))
        if not options.get_openssh_only("controlpath") and has_shared_connection(path):
            shared.append(f"ControlPath={path}")
        return shared

    def has_shared_connection_to(self, host: HostSpec, options: SshOptions) -> bool:
        """Return whether `trust --login` opened a connection to `host` that still matches ssh_config."""
        return has_shared_connection(get_control_path(self._route(options, self._hops(host.name, options))))

    def _hops(self, node: str, options: SshOptions) -> list[_Hop]:
        """Return the jump hosts on the way to a host with their ssh_config; the nearest to the host is first.

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
        """Return the values that identify a connection: host, jump hosts, host key policy and known-hosts files."""
        on_the_way = [options, *(options for _, options in hops)]
        files = [(o.user_known_hosts, o.global_known_hosts, o.revoked_host_keys) for o in on_the_way]
        places = [(o.hostname, o.port, o.user, o.known_hosts_name, o.proxy_command) for o in on_the_way]
        return (
            places,
            files,
            [(accepts_new_keys(self._spec, o), _known_hosts_options(self._spec, o)) for o in on_the_way],
        )

    def _arguments(self, destination: Destination, hops: Sequence[_Hop], habits: Sequence[str] = ()) -> list[str]:
        """Return the arguments of `ssh` for a host.

        Unlike `ssh -J`, these arguments also apply our options to jump hosts.
        """
        if not hops:
            return build_query_arguments(destination, self._predialer.config_file)[1:]
        (hop, options), *before = hops
        words = ["ssh", *habits, *_join_words(self._settings(options)), *self._arguments(hop, before, habits)]
        # `--` and the jump host come last. The outer `ssh` replaces `%h` and `%p` by the host behind the jump host.
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
        """Log in with `ssh` at this terminal, and keep the connection open so that other `ssh` processes can share it.

        Raises:
            NodeError: The login failed.
        """
        options = self._predialer.resolve_options(host.name, get_destination(host))
        hops = self._hops(host.name, options)
        try:
            get_control_folder().mkdir(mode=0o700, exist_ok=True)
            private = is_private_folder(get_control_folder().lstat())
        except OSError as error:
            raise ConnectError(host.name, f"{get_control_folder()} cannot be created: {error.strerror}") from error
        if not private:
            hint = f"remove the folder; if it belongs to another user: as root, `rm -r {get_control_folder()}`"
            raise ConnectError(host.name, f"other users may access {get_control_folder()}", hint=hint)
        path = get_control_path(self._route(options, hops))
        path.unlink(missing_ok=True)
        shared = ["ControlMaster=yes", f"ControlPersist={IDLE_TIMEOUT_S}", f"ControlPath={path}"]
        to = self._arguments(get_destination(host), hops)
        argv = ["ssh", "-f", "-N", "-T", *_join_words([*shared, *self._settings(options)]), *to]
        environment = self._environment | {"SSH_ASKPASS_REQUIRE": "never"}
        if subprocess.run(argv, env=environment, check=False).returncode != 0:
            raise AuthError(host.name, "`ssh` could not log in", hint=f"`ssh -v {options.address} true` shows why")
        # `ssh` reports success before it detaches from this terminal, and ends if the terminal closes in between. Once
        # detached, `ssh` answers this check.
        argv = ["ssh", "-O", "check", *_join_words([f"ControlPath={path}"]), *to]
        if subprocess.run(argv, env=environment, check=False, capture_output=True).returncode != 0:
            text = "`ssh` logged in, but did not keep the connection open for sharing"
            raise ConnectError(host.name, text, hint=f"`ssh -v {options.address} true` may show why")


def _join_words(options: Iterable[str]) -> list[str]:
    return [word for text in options for word in ("-o", text)]


def has_askpass(environment: Mapping[str, str]) -> bool:
    """Return whether a program (SSH_ASKPASS) answers the questions that `ssh` asks."""
    required = environment.get("SSH_ASKPASS_REQUIRE") in ("force", "prefer")
    return required and bool(environment.get("SSH_ASKPASS"))


def _known_hosts_options(spec: SshSpec, options: SshOptions) -> list[str]:
    """Return the option for the known-hosts files of the cluster file, if the user's files do not contain the host."""
    own = known_hosts.load_known_hosts([*options.user_known_hosts, *options.global_known_hosts])
    if not spec.known_hosts or any(entry.matches(options.known_hosts_name) for entry in own):
        return []
    paths = [*options.user_known_hosts, *spec.known_hosts]
    return ["UserKnownHostsFile=" + " ".join(f'"{path.replace("%", "%%")}"' for path in paths)]


def _wait_for_shell(channel: OpenSshChannel, deadline: float) -> None:
    """Wait until a shell answers.

    Raises:
        OSError: The stream ended (the error contains its output), or there was no answer in time.
        ValueError: The output did not come from a shell.
    """
    word = secrets.token_hex(8)
    # The word is in two parts, so that an echo of this line differs from the answer.
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
    """Return the error for a shell that did not answer: `ssh` failed, or it started another program."""
    with contextlib.suppress(Exception):
        process.wait(_LAST_OUTPUT_TIMEOUT_S)
    output, address = log.read_text("utf-8", "replace"), options.address
    if isinstance(error, TimeoutError):
        entered = "debug1: Entering interactive session" in output
        text = "`ssh` logged in, but no shell answered in time" if entered else "`ssh` did not log in in time"
        return ConnectError(node, text, hint=f"`ssh -v {address} true` shows the step at which `ssh` waits")
    if process.returncode == _CONNECTION_LOST_TEXT:
        return explain_ssh_log(node, output, address)
    quoted = " ".join(f"{error} {channel.stderr_tail()}".split())[-_MAX_QUOTED_CHARACTERS:]
    hint = f"a login script or a forced command may disturb the connection: check the output of `ssh {address} sh`"
    return ConnectError(
        node, "`ssh` logged in, but no shell answers" + (f"; it said: {quoted}" if quoted else ""), hint=hint
    )


_PIDFD_GETFD = 438
"""System call number, the same on all architectures (asm-generic/unistd.h); since Linux 5.6."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_LINGER_ZERO = struct.pack("ii", 1, 0)


def kill_and_discard_unsent(leader: int) -> None:
    """Kill the process group of a child and its descendants, and reset their TCP connections.

    After a plain kill, the kernel still holds unacknowledged data and may deliver it minutes later, if a broken link
    recovers. If the kernel denies access to the sockets of the child, this function cannot prevent such a late
    delivery.
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
"""How long a shared connection stays open after its last use, in seconds."""


def get_control_folder() -> Path:
    """Return the folder for sockets of shared connections: a short local path, equal for all logins of a user."""
    return Path("/tmp", f"clusterctl-ssh-{os.geteuid()}")


def get_control_path(route: object) -> Path:
    """Return the path of the socket of a shared connection (ControlPath).

    Args:
        route: Values that identify the connection. If ssh_config changes them, the path changes too.
    """
    return get_control_folder() / hashlib.sha256(repr(route).encode()).hexdigest()[:32]


def has_shared_connection(path: Path) -> bool:
    """Return whether the socket of a shared connection exists, and no other user can have created it."""
    try:
        private, made = get_control_folder().lstat(), path.lstat()
    except OSError:
        return False
    return is_private_folder(private) and stat.S_ISSOCK(made.st_mode) and made.st_uid == os.geteuid()


def is_private_folder(status: os.stat_result) -> bool:
    """Return whether a folder belongs to this user, and other users have no access."""
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
