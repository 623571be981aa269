"""Sends a Python to a node that has none, through its shell, so that the agent can start there.

The node needs `/bin/sh`, `tar`, `gzip`, `head`, `uname`, and a C library that fits.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shlex
import time
from collections.abc import Callable

from clusterctl.config.spec import EnvironmentSpec, HostSpec
from clusterctl.errors import AgentError
from clusterctl.run.environments.environment_start import choose_environment_python
from clusterctl.run.environments.locked_packages import Platform
from clusterctl.run.environments.python_archive import pack_python
from clusterctl.transport.bootstrap import OWN_PYTHON
from clusterctl.transport.interfaces import Channel, Transport

_TIMEOUT_S = 30.0
_UNPACK_TIMEOUT_S = 300.0
_CHUNK_BYTES = 1 << 20
_MAX_NOISE_BYTES = 1 << 16
_OLDEST_GLIBC_MINOR = 17
"""The oldest glibc 2 for which uv has Pythons."""

# As in `clusterctl.transport.bootstrap`, the shell reads `main` completely, and gets the archive after its first line.
_SCRIPT = r"""
main() {
  missing=
  for tool in tar gzip head uname mkdir mv; do command -v $tool >/dev/null 2>&1 || missing="$missing $tool"; done
  libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=$(ldd --version 2>&1 | head -n 1)
  printf '\nclusterctl:%s:node %s;%s;%s\n' "$nonce" "$(uname -m)" "$libc" "$missing"
  IFS= read -r size || return
  folder=$HOME/${target%/*/*/*}
  part=$folder/.python.$$
  mkdir -p "$part" && head -c "$size" | gzip -dc | tar -xf - -C "$part" && {
    [ -x "$HOME/$target" ] || mv "$part"/* "$HOME/${target%/*/*}"
  }
  status=$?
  rm -rf "$part"
  printf '\nclusterctl:%s:done %s;%s;\n' "$nonce" "$status" ""
}
"""


def send_python(
    transport: Transport, host: HostSpec, settings: EnvironmentSpec, progress: Callable[[str], None]
) -> None:
    """Send a Python to a node.

    Args:
        transport: The transport to the node.
        host: The node.
        settings: The environment of the workers, which determines the version.
        progress: A function that receives the present activity.

    Raises:
        NodeError: The node lacks a program, has an unknown platform, or cannot store the Python.
        EnvironmentFailed: The head cannot get this Python.
    """
    channel = transport.open(host, progress=progress)
    try:
        nonce = secrets.token_hex(8)
        script = f"nonce={nonce}\ntarget={shlex.quote(OWN_PYTHON.removeprefix('~/'))}\n{_SCRIPT}main; exit\n"
        channel.send(script.encode(), timeout=_TIMEOUT_S)
        machine, libc, missing = _receive_line(channel, nonce, _TIMEOUT_S)
        platform = _parse_platform(host.name, machine, libc, missing, choose_environment_python(settings))
        progress("has no Python: fetching one")
        archive = pack_python(platform)
        progress("has no Python: sending one")
        channel.send(f"{archive.stat().st_size}\n".encode(), timeout=_TIMEOUT_S)
        # A node that cannot unpack stops reading; its last line says so.
        with archive.open("rb") as file, contextlib.suppress(OSError):
            while chunk := file.read(_CHUNK_BYTES):
                channel.send(chunk, timeout=_TIMEOUT_S)
        status, *_ = _receive_line(channel, nonce, _UNPACK_TIMEOUT_S)
        if status != "0":
            why = channel.stderr_tail().strip() or f"exit status {status}"
            raise AgentError(host.name, f"it has no Python, and cannot unpack one: {why}")
    except OSError as error:
        raise AgentError(
            host.name, f"it has no Python, and the connection broke while one was sent: {error}"
        ) from error
    finally:
        channel.close()


def _receive_line(channel: Channel, nonce: str, timeout_s: float) -> list[str]:
    """Return the fields of the next line of the script; ignore other output of the node.

    Raises:
        OSError: The line does not arrive.
    """
    data, deadline = b"", time.monotonic() + timeout_s
    while len(data) < _MAX_NOISE_BYTES:
        found = re.search(rf"clusterctl:{nonce}:(?:node|done) (.*);(.*);(.*)\n".encode(), data)
        if found:
            return [field.decode("utf-8", "replace").strip() for field in found.groups()]
        received = channel.recv(1 << 14, timeout=max(0.001, deadline - time.monotonic()))
        if not received:
            raise ConnectionError("end of stream")
        data += received
    raise ConnectionError("too much other output")


def _parse_platform(node: str, machine: str, libc: str, missing: str, python: str) -> Platform:
    """Return the platform of a node.

    Raises:
        AgentError: No Python can be sent there.
    """
    hint = "install a Python there"
    if missing:
        raise AgentError(node, f"it has no Python, and none can be sent: the node lacks {missing}", hint=hint)
    version = re.search(r"(?i)(?:glibc|gnu libc|glib).*?(2\.\d+)", libc)
    kind = f"glibc {version[1]}" if version else "musl" if "musl" in libc else ""
    platform = Platform(machine, kind, python)
    if not kind or (platform.glibc_minor or _OLDEST_GLIBC_MINOR) < _OLDEST_GLIBC_MINOR:
        text = f"it has no Python, and none can be sent: its C library `{libc or 'unknown'}` fits no Python of uv"
        raise AgentError(node, text, hint=hint)
    return platform
