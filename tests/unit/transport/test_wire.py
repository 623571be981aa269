"""Where the stream under SSH goes to and comes from: families of addresses, zones, and our own end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from clusterctl.errors import ConnectError
from clusterctl.transport.ssh.ssh_options import SshOptions
from clusterctl.transport.ssh.underlying_stream import open_stream

DEADLINE = 10.0


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as server:
        server.settimeout(DEADLINE)
        yield server


def dial(server: socket.socket, hostname: str, **options: Any) -> str:
    """Connect to a server; return the address that it is dialed from."""
    wanted = SshOptions(hostname=hostname, port=server.getsockname()[1], user="u", **options)
    with closing(open_stream("n1", wanted, time.monotonic() + DEADLINE)):
        peer, address = server.accept()
        peer.close()
        return str(address[0])


@pytest.mark.parametrize(
    ("at", "hostname", "family"),
    [
        ("127.0.0.1", "127.0.0.1", "any"),
        ("::1", "::1", "any"),
        ("::1", "0:0:0:0:0:0:0:1", "inet6"),
        ("127.0.0.1", "localhost", "inet"),
    ],
)
def test_a_host_is_dialed_by_the_family_that_ssh_config_names(at: str, hostname: str, family: str) -> None:
    with listening(at) as server:
        assert dial(server, hostname, address_family=family) == at


def test_our_end_is_the_address_that_ssh_config_names() -> None:
    with listening("127.0.0.1") as server:
        assert dial(server, "127.0.0.1", bind_address="127.0.0.7") == "127.0.0.7"


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"hostname": "127.0.0.1", "address_family": "inet6"}, "no address of this family", "`AddressFamily inet6`"),
        ({"hostname": "::1", "address_family": "inet"}, "no address of this family", "`AddressFamily inet`"),
        (
            {"hostname": "127.0.0.1", "bind_address": "203.0.113.7"},
            "`BindAddress 203.0.113.7` is no address",
            "ssh_config",
        ),
        ({"hostname": "127.0.0.1", "bind_address": "::1"}, "`BindAddress ::1` is no address", "ssh_config"),
    ],
)
def test_what_ssh_config_asks_for_and_cannot_be_is_one_line_with_a_remedy(
    options: dict[str, Any], message: str, hint: str
) -> None:
    with pytest.raises(ConnectError, match=message) as caught:
        open_stream("n1", SshOptions(port=1, user="u", **options), time.monotonic() + DEADLINE)
    assert hint in (caught.value.hint or "")
