"""`port-forward`: which ports and nodes it refuses. `tests/lab/test_cli.py` forwards one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.documented import typed

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    head.write_local({"command": "true"}, workers=(1, 1))
    return head


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param(("x",), 2, "`x` is not PORT", id="no port"),
        pytest.param(("70000",), 2, "no port between 1 and 65535", id="beyond all ports"),
        pytest.param(("0:0",), 2, "no port between 1 and 65535", id="any port there"),
        pytest.param(("0:gpu01:1",), 2, "`gpu01` in `0:gpu01:1` is not an IP address", id="a name"),
        pytest.param(("0:1", "--node", "nowhere"), 102, "no node `nowhere`", id="no such node"),
    ],
)
def test_a_wrong_port_or_node_is_refused(head: LocalHead, arguments: tuple[str, ...], code: int, said: str) -> None:
    done = head.run("port-forward", *arguments)

    assert done.returncode == code
    assert said in done.stderr


def test_a_port_of_this_machine_is_not_forwarded_to_itself(head: LocalHead) -> None:
    done = head.run(*typed("clusterctl port-forward 6006"))

    assert done.returncode == 6
    assert "localhost.0 is this machine" in done.stderr


def test_a_command_transport_forwards_no_ports(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "cluster.yaml").write_text(
        "version: 1\nhosts: {box: 1}\ndefaults: {transport: {command: [docker, exec, -i, '{host}', sh]}}\n"
    )
    done = head.run("port-forward", "6006")

    assert done.returncode == 6
    assert "box is reached by a transport command, which cannot forward ports" in done.stderr


def test_an_address_that_is_not_ours_is_named(make_head: MakeHead) -> None:
    head = make_head()
    (head.folder / "cluster.yaml").write_text("version: 1\nhosts: {box: 1}\n")
    done = head.run("port-forward", "0:1", "--bind", "192.0.2.1")

    assert done.returncode == 6
    assert "cannot listen on 192.0.2.1" in done.stderr
