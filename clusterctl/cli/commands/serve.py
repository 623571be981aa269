"""`clusterctl serve`."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from ipaddress import ip_address

import click

from clusterctl.cli.base_command import CliCommand, CommonOptions
from clusterctl.cli.option_values import parse_listen_address
from clusterctl.errors import RefusedError
from clusterctl.run.record import lock_files
from clusterctl.run.record.disk_files import make_private_folder
from clusterctl.run.record.rundir import find_server_file

_PORT = 7070


@click.command("serve", cls=CliCommand)
@click.option(
    "--listen",
    metavar="[ADDRESS:]PORT",
    help=f"Where to listen; by default on port {_PORT} of 127.0.0.1, or on a free port.",
)
@click.pass_obj
def command(common: CommonOptions, listen: str | None) -> int:
    """Serve a live page of all runs of this head for browsers: GPUs, steps, losses, failures, output, health.

    `serve` prints the link, which contains a secret. The page changes nothing: `serve` reads only files on this head,
    while a browser shows them, and connects to no node. From another machine, forward the port with ssh. Ctrl-C ends
    `serve`, and no run.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise RefusedError("the packages of the page are missing", hint="pip install starlette uvicorn")
    console = common.console()
    with _open_listener(listen) as listener:
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        token = secrets.token_urlsafe(24)
        url = f"http://{shown}:{port}/{token}/"
        server = importlib.import_module("clusterctl.cli.live_server").LiveServer(listener, token)
        # uvicorn sends itself the signal that ended it again, and the default of SIGTERM would skip the cleanup.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with _announced(url), contextlib.suppress(KeyboardInterrupt):
            console.write_stdout(url)
            console.out.stream.flush()
            if not ip_address(host).is_loopback:
                console.write_stderr(
                    "warning: whoever has this link, or reads the network, can read the output of your runs"
                )
            elif not common.quiet:
                console.write_stderr(f"from another machine: ssh -L {port}:{shown}:{port} {os.uname().nodename}")
            if not common.quiet:
                console.write_stderr("Ctrl-C ends it")
            server.run()
    return 0


def _open_listener(listen: str | None) -> socket.socket:
    """Return a socket that listens; without an address, on the usual port or on a free port."""
    host, port = ("127.0.0.1", _PORT) if listen is None else parse_listen_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        try:
            return socket.create_server((host, port), family=family)
        except OSError:
            if listen is not None:
                raise
            return socket.create_server((host, 0), family=family)
    except OSError as error:
        raise RefusedError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error


@contextlib.contextmanager
def _announced(url: str) -> Iterator[None]:
    """Write the link to a file that `up` reads, as long as the server runs. A second server writes no file."""
    path = find_server_file()
    make_private_folder(path.parent)
    try:
        fd = lock_files.take_lock(path)
    except (lock_files.LockedError, RefusedError):
        yield
        return
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps({"url": url}).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)
