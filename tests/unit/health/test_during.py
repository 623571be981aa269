"""Trouble during a run is told once, when it is sure, and once more when it is over."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.health.findings import Action, Finding, Status
from clusterctl.health.judge import judge_node
from clusterctl.health.monitor import (
    HealthChange,
    NodeMonitor,
    apply_sample,
    find_drain_reason,
    find_fatal_reason,
    list_active_problems,
    report_missing_samples,
)
from clusterctl.health.settings import HealthSettings, NodeDeclaration
from tests.unit.health.healthy import changed, facts

GIB = 1024**3
EVERY = 15.0


def gpu(index: int = 5, **values: Any) -> dict[str, Any]:
    calm = {
        "gpu": index,
        "temp_c": 60,
        "throttle": 0,
        "ecc_unc": 0,
        "remap_failure": 0,
        "recovery_action": 0,
        "err": {},
        "codes": {},
        "links_lost": None,
    }
    return {**calm, **values}


def sample(time: float, *gpus: dict[str, Any], status: str = "ok", **more: Any) -> dict[str, Any]:
    disk = [{"path": "/", "free": 500 * GIB, "total": 1000 * GIB}]
    return {"m": time, "status": status, "reason": None, "disk": disk, "gpus": list(gpus), **more}


def during(seconds: float, start: float = 0.0, **values: Any) -> list[dict[str, Any]]:
    """Samples of one GPU in one state."""
    return [sample(start + i * EVERY, gpu(**values)) for i in range(int(seconds / EVERY) + 1)]


def answers(code: int, word: str, *calls: str) -> dict[str, Any]:
    """What a sample says of calls that ended with an error."""
    return {"err": dict.fromkeys(calls, word), "codes": dict.fromkeys(calls, code)}


LOST = answers(15, "lost", "temp")
UNKNOWN = answers(999, "unknown", "temp")


def watched(*samples: dict[str, Any]) -> NodeMonitor:
    watch = NodeMonitor(node="n")
    for one in samples:
        watch, _ = apply_sample(watch, one)
    return watch


def fold(node: str, samples: Iterable[dict[str, Any]]) -> list[HealthChange]:
    """Everything to be told about a node's samples, in order."""
    watch = NodeMonitor(node=node)
    changes: list[HealthChange] = []
    for one in samples:
        watch, news = apply_sample(watch, one)
        changes += news
    return changes


def told(changes: list[HealthChange]) -> list[tuple[str, str]]:
    return [(change.status.value, change.message) for change in changes]


def test_a_slowdown_that_lasts_is_told_once_with_its_length_and_heat() -> None:
    changes = fold("gpu03", during(600, throttle=0x48, temp_c=84))
    assert told(changes) == [("WARN", "gpu03 GPU 5: hardware thermal slowdown for 3 min, 84 °C")]
    assert (changes[0].time, changes[0].began, changes[0].gpu) == (180.0, 0.0, 5)


def test_a_gpu_that_stays_at_its_limit_of_heat_is_told_with_what_to_do() -> None:
    (change,) = fold("gpu03", during(600, vendor="amd", temp_c=90, temp_limit_c=90))
    assert (change.message, change.action) == (
        "gpu03 GPU 5: core at its limit of 90 °C for 3 min, 90 °C",
        Action.CHECK_POWER_COOLING,
    )


def test_a_slowdown_of_a_minute_is_not_worth_a_word() -> None:
    assert fold("n", [*during(60, throttle=0x8), *during(600, start=75)]) == []


def test_the_end_of_a_told_trouble_is_told_too() -> None:
    changes = fold("gpu03", [*during(300, throttle=0x8), *during(300, start=315)])
    assert told(changes)[1] == ("PASS", "gpu03 GPU 5: hardware slowdown is over after 5 min")


def test_a_trouble_that_flickers_is_told_once() -> None:
    flicker = [
        s for i in range(20) for s in (*during(285, start=i * 330, throttle=0x8), *during(15, start=i * 330 + 300))
    ]
    assert [status for status, _ in told(fold("n", flicker))] == ["WARN"]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (LOST, "n GPU 5: GPU is lost"),
        (answers(16, "reset-required", "temp", "util"), "n GPU 5: GPU requires reset"),
        (answers(28, "lost", "handle"), "n GPU 5: GPU not found"),
        ({"recovery_action": 1}, "n GPU 5: the driver recommends: GPU reset"),
        ({"recovery_action": 2}, "n GPU 5: the driver recommends: node reboot"),
        ({"remap_failure": 1}, "n GPU 5: row remapping failed"),
    ],
    ids=["lost", "reset required", "not found", "reset asked", "reboot asked", "remap"],
)
def test_what_ends_a_run_anyway_is_told_at_once(values: dict[str, Any], words: str) -> None:
    assert told(fold("n", [sample(0, gpu()), sample(15, gpu(**values)), sample(30, gpu(**values))])) == [
        ("FAIL", words)
    ]


def test_memory_errors_count_from_the_start_of_the_run() -> None:
    assert fold("n", during(60, ecc_unc=7)) == []
    changes = fold("n", [*during(60, ecc_unc=7), *during(60, start=75, ecc_unc=11)])
    assert told(changes) == [("FAIL", "n GPU 5: uncorrected memory errors, 4 since the start")]


def test_a_contained_memory_error_condemns_nobody_until_the_driver_wants_something_done() -> None:
    contained, asked = during(60, start=75, ecc_unc=1), during(60, start=150, ecc_unc=1, recovery_action=1)
    changes = fold("n", [*during(60), *contained, *asked])
    assert [change for change in told(changes) if "memory" in change[1]] == [
        ("WARN", "n GPU 5: uncorrected memory errors, contained, 1 since the start"),
        ("FAIL", "n GPU 5: uncorrected memory errors, 1 since the start"),
    ]


def test_a_wish_that_becomes_graver_is_told_again() -> None:
    samples = [sample(0, gpu()), sample(15, gpu(recovery_action=3)), sample(30, gpu(recovery_action=1))]
    assert told(fold("n", samples)) == [
        ("WARN", "n GPU 5: the driver recommends: drain P2P"),
        ("FAIL", "n GPU 5: the driver recommends: GPU reset"),
    ]


def test_a_hung_driver_is_told_with_where_it_hangs_and_told_over_when_it_answers() -> None:
    stuck = [
        sample(t, status="stuck", stuck_s=t - 10, state="D", wchan="nv_lock", reason="no answer")
        for t in (15.0, 30.0, 45.0, 60.0)
    ]
    changes = fold("n", [sample(0, gpu()), *stuck, *during(120, start=75)])
    assert told(changes) == [
        ("FAIL", "n: the GPU driver hangs in nv_lock, no answer for 35 s"),
        ("PASS", "n: the GPU driver hangs in nv_lock is over after 45 s"),
    ]


def test_a_driver_that_is_slow_for_half_a_minute_is_not_hung() -> None:
    slow = [sample(t, status="stuck", stuck_s=t, reason="no answer") for t in (15.0, 29.0)]
    assert fold("n", [sample(0, gpu()), *slow, *during(60, start=44)]) == []


def test_a_sample_that_sees_no_gpus_does_not_end_their_troubles() -> None:
    blind = [sample(300 + i * EVERY, status="stuck", stuck_s=99.0) for i in range(20)]
    changes = fold("n", [*during(285, throttle=0x8), *blind])
    assert [(change.check, change.status.value) for change in changes] == [
        ("gpu.throttle_hw", "WARN"),
        ("gpu.responsive", "FAIL"),
    ]


def test_a_disk_that_fills_up_is_named_with_what_is_left() -> None:
    full = [{"path": "/", "free": GIB // 2, "total": 1000 * GIB}]
    changes = fold("n", [sample(i * EVERY, disk=full) for i in range(5)])
    assert told(changes) == [("WARN", "n: / is nearly full for 30 s, 512 MiB free")]


@pytest.mark.parametrize(
    ("free", "total"),
    [(4096, 102_400), (0.4, 0.5)],
    ids=["a file server with terabytes left", "a small one that is nearly empty"],
)
def test_a_disk_is_full_by_what_is_left_as_it_is_before_a_run(free: float, total: float) -> None:
    disk = [{"path": "/", "free": free * GIB, "total": total * GIB}]
    assert fold("n", [sample(i * EVERY, disk=disk) for i in range(5)]) == []


def test_samples_that_stop_are_an_alarm_and_their_return_is_told() -> None:
    watch, _ = apply_sample(NodeMonitor(node="n"), sample(0, gpu()))
    watch, nothing = report_missing_samples(watch, 100)
    watch, alarm = report_missing_samples(watch, 130)
    watch, again = report_missing_samples(watch, 500)
    _, back = apply_sample(watch, sample(510, gpu()))
    assert (nothing, again) == ([], [])
    assert told(alarm) == [("WARN", "n: no sample of GPUs and host for 2.2 min")]
    assert told(back) == [("PASS", "n: samples again")]


def test_what_is_wrong_by_now_can_be_asked_for() -> None:
    watch = watched(sample(0, gpu()), sample(15, gpu(**LOST)))
    assert [(one.gpu, one.check, one.status) for one in list_active_problems(watch)] == [(5, "gpu.lost", Status.FAIL)]
    assert find_fatal_reason(watch) == "n GPU 5: GPU is lost"


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0x8, 0x20, 0x48]), st.sampled_from([None, 15]), st.sampled_from(["ok", "stuck"])),
        max_size=60,
    )
)
def test_beginnings_and_ends_alternate_for_every_trouble(history: list[tuple[int, int | None, str]]) -> None:
    samples = [
        sample(
            i * EVERY,
            *([gpu(throttle=bits, **(LOST if code else {}))] if status == "ok" else []),
            status=status,
            stuck_s=40.0,
        )
        for i, (bits, code, status) in enumerate(history)
    ]
    seen: dict[tuple[int | None, str], bool] = {}
    for change in fold("n", samples):
        began = change.status is not Status.PASS
        assert seen.get((change.gpu, change.check), False) is not began
        seen[change.gpu, change.check] = began


# --- one odd answer condemns nobody


@pytest.mark.parametrize(("code", "word"), [(999, "unknown"), (10, "timeout"), (11, "unknown"), (8, "power")])
def test_an_answer_that_may_be_chance_counts_from_the_third_look_in_a_row_on(code: int, word: str) -> None:
    odd = gpu(**answers(code, word, "temp"))
    once, twice = [sample(15, odd)], [sample(15, odd), sample(30, odd)]
    assert fold("n", [sample(0, gpu()), *once, sample(30, gpu())]) == []
    assert fold("n", [sample(0, gpu()), *twice, sample(45, gpu()), sample(60, odd)]) == []
    changes = fold("n", [*twice, sample(45, odd)])
    assert [(c.status, c.check) for c in changes] == [(Status.FAIL, "gpu.lost")]
    assert changes[0].message.endswith(", temp")


def test_three_looks_at_which_another_call_is_odd_each_time_condemn_nobody() -> None:
    odd = [gpu(**answers(999, "unknown", call)) for call in ("temp", "util", "memory")]
    assert find_fatal_reason(watched(*(sample(15.0 * i, one) for i, one in enumerate(odd)))) is None


def test_a_sample_that_sees_no_gpus_breaks_no_streak() -> None:
    stuck = sample(30, status="stuck", stuck_s=5.0)
    samples = [sample(0, gpu(**UNKNOWN)), sample(15, gpu(**UNKNOWN)), stuck, sample(45, gpu(**UNKNOWN))]
    assert find_fatal_reason(watched(*samples)) is not None


@pytest.mark.parametrize(
    ("value", "words"), [(3, "drain P2P"), (4, "drain and reset"), (5, "recover IMEX domain")], ids=["3", "4", "5"]
)
def test_a_gpu_that_is_to_be_drained_goes_on_and_is_left_out_of_the_next_attempt(value: int, words: str) -> None:
    watch = watched(sample(0, gpu()), sample(15, gpu(recovery_action=value)))
    assert [(c.status, c.message) for c in list_active_problems(watch)] == [
        (Status.WARN, f"n GPU 5: the driver recommends: {words}")
    ]
    assert (find_fatal_reason(watch), find_drain_reason(watch)) == (None, f"n GPU 5: the driver recommends: {words}")


@pytest.mark.parametrize(
    ("values", "action"),
    [
        ({"recovery_action": 1}, "RESET_GPU"),
        ({"recovery_action": 2}, "REBOOT_NODE"),
        ({"recovery_action": 5}, "RESTART_FABRICMANAGER"),
        ({"recovery_action": 7}, "REBOOT_NODE"),
        (LOST, "REBOOT_NODE"),
        (answers(16, "reset-required", "temp"), "RESET_GPU"),
    ],
)
def test_the_remedy_is_the_one_that_the_preflight_would_give(values: dict[str, Any], action: str) -> None:
    assert [c.action for c in list_active_problems(watched(sample(0, gpu(**values))))] == [action]
    before = dict(values)
    told_before = facts_of(before)
    assert [f.action for f in told_before if f.status in (Status.FAIL, Status.WARN)] == [action]


def facts_of(values: dict[str, Any]) -> list[Finding]:
    """What the preflight says of a GPU that shows the same."""
    codes = values.get("codes", {})
    changes = {f"err5__{call}": code for call, code in codes.items()}
    changes |= {f"gpu5__{name}": value for name, value in values.items() if name == "recovery_action"}
    context = HealthSettings(nodes={"n": NodeDeclaration(gpus=8)})
    return judge_node("n", changed(facts(), **changes), context, ["gpu.lost", "gpu.recovery_action"])


# --- repaired


def after_xid(code: int, **values: Any) -> list[HealthChange]:
    """Samples of a quarter of an hour after an XID, in each of which the GPU reads as told."""
    first = sample(0, gpu(**values), xids=[{"gpu": 5, "xid": code}])
    return fold("n", [first, *during(900, start=15, **values)])


@pytest.mark.parametrize("code", [74, 95, 119])
def test_a_gpu_that_is_well_again_after_an_error_is_told_as_repaired(code: int) -> None:
    changes = after_xid(code)
    assert [c.status for c in changes] == [Status.FAIL, Status.PASS]
    assert changes[1].message.endswith("the GPU has been healthy for 10 min")


@pytest.mark.parametrize(
    "values",
    [{"recovery_action": None}, {"links_lost": 2}, {"recovery_action": 3}, {"ecc_unc": 1}],
    ids=["nobody tells", "links down", "driver asks", "memory error"],
)
def test_a_gpu_that_does_not_show_that_it_is_well_is_not_called_repaired(values: dict[str, Any]) -> None:
    assert Status.PASS not in [c.status for c in after_xid(74, **values) if c.check == "gpu.xid"]


@pytest.mark.parametrize("code", [79, 13])
def test_what_no_reset_repairs_stays_as_it_is(code: int) -> None:
    assert len(after_xid(code)) == 1


def test_an_error_that_comes_again_begins_its_time_anew() -> None:
    again = sample(500, gpu(), xids=[{"gpu": 5, "xid": 74}])
    samples = [sample(0, gpu(), xids=[{"gpu": 5, "xid": 74}]), *during(480, start=15), again, *during(900, start=515)]
    changes = fold("n", samples)
    assert [(c.status, c.time > 1090) for c in changes] == [(Status.FAIL, False), (Status.PASS, True)]
