"""XIDs are weighed as NVIDIA's catalogue says, by age and by whose GPU it was."""

from __future__ import annotations

import pytest

from clusterctl.health.context import Context, Expectation
from clusterctl.health.judge import judge_node
from clusterctl.health.model import Finding, Status
from tests.unit.health.healthy import changed, facts

FAIL, WARN, PASS = Status.FAIL, Status.WARN, Status.PASS


def judged(*texts: str, age: float = 60.0, gpus: int = 8, **changes: object) -> list[Finding]:
    lines = [{"age_s": age, "text": text} for text in texts]
    told = changed(facts(), kernel_log__lines=lines, **changes)
    return judge_node("n0", told, Context(nodes={"n0": Expectation(gpus=gpus)}), ["gpu.xid"])


def xid(code: int, text: str = "pid=123, name=python, detail", bus: str = "12") -> str:
    return f"NVRM: Xid (PCI:0000:{bus}:00): {code}, {text}"


@pytest.mark.parametrize(
    "code", [46, 48, 54, 62, 64, 74, 79, 95, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 167, 168, 171, 172]
)
def test_hardware_errors_fail_the_node(code: int) -> None:
    assert [(f.status, f.gpu, f.key) for f in judged(xid(code))] == [(FAIL, 2, f"xid.{code}")]


@pytest.mark.parametrize(
    "code", [13, 31, 43, 45, 63, 68, 69, 78, 80, 92, 94, 121, 137, 141, 142, 152, 153, 157, 160, 161, 162, 165, 169]
)
def test_application_errors_and_notes_never_fail_the_node(code: int) -> None:
    assert [f.status for f in judged(xid(code))] == [WARN]


@pytest.mark.parametrize("code", [56, 57, 58, 65, 73, 81, 122, 125, 999])
def test_codes_that_the_catalogue_does_not_use_only_warn(code: int) -> None:
    found = judged(xid(code))
    assert [f.status for f in found] == [WARN]
    assert "not in the catalogue" in found[0].message


@pytest.mark.parametrize(
    ("text", "statuses", "action"),
    [
        ("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", [FAIL], "REBOOT_NODE"),
        ("GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", [FAIL], "RESET_GPU"),
        ("GPU recovery action changed from 0x1 (Drain and Reset) to 0x4 (Drain and Reset)", [FAIL], "RESET_GPU"),
        ("GPU recovery action changed from 0x1 to 0x0 (None)", [PASS], "NONE"),
    ],
    ids=["reboot", "reset", "drain", "cleared"],
)
def test_a_changed_recovery_action_says_itself_what_to_do(text: str, statuses: list[Status], action: str) -> None:
    found = judged(xid(154, text))
    assert ([f.status for f in found], found[0].action) == (statuses, action)


@pytest.mark.parametrize(("word", "status"), [("Fatal", FAIL), ("Non-fatal", WARN), ("Nonfatal", WARN)])
def test_nvlink5_errors_fail_only_where_they_are_fatal(word: str, status: Status) -> None:
    assert judged(xid(145, f"RLW_REMAP {word} XC0 i0 Link 08"))[0].status is status


def test_a_context_switch_timeout_fails_only_where_the_driver_wants_something_done() -> None:
    assert judged(xid(109))[0].status is WARN
    assert judged(xid(109), gpu2__recovery_action=1)[0].status is FAIL


def test_contained_memory_errors_fail_from_the_third_on() -> None:
    assert judged(xid(94), xid(94))[0].status is WARN
    found = judged(xid(94), xid(94), xid(94))
    assert [f.status for f in found] == [FAIL]
    assert "3 times" in found[0].message


def test_an_old_hardware_error_only_warns_and_says_its_age() -> None:
    found = judged(xid(79), age=2 * 86400.0)
    assert found[0].status is WARN
    assert found[0].message.endswith("2 d ago")


def test_the_line_without_a_code_is_79() -> None:
    found = judged("NVRM: GPU 0000:12:00.0: GPU has fallen off the bus.")
    assert (found[0].key, found[0].gpu) == ("xid.79", 2)


def test_an_error_of_a_gpu_that_the_run_does_not_use_is_left_out() -> None:
    assert [f.status for f in judged(xid(79, bus="17"), gpus=4)] == [PASS]


def test_an_error_at_an_address_that_no_gpu_has_any_more_is_told_by_address() -> None:
    found = judged(xid(79, bus="aa"))
    assert (found[0].status, found[0].gpu) == (FAIL, None)
    assert found[0].message.startswith("GPU at 0000:aa:00")
