"""What `port-forward` accepts as a port."""

from __future__ import annotations

import pytest

from clusterctl.cli.commands.port_forward import PortForward, parse_forward


@pytest.mark.parametrize(
    ("word", "forward"),
    [
        pytest.param("6006", PortForward(6006, 6006), id="the same on both sides"),
        pytest.param("8080:80", PortForward(8080, 80), id="another one here"),
        pytest.param("0:80", PortForward(0, 80), id="any free one here"),
        pytest.param("8080:localhost:80", PortForward(8080, 80), id="as ssh -L has it"),
        pytest.param("8080:10.0.0.7:80", PortForward(8080, 80, "10.0.0.7"), id="an address that the node reaches"),
        pytest.param("8080:[fd00::7]:80", PortForward(8080, 80, "fd00::7"), id="one of IPv6"),
    ],
)
def test_a_port_is(word: str, forward: PortForward) -> None:
    assert parse_forward(word) == forward


@pytest.mark.parametrize(
    "word",
    ["", ":", "x", "6006:", ":6006", "70000", "-1", "0", "1:70000", "1:2:3:4", "1:gpu01:2", "1:fd00::7", "1:[fd00::7"],
)
def test_no_port_is(word: str) -> None:
    with pytest.raises(ValueError, match=r"`.*`"):
        parse_forward(word)
