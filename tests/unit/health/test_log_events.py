"""XIDs and SXids in their details: whose they were, how long ago, how often, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.agent.facts import kernel_errors
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import UPTIME, changed, facts

DAY = 86400.0
FAIL, WARN, PASS = Status.FAIL, Status.WARN, Status.PASS
OLD_DRIVER = {f"err{i}__recovery_action": 3 for i in range(8)}
"""One that does not tell whether a GPU is well again."""

Line = tuple[float, str]


def judged(check: str, *lines: Line, lookback: float = DAY, gpus: int = 8, **changes: Any) -> list[Finding]:
    """What a check says of a log with these lines, each with the seconds that it is old."""
    text = "\n".join(f"[{UPTIME - age:12.6f}] {said}" for age, said in [(UPTIME, "first line"), *lines])
    told = changed(
        facts(),
        kernel_log={"source": "dmesg", "uptime": UPTIME, **kernel_errors.filter_kernel_log(text, uptime=UPTIME)},
        **{**OLD_DRIVER, **changes},
    )
    context = HealthSettings(nodes={"n0": NodeDeclaration(gpus=gpus)}, thresholds={f"{check}.lookback": lookback})
    return judge_node("n0", told, context, [check])


def xid(code: int, bus: str = "0000:12:00", text: str = "pid=1, some text") -> str:
    return f"NVRM: Xid (PCI:{bus}): {code}, {text}"


def sxid(code: int, text: str, switch: str = "c1") -> str:
    return f"nvidia-nvswitch0: SXid (PCI:0000:{switch}:00.0): {code}, {text}"


def test_an_address_has_a_domain() -> None:
    twins = {"gpu0__pci": "00000009:01:00.0", "gpu1__pci": "00000019:01:00.0"}

    def told(address: str) -> list[tuple[int | None, str]]:
        found = judged("gpu.xid", (60.0, xid(79, address)), **twins)
        return [(f.gpu, f.message.partition(": ")[0]) for f in found]

    assert told("0009:01:00") == [(0, "GPU 0")]
    assert told("0019:01:00") == [(1, "GPU 1")]
    assert told("0000:01:00") == [(None, "GPU at 0000:01:00")]


@pytest.mark.parametrize("address", ["0000:1A:00", "0000:1a:00", "00000000:1A:00.0"])
def test_an_address_is_read_however_it_is_written(address: str) -> None:
    found = judged("gpu.xid", (60.0, xid(79, address)), gpu2__pci="00000000:1A:00.0")

    assert [(f.gpu, f.status) for f in found] == [(2, FAIL)]


def test_a_finding_holds_what_the_log_said_and_what_to_do() -> None:
    (found,) = judged("gpu.xid", (7200.0, xid(119, text="pid=1, older")), (3600.0, xid(119, text="pid=2, newer")))

    assert (found.status, found.gpu, found.override_key, found.action) == (FAIL, 2, "xid.119", "RESET_GPU")
    assert found.message.endswith(", 2 times, 1 h ago")
    assert found.value == {"xid": 119, "count": 2, "last_age_s": pytest.approx(3600.0), "text": "pid=2, newer"}
    assert found.hint is not None
    assert "nvidia-smi -r" in found.hint


@pytest.mark.parametrize(
    ("age", "when"),
    [
        pytest.param(1.0, "1 s ago", id="a second"),
        pytest.param(59.0, "59 s ago", id="seconds"),
        pytest.param(60.0, "60 s ago", id="a minute"),
        pytest.param(3590.0, "60 min ago", id="minutes"),
        pytest.param(3600.0, "1 h ago", id="an hour"),
        pytest.param(DAY - 60, "24 h ago", id="hours"),
        pytest.param(DAY, "1 d ago", id="a day"),
        pytest.param(3 * DAY, "3 d ago", id="days"),
    ],
)
def test_how_long_ago_it_was_is_told(age: float, when: str) -> None:
    assert judged("gpu.xid", (age, xid(119)))[0].message.endswith(f", {when}")


@pytest.mark.parametrize(
    ("age", "lookback", "status"),
    [
        pytest.param(3600.0, 3601.0, FAIL, id="within"),
        pytest.param(3600.0, 3599.0, WARN, id="beyond"),
    ],
)
@pytest.mark.parametrize(
    ("check", "text"),
    [
        pytest.param("gpu.xid", xid(119), id="of a GPU"),
        pytest.param("gpu.sxid", sxid(20034, "Fatal, Link 30 LTSSM Fault Up"), id="of a switch"),
    ],
)
def test_what_a_reset_repairs_fails_only_while_it_is_recent(
    check: str, text: str, age: float, lookback: float, status: Status
) -> None:
    assert [f.status for f in judged(check, (age, text), lookback=lookback)] == [status]


def test_contained_memory_errors_count_where_they_are_recent_and_of_one_gpu() -> None:
    recent, old = (60.0, xid(94)), (2 * DAY, xid(94))

    assert [f.status for f in judged("gpu.xid", old, recent, recent)] == [WARN]
    assert [f.status for f in judged("gpu.xid", recent, recent, (60.0, xid(94, "0000:13:00")))] == [WARN, WARN]
    (found,) = judged("gpu.xid", old, recent, recent, recent)
    assert (found.status, found.action) == (FAIL, "RESET_GPU")


@pytest.mark.parametrize(
    ("code", "text", "status", "said"),
    [
        pytest.param(20034, "Fatal, Link 30 LTSSM Fault Up", FAIL, "SXid 20034, fatal", id="fatal"),
        pytest.param(11012, "Non-fatal, Link 30 egress", WARN, "SXid 11012, not fatal", id="not fatal"),
        pytest.param(
            12021, "Non-fatal, ECC", WARN, "SXid 12021, not fatal, data may be corrupted silently", id="silent, ingress"
        ),
        pytest.param(
            12023, "Fatal, ECC", FAIL, "SXid 12023, fatal, data may be corrupted silently", id="silent, egress"
        ),
    ],
)
def test_errors_of_a_switch_fail_only_where_they_are_fatal(code: int, text: str, status: Status, said: str) -> None:
    (found,) = judged("gpu.sxid", (60.0, sxid(code, text)))

    assert (found.status, found.message) == (status, f"NVSwitch 0000:c1:00.0: {said}, 60 s ago")
    assert (found.override_key, found.gpu, found.action) == (f"sxid.{code}", None, "RESTART_FABRICMANAGER")
    assert (found.value["sxid"], found.value["count"]) == (code, 1)


def test_errors_of_a_switch_are_told_once_for_each_switch_and_code() -> None:
    found = judged(
        "gpu.sxid",
        (7200.0, sxid(20034, "Fatal, link")),
        (60.0, sxid(20034, "Fatal, link")),
        (60.0, sxid(20034, "Fatal, link", switch="c2")),
        (60.0, sxid(20035, "Fatal, link")),
    )

    assert [f.message for f in found] == [
        "NVSwitch 0000:c1:00.0: SXid 20034, fatal, 2 times, 60 s ago",
        "NVSwitch 0000:c2:00.0: SXid 20034, fatal, 60 s ago",
        "NVSwitch 0000:c1:00.0: SXid 20035, fatal, 60 s ago",
    ]


@pytest.mark.parametrize("check", ["gpu.xid", "gpu.sxid"])
def test_a_log_without_a_word_of_it_passes(check: str) -> None:
    found = judged(check, (60.0, "usb 1-1: new device"))

    assert [f.status for f in found] == [PASS]
    assert found[0].message.startswith(f"no {'XID' if check == 'gpu.xid' else 'SXid'} ")
