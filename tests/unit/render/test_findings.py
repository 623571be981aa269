"""Findings as a person reads them: nodes first, what is wrong once, and nothing drowned."""

from __future__ import annotations

import io
import json
import re
from typing import Any
from xml.etree import ElementTree

import pytest

from clusterctl.health.findings import Finding, Status
from clusterctl.render.console import Terminal
from clusterctl.render.health_formats import (
    NAGIOS_CODES,
    format_exclude_list,
    format_health_junit,
    format_health_nagios,
)
from clusterctl.render.health_report import (
    HealthReport,
    NodeHealth,
    format_health_ndjson,
    format_health_prometheus,
    render_findings_by_check,
    render_health,
)

PLAIN = Terminal(io.StringIO(), colour=False, live=False, unicode=False, width=80)


def finding(check: str, status: Status = Status.FAIL, message: str = "bad", **more: Any) -> Finding:
    return Finding(check=check, status=status, message=message, **more)


def test_a_gpu_is_named_once_and_like_gpus_are_folded() -> None:
    found = [
        finding("gpu.ecc", message=f"GPU {i} (00000000:1{i}:00.0): worn out", node="n1", gpu=i, hint="replace it")
        for i in (0, 1, 5)
    ]

    assert render_findings_by_check(found, PLAIN)[1:] == ["    n1 GPU 0-1,5: worn out", "    hint: replace it"]


def test_nodes_that_say_the_same_are_one_line_and_the_remedy_stands_once() -> None:
    found = [finding("host.disk", message="/: 99 % full", node=f"n{i}", hint="free space") for i in (1, 2, 4)]

    assert render_findings_by_check(found, PLAIN)[1:] == ["    n[1-2,4]: /: 99 % full", "    hint: free space"]


def test_what_one_lost_gpu_hides_is_said_once() -> None:
    hidden = [finding(f"gpu.c{i}", Status.UNKNOWN, "GPU 3: not read", node="n1", gpu=3) for i in range(20)]
    other = finding("gpu.xid", Status.UNKNOWN, "may not look", node="n1")

    lines = render_findings_by_check([*hidden, other], PLAIN, statuses=(Status.UNKNOWN,))

    assert [line.split("UNKNOWN ")[-1] for line in lines] == [
        "gpu.c0, gpu.c1, gpu.c2 and 17 more checks",
        "    n1 GPU 3: not read",
        "gpu.xid",
        "    n1: may not look",
    ]


def test_the_line_of_a_node_keeps_its_numbers_where_names_have_no_room() -> None:
    own = (
        *(finding(f"host.something_or_other_{i}", Status.WARN, node="n1") for i in range(5)),
        *(finding(f"host.fine_{i}", Status.PASS, node="n1") for i in range(30)),
    )
    view = HealthReport(verdict=Status.WARN, nodes=(NodeHealth(node="n1", verdict=Status.WARN, findings=own),))

    line = render_health(view, PLAIN)[0]

    assert "5 warn" in line
    assert "30 passed" in line
    assert len(line) <= 80


def alike(*nodes: str, status: Status = Status.WARN) -> tuple[NodeHealth, ...]:
    """Nodes of which the same is told."""
    return tuple(
        NodeHealth(
            node=node,
            verdict=status,
            findings=(
                finding("host.disk", status, node=node, message="full"),
                finding("host.load", Status.PASS, node=node, message="idle"),
                finding("gpu.count", Status.SKIP, node=node, message="no GPUs declared"),
                finding("gpu.temp", Status.SKIP, node=node, message="no GPUs declared"),
                finding("net.ib", Status.SKIP, node=node, message="no RDMA"),
            ),
        )
        for node in nodes
    )


def test_nodes_of_which_the_same_is_told_share_a_line() -> None:
    nodes = (*alike("gpu01", "gpu02"), *alike("gpu03", status=Status.FAIL), *alike("gpu04"))
    lines = render_health(HealthReport(verdict=Status.FAIL, nodes=nodes), PLAIN)
    assert [line.split()[1] for line in lines[:2]] == ["gpu[01-02,04]", "gpu03"]
    assert "1 warn" in lines[0]
    assert lines[-1].startswith("FAIL: 4 nodes")


def test_in_full_each_check_that_passed_is_a_line_and_all_that_were_skipped_a_sentence() -> None:
    lines = render_health(HealthReport(verdict=Status.WARN, nodes=alike("n1", "n2")), PLAIN, verbose=True)
    assert any(line.endswith("host.load  n[1-2]: idle") for line in lines)
    assert any(line.endswith("3 checks skipped: no GPUs declared (2), no RDMA (1)") for line in lines)
    assert not any(
        "idle" in line for line in render_health(HealthReport(verdict=Status.WARN, nodes=alike("n1")), PLAIN)
    )


def test_what_only_root_may_see_is_told_once_for_all_nodes_that_are_alike() -> None:
    closed = {"status": Status.SKIP, "message": "the log needs root", "hint": "`sudo usermod`", "needs_root": True}
    nodes = tuple(
        NodeHealth(
            node=node,
            verdict=Status.PASS,
            findings=tuple(finding(check, node=node, **closed) for check in ("gpu.xid", "gpu.sxid", "host.kernel_log")),
        )
        for node in ("n1", "n2")
    )

    lines = render_health(HealthReport(verdict=Status.PASS, nodes=nodes), PLAIN)

    told = [line for line in lines if "root" in line or "usermod" in line]
    assert [line.strip(" -·.") for line in told] == [
        "needs root n[1-2]: gpu.xid, gpu.sxid, host.kernel_log",
        "hint: `sudo usermod`",
    ]


def test_control_sequences_of_a_node_reach_no_terminal() -> None:
    assert "\x1b" not in "".join(
        render_findings_by_check([finding("x", message="\x1b[2Jgone", hint="\x1b]0;t\x07")], PLAIN)
    )


def test_machines_get_every_finding_and_labels_are_escaped() -> None:
    own = (finding("gpu.lost", node='a"b\\c', gpu=3), finding("host.disk", Status.PASS, node='a"b\\c'))
    view = HealthReport(verdict=Status.FAIL, nodes=(NodeHealth(node='a"b\\c', verdict=Status.FAIL, findings=own),))

    assert [json.loads(line)["check"] for line in format_health_ndjson(view)] == ["gpu.lost", "host.disk"]
    assert (
        'clusterctl_health_finding{node="a\\"b\\\\c",check="gpu.lost",status="FAIL",gpu="3"} 1'
        in format_health_prometheus(view)
    )


def test_repeat_offenders_are_marked_below_the_nodes() -> None:
    offence = "lost twice this week, both times XID 79"
    nodes = tuple(NodeHealth(node=f"n{i}", verdict=Status.PASS, offence=offence if i else None) for i in range(3))
    lines = render_health(HealthReport(verdict=Status.PASS, nodes=nodes), PLAIN)

    assert [line for line in lines if "lost" in line] == [f"!  n[1-2]: {offence}"]


BROKEN = HealthReport(
    verdict=Status.FAIL,
    nodes=(
        NodeHealth(
            node="gpu07",
            verdict=Status.FAIL,
            findings=(
                finding("gpu.xid", node="gpu07", gpu=3, message="XID 79 | <gone>\x1b[2J\x01", hint="reboot it"),
                finding("host.swap", Status.WARN, node="gpu07", message="in use"),
                finding("host.governor", Status.UNKNOWN, node="gpu07", message="no answer"),
                finding("host.disk", Status.PASS, node="gpu07"),
            ),
        ),
        NodeHealth(node="gpu08", verdict=Status.PASS, findings=(finding("host.disk", Status.PASS, node="gpu08"),)),
    ),
    cluster=(finding("net.mtu", Status.SKIP, message="one node"),),
)


@pytest.mark.parametrize(
    ("strict", "results"),
    [(False, ["failure", "system-out", "skipped", None]), (True, ["failure", "failure", "failure", None])],
    ids=["as the exit code", "strict"],
)
def test_ci_servers_get_a_suite_for_each_node(strict: bool, results: list[str | None]) -> None:
    root = ElementTree.fromstring("\n".join(format_health_junit(BROKEN, strict=strict)))

    first, second, cluster = root
    assert [suite.get("name") for suite in root] == ["gpu07", "gpu08", "cluster"]
    assert [child.tag if (child := next(iter(case), None)) is not None else None for case in first] == results
    assert first.attrib == {
        "name": "gpu07",
        "tests": "4",
        "errors": "0",
        "failures": str(results.count("failure")),
        "skipped": str(results.count("skipped")),
    }
    assert first[0].attrib == {"classname": "health.gpu07", "name": "gpu.xid GPU 3", "time": "0.000"}
    assert (first[0][0].get("type"), first[0][0].text) == ("FAIL", "reboot it")
    assert str(first[0][0].get("message")).startswith("FAIL: XID 79 | <gone>")
    assert [case.get("name") for suite in (second, cluster) for case in suite] == ["host.disk", "net.mtu"]


@pytest.mark.parametrize(
    ("report", "code", "line"),
    [
        (
            BROKEN,
            2,
            r"HEALTH CRITICAL - gpu07 gpu\.xid: XID 79 / <gone>\S* \| nodes=2 fail=1 warn=1 unknown=1 pass=2 skip=1",
        ),
        (
            HealthReport(verdict=Status.PASS, nodes=BROKEN.nodes[1:]),
            0,
            r"HEALTH OK - 1 node healthy \| nodes=1 fail=0 warn=0 unknown=0 pass=1 skip=0",
        ),
    ],
    ids=["critical", "ok"],
)
def test_nagios_gets_one_status_line_and_its_exit_code(report: HealthReport, code: int, line: str) -> None:
    (written,) = format_health_nagios(report)

    assert re.fullmatch(line, written.replace("\x01", "")), written
    assert NAGIOS_CODES[report.verdict] == code


def test_the_exclude_list_has_the_nodes_that_failed() -> None:
    assert format_exclude_list(BROKEN) == "# nodes that failed `clusterctl health`\ngpu07\n"
