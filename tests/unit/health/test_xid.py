"""XIDs are counted whatever else is logged, and weighed as NVIDIA's catalogue says: by age, repair and whose GPU it was."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from clusterctl.health.checks.xid import CATALOGUE, NVLINK5, RECOVERY_CHANGED
from clusterctl.health.findings import Finding, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import UPTIME, changed, facts, log

FAIL, WARN, PASS, SKIP = Status.FAIL, Status.WARN, Status.PASS, Status.SKIP
OLD_DRIVER = {f"err{i}__recovery_action": 3 for i in range(8)}
"""A driver before 570: it does not tell whether a GPU is well again after an XID."""


def judged(*texts: str, age: float = 60.0, gpus: int = 8, **changes: object) -> list[Finding]:
    """What is said of a node with these lines in its log, whose driver does not tell of repairs unless it is told to."""
    told = changed(facts(), kernel_log=log(*texts, age=age), **{**OLD_DRIVER, **changes})
    return judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=gpus)}), ["gpu.xid"])


def repaired(*texts: str, age: float = 60.0, **changes: object) -> list[Finding]:
    """The same of a node whose driver tells that all is well now."""
    told = changed(facts(), kernel_log=log(*texts, age=age), **changes)
    return judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}), ["gpu.xid"])


def xid(code: int, text: str = "pid=123, name=python, detail", bus: str = "12") -> str:
    return f"NVRM: Xid (PCI:0000:{bus}:00): {code}, {text}"


def asked(value: str, before: str = "0x0 (None)") -> str:
    return xid(154, f"GPU recovery action changed from {before} to {value}")


# --- the lines


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["NVRM: Xid (PCI:0000:12:00): 79, pid=1, GPU has fallen off the bus."], 79),
        (["NVRM: Xid (0000:12:00): 79, GPU has fallen off the bus."], 79),
        (["NVRM: Xid (PCI:0000:12:00 GPU-I:05 GPU-CI:00): 95, pid=1, Uncontained error"], 95),
        (["NVRM: Xid (PCI:0000:12:00 GPU-I:05): 95, pid=1, Uncontained error"], 95),
        (["NVRM: GPU 0000:12:00.0: GPU has fallen off the bus."], 79),
        (
            [
                "NVRM: The NVIDIA GPU 0000:12:00.0",
                "NVRM: (PCI ID: 10de:2330) installed in this system has",
                "NVRM: fallen off the bus and is not responding to commands.",
            ],
            79,
        ),
        (
            [
                (
                    "NVRM: The NVIDIA GPU 0000:12:00.0\n"
                    "NVRM: (PCI ID: 10de:2330) installed in this system has\n"
                    "NVRM: fallen off the bus and is not responding to commands."
                )
            ],
            79,
        ),
    ],
    ids=["usual", "no PCI", "MIG", "MIG without compute instance", "no code", "three lines", "three lines, one stamp"],
)
def test_an_error_is_read_in_each_form_that_the_driver_writes(lines: list[str], code: int) -> None:
    assert [(f.override_key, f.gpu, f.status) for f in judged(*lines)] == [(f"xid.{code}", 2, FAIL)]


def test_one_event_in_two_forms_is_one_event() -> None:
    found = judged(xid(79, "GPU has fallen off the bus."), "NVRM: GPU 0000:12:00.0: GPU has fallen off the bus.")
    assert "times" not in found[0].message


def test_a_line_that_begins_like_a_dead_gpu_and_goes_on_otherwise_is_none() -> None:
    lines = [
        "NVRM: The NVIDIA GPU 0000:12:00.0",
        *["NVRM: nothing"] * 9,
        "NVRM: fallen off the bus and is not responding",
    ]
    assert [f.status for f in judged(*lines)] == [PASS]


def test_a_flood_behind_it_hides_no_error() -> None:
    flood = [f"NVRM: nvAssertOkFailedNoLog: Assertion failed: GPU lost from the bus {i}" for i in range(5000)]
    found = judged(xid(79, "pid=1, GPU has fallen off the bus."), *flood)
    assert [(f.status, f.override_key) for f in found] == [(FAIL, "xid.79")]


def test_a_flood_of_one_error_is_told_once_with_its_number_and_its_first_and_last_age() -> None:
    early = log(xid(31), age=7200.0)["events"][0]
    both = log(*[xid(31)] * 4000, age=60.0)["events"][0]
    assert (both["count"], both["first_age_s"], both["last_age_s"], early["last_age_s"]) == (4000, 60.0, 60.0, 7200.0)
    assert "4000 times" in judged(*[xid(31)] * 4000)[0].message


def test_a_ring_that_has_lost_its_beginning_is_not_called_the_whole_boot() -> None:
    told = changed(facts(), kernel_log=log(since=3 * 3600.0))
    found = judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}), ["gpu.xid", "gpu.sxid"])
    assert [f.message for f in found] == [
        f"no {what} in the last 3 h; the kernel log has lost older lines" for what in ("XID", "SXid")
    ]
    assert judged()[0].message == "no XID since boot"
    assert log()["since_s"] == UPTIME


# --- their weight


@pytest.mark.parametrize(
    "code",
    [46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158, 167, 168, 171, 172, 173],
)
def test_hardware_errors_fail_the_node(code: int) -> None:
    assert [(f.status, f.gpu, f.override_key) for f in judged(xid(code))] == [(FAIL, 2, f"xid.{code}")]


@pytest.mark.parametrize(
    "code",
    [
        8,
        11,
        13,
        25,
        31,
        32,
        37,
        39,
        43,
        44,
        45,
        63,
        66,
        68,
        69,
        70,
        78,
        80,
        82,
        86,
        92,
        93,
        94,
        96,
        99,
        106,
        108,
        121,
        126,
        137,
        139,
        141,
        142,
        152,
        153,
        157,
        159,
        160,
        161,
        162,
        165,
        169,
        174,
        176,
        185,
    ],
)
def test_application_errors_and_notes_never_fail_the_node(code: int) -> None:
    assert [f.status for f in judged(xid(code))] == [WARN]
    assert "not in the catalogue" not in judged(xid(code))[0].message


def test_an_error_of_the_users_program_asks_for_no_repair() -> None:
    assert judged(xid(13))[0].hint == "The program that used the GPU caused this error; nothing to repair"


@pytest.mark.parametrize("code", [56, 57, 58, 65, 73, 81, 122, 125])
def test_codes_that_the_catalogue_does_not_use_only_warn(code: int) -> None:
    found = judged(xid(code))
    assert [f.status for f in found] == [WARN]
    assert "unused in NVIDIA's catalogue" in found[0].message


def test_a_code_that_nobody_knows_only_warns() -> None:
    assert [(f.status, "not in the catalogue" in f.message) for f in judged(xid(999))] == [(WARN, True)]


def test_no_code_that_the_driver_knows_is_missing_from_the_catalogue() -> None:
    with (Path(__file__).parent / "nverror.csv").open(encoding="utf-8") as file:
        known = {int(row["code"]): row["name"] for row in csv.DictReader(line for line in file if line[0] != "#")}
    assert len(known) > 170
    assert {n: known[n] for n in set(known) - set(CATALOGUE) - set(NVLINK5) - {RECOVERY_CHANGED}} == {}


@pytest.mark.parametrize(("word", "status"), [("Fatal", FAIL), ("Non-fatal", WARN), ("Nonfatal", WARN)])
def test_nvlink5_errors_fail_only_where_they_are_fatal(word: str, status: Status) -> None:
    assert judged(xid(145, f"RLW_REMAP {word} XC0 i0 Link 08"))[0].status is status


def test_a_fatal_nvlink5_error_is_not_hidden_by_harmless_ones_after_it() -> None:
    found = judged(xid(145, "RLW_REMAP Fatal XC0 i0 Link 08"), *[xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 08")] * 50)
    assert {f.status for f in found} == {FAIL, WARN}


def test_contained_memory_errors_fail_from_the_third_on() -> None:
    assert judged(xid(94), xid(94))[0].status is WARN
    found = judged(xid(94), xid(94), xid(94))
    assert [f.status for f in found] == [FAIL]
    assert "3 times" in found[0].message


def test_an_old_hardware_error_that_a_reset_repairs_only_warns_and_says_its_age() -> None:
    found = judged(xid(119), age=2 * 86400.0)
    assert found[0].status is WARN
    assert found[0].message.endswith("2 d ago")


def test_an_error_of_a_gpu_that_the_run_does_not_use_is_left_out() -> None:
    assert [f.status for f in judged(xid(79, bus="17"), gpus=4)] == [PASS]


def test_an_error_at_an_address_that_no_gpu_has_any_more_is_told_by_address() -> None:
    found = judged(xid(79, bus="aa"))
    assert (found[0].status, found[0].gpu) == (FAIL, None)
    assert found[0].message.startswith("GPU at 0000:aa:00")


# --- what the driver asks for, and whether it has got it


@pytest.mark.parametrize(
    ("value", "statuses", "action", "words"),
    [
        ("0x0 (None)", [PASS], "NONE", ""),
        ("0x1 (GPU Reset Required)", [FAIL], "RESET_GPU", "GPU reset"),
        ("0x2 (Node Reboot Required)", [FAIL], "REBOOT_NODE", "node reboot"),
        ("0x3 (Drain P2P)", [WARN], "RESET_GPU", "drain P2P"),
        ("0x4 (Drain and Reset)", [FAIL], "RESET_GPU", "drain and reset"),
        ("0x5 (Recover IMEX Domain)", [WARN], "RESTART_FABRICMANAGER", "recover IMEX domain"),
        ("0x6 (Bus Reset)", [FAIL], "RESET_GPU", "bus reset"),
        ("0x7 (System Reboot)", [FAIL], "REBOOT_NODE", "system reboot"),
        ("0x1 (PF FLR)", [FAIL], "RESET_GPU", "GPU reset"),
        ("0x2 (OS Reboot)", [FAIL], "REBOOT_NODE", "node reboot"),
        ("0x2", [FAIL], "REBOOT_NODE", "node reboot"),
        ("Drain and Reset", [FAIL], "RESET_GPU", "drain and reset"),
    ],
)
@pytest.mark.parametrize("before", ["0x0 (None)", "0x2 (Node Reboot Required)"])
def test_a_changed_recovery_action_says_by_its_number_what_it_is_now(
    value: str, statuses: list[Status], action: str, words: str, before: str
) -> None:
    found = judged(asked(value, before))
    assert ([f.status for f in found], found[0].action) == (statuses, action)
    assert words in found[0].message


def test_a_gpu_that_was_reset_is_told_as_repaired_by_the_log() -> None:
    lines = [xid(119), asked("0x1 (GPU Reset Required)"), asked("0x0 (None)", "0x1 (GPU Reset Required)")]
    found = judged(*lines)
    assert [(f.status, f.override_key) for f in found] == [(WARN, "xid.119")]
    assert "repaired since" in found[0].message


def test_a_gpu_that_was_reset_is_told_as_repaired_by_what_it_reads_now() -> None:
    found = repaired(xid(119), asked("0x1 (GPU Reset Required)"))
    assert [(f.status, f.override_key) for f in found] == [(WARN, "xid.119")]
    assert "repaired since" in found[0].message


@pytest.mark.parametrize(
    "still",
    [{"gpu2__recovery_action": 1}, {"gpu2__ecc_unc": 1}, {"err2__temp": 15}],
    ids=["driver still asks", "memory error", "lost"],
)
def test_a_gpu_that_is_not_well_is_not_called_repaired(still: dict[str, Any]) -> None:
    assert [f.status for f in repaired(xid(95), **still)] == [FAIL]


def test_a_wish_that_was_taken_back_before_the_error_repairs_nothing() -> None:
    assert [f.status for f in judged(asked("0x0 (None)", "0x1 (GPU Reset Required)"), xid(119))] == [FAIL]


@pytest.mark.parametrize("age", [60.0, 2 * 86400.0])
def test_what_asks_for_a_reboot_fails_until_there_was_one(age: float) -> None:
    assert [f.status for f in repaired(xid(79), age=age)] == [FAIL]


def test_a_context_switch_timeout_fails_unless_the_driver_says_that_all_is_well() -> None:
    assert repaired(xid(109))[0].status is WARN
    assert repaired(xid(109), gpu2__recovery_action=1)[0].status is FAIL
    assert judged(xid(109))[0].status is FAIL


# --- a log that is closed


@pytest.mark.parametrize("driver", [{}, OLD_DRIVER], ids=["570", "550"])
def test_a_closed_log_is_told_once_and_lowers_no_verdict_where_the_gpus_speak(driver: dict[str, Any]) -> None:
    told = changed(facts(), kernel_log="denied", **driver)
    found = judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}))
    closed = [f for f in found if f.needs_root]
    assert {f.check for f in closed} == {"gpu.xid", "gpu.sxid", "host.kernel_log"}
    assert len({f.hint for f in closed}) == 1
    assert "usermod -aG adm train" in str(closed[0].hint)
    assert {f.status for f in found} == {PASS, SKIP}


def test_a_closed_log_is_unknown_where_nothing_speaks_in_its_stead() -> None:
    told = changed(facts(), kernel_log="denied", nvml="timeout")
    found = judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}), ["gpu.xid"])
    assert [f.status for f in found] == [Status.UNKNOWN]


APART = {"state": 1, "status": 0, "health": 0}


def test_a_closed_log_says_that_the_fabric_speaks_for_its_switches_where_it_does() -> None:
    told = changed(facts(), kernel_log="denied")
    (finding,) = judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}), ["gpu.sxid"])
    assert "the fabric state of the GPUs is the evidence" in finding.message


def test_a_fabric_in_trouble_speaks_for_no_switch() -> None:
    told = changed(facts(), kernel_log="denied", gpu1__fabric=APART)
    (finding,) = judge_node("n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}), ["gpu.sxid"])
    assert finding.status is Status.UNKNOWN


def test_a_closed_log_fails_a_node_that_is_required_to_show_it() -> None:
    told = changed(facts(), kernel_log="denied")
    found = judge_node(
        "n0", told, HealthSettings(nodes={"n0": NodeDeclaration(gpus=8)}, required=("gpu.xid",)), ["gpu.xid"]
    )
    assert (found[0].status, found[0].needs_root) == (FAIL, False)
