"""Trouble during a run is told once, when it is sure, and once more when it is over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.health.during import Change, Watch, advance, condemned, fold, tick, troubled
from clusterctl.health.model import Status

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
        "error": None,
    }
    return {**calm, **values}


def sample(time: float, *gpus: dict[str, Any], status: str = "ok", **more: Any) -> dict[str, Any]:
    disk = [{"path": "/", "free": 500 * GIB, "total": 1000 * GIB}]
    return {"time": time, "status": status, "reason": None, "disk": disk, "gpus": list(gpus), **more}


def during(seconds: float, start: float = 0.0, **values: Any) -> list[dict[str, Any]]:
    """Samples of one GPU in one state."""
    return [sample(start + i * EVERY, gpu(**values)) for i in range(int(seconds / EVERY) + 1)]


def told(changes: list[Change]) -> list[tuple[str, str]]:
    return [(change.status.value, change.message) for change in changes]


def test_a_slowdown_that_lasts_is_told_once_with_its_length_and_heat() -> None:
    changes = fold("gpu03", during(600, throttle=0x48, temp_c=84))
    assert told(changes) == [("WARN", "gpu03 GPU 5: hardware thermal slowdown for 3 min, 84 °C")]
    assert (changes[0].time, changes[0].began, changes[0].gpu) == (180.0, 0.0, 5)


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
        ({"error": 15}, "n GPU 5: GPU is lost"),
        ({"recovery_action": 2}, "n GPU 5: the driver asks for a reboot"),
        ({"remap_failure": 1}, "n GPU 5: row remapping failed"),
    ],
    ids=["lost", "recovery", "remap"],
)
def test_what_ends_a_run_anyway_is_told_at_once(values: dict[str, Any], words: str) -> None:
    assert told(fold("n", [sample(0, gpu()), sample(15, gpu(**values)), sample(30, gpu(**values))])) == [
        ("FAIL", words)
    ]


def test_memory_errors_count_from_the_start_of_the_run() -> None:
    assert fold("n", during(60, ecc_unc=7)) == []
    changes = fold("n", [*during(60, ecc_unc=7), *during(60, start=75, ecc_unc=9)])
    assert told(changes) == [("FAIL", "n GPU 5: uncorrected memory errors, 2 since the start")]


def test_a_hung_driver_is_told_with_where_it_hangs_and_told_over_when_it_answers() -> None:
    stuck = [
        sample(t, status="stuck", stuck_s=t - 10, state="D", wchan="nv_lock", reason="no answer")
        for t in (15.0, 30.0, 45.0)
    ]
    changes = fold("n", [sample(0, gpu()), *stuck, *during(120, start=60)])
    assert told(changes) == [
        ("FAIL", "n: the GPU driver hangs in nv_lock, no answer for 20 s"),
        ("PASS", "n: the GPU driver hangs in nv_lock is over after 30 s"),
    ]


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


def test_samples_that_stop_are_an_alarm_and_their_return_is_told() -> None:
    watch, _ = advance(Watch(node="n"), sample(0, gpu()))
    watch, nothing = tick(watch, 100)
    watch, alarm = tick(watch, 130)
    watch, again = tick(watch, 500)
    _, back = advance(watch, sample(510, gpu()))
    assert (nothing, again) == ([], [])
    assert told(alarm) == [("WARN", "n: no sample of GPUs and host for 2 min")]
    assert told(back) == [("PASS", "n: samples again")]


def test_what_is_wrong_by_now_can_be_asked_for() -> None:
    watch = Watch(node="n")
    for one in (sample(0, gpu()), sample(15, gpu(error=15))):
        watch, _ = advance(watch, one)
    assert [(one.gpu, one.check, one.status) for one in troubled(watch)] == [(5, "gpu.lost", Status.FAIL)]
    assert condemned(watch) == "n GPU 5: GPU is lost"


@given(
    st.lists(
        st.tuples(st.sampled_from([0, 0x8, 0x20, 0x48]), st.sampled_from([None, 15]), st.sampled_from(["ok", "stuck"])),
        max_size=60,
    )
)
def test_beginnings_and_ends_alternate_for_every_trouble(history: list[tuple[int, int | None, str]]) -> None:
    samples = [
        sample(i * EVERY, *([gpu(throttle=bits, error=code)] if status == "ok" else []), status=status, stuck_s=30.0)
        for i, (bits, code, status) in enumerate(history)
    ]
    seen: dict[tuple[int | None, str], bool] = {}
    for change in fold("n", samples):
        began = change.status is not Status.PASS
        assert seen.get((change.gpu, change.check), False) is not began
        seen[change.gpu, change.check] = began
