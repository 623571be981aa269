from __future__ import annotations

import json

import pytest

from clusterctl.config.spec import StallSpec
from clusterctl.run.record.sample_files import read_last_lines
from clusterctl.run.rules.stall_detection import StallObserver, StallPhase


def line(t: float, age: float | None, *, rank: int = 0, beats: int = 100, timeout_s: float | None = None) -> bytes:
    """One sample of one rank, `t` seconds after the boot of its node."""
    inside = {
        "pid": 7, "beats": beats, "seq": {}, "age_s": 0.5, "progress_age_s": age, "main_age_s": 1.0, "phase": None,
        "frameworks": ["torch"], "backend": "gloo", "timeout_s": timeout_s,
    }  # fmt: skip
    content = {"alive": True, "output": 0, "read": 0, "written": 0, "cpu_s": 0.0, "inside": inside}
    sample = {"m": t, "gpus": False, "watched": {}, "ranks": {str(rank): content}, "kind": "activity", "attempt": 0}
    return json.dumps(sample).encode()


def steps(until: float, period: float, *, rank: int = 0, start: float = 0.0) -> list[bytes]:
    """Samples every two seconds of a rank that makes a step every `period` seconds."""
    samples = []
    t = start
    while t < until:
        t += 2.0
        samples.append(line(t, t % period, rank=rank, beats=int(t // period)))
    return samples


def test_a_new_controller_knows_how_long_steps_take_and_calls_nothing_stalled_too_soon() -> None:
    observer = StallObserver(0, [0], StallSpec(), now=5000.0)
    observer.replay_samples({"a": steps(600.0, 20.0)}, now=5000.0)
    observer.add_sample_lines("a", [line(650.0, 50.0, beats=30)], 5050.0)
    assert observer.judge(5050.0).phase is StallPhase.NONE
    observer.add_sample_lines("a", [line(800.0, 200.0, beats=30)], 5200.0)
    assert observer.judge(5200.0).phase is StallPhase.SUSPECTED


def test_a_new_controller_goes_on_with_a_stall_that_was_there_before() -> None:
    observer = StallObserver(0, [0], StallSpec(), now=5000.0)
    observer.replay_samples({"a": [*steps(100.0, 1.0), line(160.0, 60.0, beats=100)]}, now=5000.0)
    stall = observer.judge(5000.0)
    assert stall.phase is StallPhase.SUSPECTED
    assert stall.since_s == pytest.approx(60.0, abs=2.0)


def test_without_samples_nothing_is_replayed() -> None:
    observer = StallObserver(0, [0], StallSpec(), now=5000.0)
    observer.replay_samples({"a": [], "b": [b"torn"]}, now=5000.0)
    assert not observer.judge(5001.0).has_all_samples


def test_a_straggler_is_said_once_and_again_only_when_it_had_caught_up() -> None:
    observer = StallObserver(0, [0, 1], StallSpec(), now=0.0)
    said: list[str] = []
    for tick in range(100):
        t = 2.0 * tick
        caught_up = 120.0 < t < 130.0
        beats, age = (int(t), 0.0) if t < 20.0 or caught_up else (20, t - 20.0)
        observer.add_sample_lines("a", [line(t, t % 1.0, rank=0, beats=int(t))], t)
        observer.add_sample_lines("b", [line(t, age, rank=1, beats=beats)], t)
        said += observer.list_new_warnings(observer.judge(t), t)
    assert len(said) == 2
    assert "straggler: rank 1 on b" in said[0]


def test_a_rank_whose_sample_comes_later_when_all_move_again_is_no_straggler() -> None:
    observer = StallObserver(0, [0, 1], StallSpec(), now=0.0)
    said: list[str] = []
    for tick in range(60):
        t, still = 2.0 * tick, 20.0 < 2.0 * tick < 45.0
        for rank, delay in ((0, 0.0), (1, 1.5)):
            beats, age = (20, t - 20.0) if still else (int(t), 0.2)
            observer.add_sample_lines("ab"[rank], [line(t, age, rank=rank, beats=beats)], t + delay)
            said += observer.list_new_warnings(observer.judge(t + delay), t + delay)
    assert said == []


def test_steps_that_arrive_late_make_nobody_a_straggler() -> None:
    observer = StallObserver(0, [0, 1], StallSpec(), now=0.0)
    said: list[str] = []
    for tick in range(60):
        t = 2.0 * tick
        # The peer stands still without node b, and goes on some time after it is back.
        still = 20.0 < t < 80.0
        observer.add_sample_lines("a", [line(t, t - 20.0 if still else 0.2, rank=0, beats=20 if still else int(t))], t)
        if not 20.0 < t < 60.0:
            observer.add_sample_lines("b", [line(t, 0.2, rank=1, beats=int(t))], t)
        said += observer.list_new_warnings(observer.judge(t), t)
    assert said == []


def test_a_limit_behind_the_frameworks_own_timeout_is_said_once() -> None:
    observer = StallObserver(0, [0], StallSpec(timeout=600.0), now=0.0)
    said: list[str] = []
    for tick in range(5):
        observer.add_sample_lines("a", [line(2.0 * tick, 0.5, beats=tick, timeout_s=300.0)], 2.0 * tick)
        said += observer.list_new_warnings(observer.judge(2.0 * tick), 2.0 * tick)
    assert len(said) == 1
    assert "240 s or less does" in said[0]


def test_the_end_of_a_long_file_begins_with_a_whole_line(tmp_path) -> None:
    path = tmp_path / "samples"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(1000)))
    assert read_last_lines(path, 100)[0].startswith(b"line 9")
    assert read_last_lines(tmp_path / "none") == []


def test_a_node_that_says_nothing_is_not_taken_for_one_whose_ranks_stand_still() -> None:
    observer = StallObserver(0, [0, 1], StallSpec(), now=0.0)
    for t in (2.0, 12.0):
        observer.add_sample_lines("a", [line(t, t)], t)
        observer.add_sample_lines("b", [line(t, t, rank=1)], t)
    observer.add_sample_lines("a", [line(62.0, 62.0)], 62.0)
    assert observer.measure_idle_s(["a", "b"]) <= 12.0
    assert observer.measure_idle_s(["a"]) >= 50.0
