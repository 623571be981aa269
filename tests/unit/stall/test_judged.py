"""What the stall rule says at one moment, to the second: which limit holds, since when it counts, when it is sure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.config.spec import StallSpec
from clusterctl.run.rules import stall_detection
from clusterctl.run.rules.stall_detection import RankObservation, StallJudgement, StallPhase, StallWatch

NOW = 10_000.0
NONE, SUSPECTED, CONFIRMED = StallPhase.NONE, StallPhase.SUSPECTED, StallPhase.CONFIRMED


def rank(**more: Any) -> RankObservation:
    values = {
        "node": "a",
        "seen_at": NOW,
        "sampled_at": NOW,
        "is_alive": True,
        "has_gpus": False,
        "has_framework": True,
        **more,
    }
    return RankObservation(**values)


def watch(*ranks: RankObservation, **more: Any) -> StallWatch:
    views = dict(enumerate(ranks or (rank(),)))
    return replace(stall_detection.start_stall_watch(0, views, 0.0), ranks=views, **more)


def judged(seen: StallWatch, limits: StallSpec | None = None, now: float = NOW) -> StallJudgement:
    return stall_detection.judge_stall(seen, limits or StallSpec(), now)[1]


def stepping(last: float, *, pace: float = 1.0, **more: Any) -> dict[str, Any]:
    """Steps at a pace, the last of them so many seconds ago."""
    return {"progress_at": NOW - last, "intervals": (pace,) * stall_detection.FIRST_ADVANCES, "advances": 20, **more}


@pytest.mark.parametrize(
    ("seen", "limit", "reason"),
    [
        pytest.param({}, 1500.0, "no first step", id="nothing yet"),
        pytest.param(
            {"intervals": (1.0,) * 9, "progress_at": 1.0, "advances": 10}, 1500.0, "no progress", id="9 moves"
        ),
        pytest.param({"intervals": (1.0,) * 10, "progress_at": NOW - 200}, 30.0, "no progress", id="10 moves"),
        pytest.param(
            {"intervals": (1.0,) * 9 + (4.0,), "progress_at": NOW - 200}, 30.0, "no progress", id="steps of 4 s"
        ),
        pytest.param(
            {"intervals": (7.0,) + (1.0,) * 9, "progress_at": NOW - 200}, 42.0, "no progress", id="steps of 7 s"
        ),
        pytest.param({"intervals": (999.0,) * 10, "progress_at": 1.0}, 1500.0, "no progress", id="steps of minutes"),
        pytest.param(
            {"activity_at": 1.0},
            1500.0,
            "no step reported by any process",
            id="activity of a framework is no step",
        ),
    ],
)
def test_the_limit_is_that_of_the_phase_of_the_run(seen: dict[str, Any], limit: float, reason: str) -> None:
    said = judged(watch(**seen))

    assert (said.limit_s, said.reason, said.phase) == (limit, reason, SUSPECTED)


@pytest.mark.parametrize(
    ("beats", "limit"), [pytest.param(2, 1500.0, id="two steps"), pytest.param(3, 30.0, id="three steps")]
)
def test_three_steps_of_one_rank_are_a_start(beats: int, limit: float) -> None:
    assert judged(watch(rank(), rank(beats=beats), progress_at=NOW - 200)).limit_s == limit


def test_a_job_without_a_framework_is_judged_by_its_activity() -> None:
    plain = rank(has_framework=False)
    limits = StallSpec(timeout=100.0, startup_timeout=500.0)

    assert judged(watch(plain, activity_at=NOW - 99), limits).phase is NONE
    said = judged(watch(plain, activity_at=NOW - 100), limits)
    assert (said.phase, said.since_s, said.limit_s, said.reason) == (SUSPECTED, 100.0, 100.0, "no activity")
    assert judged(watch(plain, activity_at=NOW - 100, advances=1), limits).limit_s == 500.0
    assert judged(watch(plain), limits).limit_s == 500.0


@pytest.mark.parametrize(
    ("seen", "phase", "since"),
    [
        pytest.param(stepping(29.9), NONE, 29.9, id="within the limit"),
        pytest.param(stepping(30.0), SUSPECTED, 30.0, id="at the limit"),
        pytest.param(
            stepping(100.0, phase_changed_at=NOW - 10), NONE, 10.0, id="a phase that began or ended holds it up"
        ),
        pytest.param(stepping(100.0, activity_at=NOW - 20), NONE, 20.0, id="activity holds it up"),
        pytest.param(stepping(1499.0, activity_at=NOW), NONE, 0.0, id="as long as the ceiling"),
        pytest.param(stepping(1500.0, activity_at=NOW), SUSPECTED, 1500.0, id="and no longer"),
    ],
)
def test_it_counts_from_the_last_sign(seen: dict[str, Any], phase: StallPhase, since: float) -> None:
    said = judged(watch(**seen))

    assert (said.phase, round(said.since_s, 6)) == (phase, since)


def test_before_any_sign_it_counts_from_the_beginning() -> None:
    late = watch(began_at=NOW - 40)

    assert judged(late).since_s == 40.0
    assert judged(replace(late, progress_at=NOW - 60, phase_changed_at=NOW - 70)).since_s == 40.0


def test_a_phase_that_was_declared_has_its_own_limit() -> None:
    saving = rank(phase=("save", NOW - 5, 90.0))
    reading = rank(phase=("read", NOW - 5, 50.0))

    assert judged(watch(saving, reading, **stepping(89.0))).phase is NONE
    said = judged(watch(saving, reading, rank(is_alive=False, phase=("gone", 0.0, 9e9)), **stepping(90.0)))
    assert (said.phase, said.limit_s) == (SUSPECTED, 90.0)
    assert said.reason == "no progress in phase `read`, `save`"


def test_a_long_phase_outlasts_the_ceiling() -> None:
    saving = rank(phase=("save", NOW - 5, 2000.0))

    assert judged(watch(saving, **stepping(1999.0))).phase is NONE
    assert judged(watch(saving, **stepping(2000.0))).limit_s == 2000.0


@pytest.mark.parametrize(
    ("limit", "sure"),
    [
        pytest.param(30.0, 15.0, id="at least 15 s"),
        pytest.param(100.0, 20.0, id="a fifth of the limit"),
        pytest.param(600.0, 60.0, id="at most a minute"),
    ],
)
def test_a_second_look_makes_it_sure(limit: float, sure: float) -> None:
    plain = watch(rank(has_framework=False), activity_at=NOW - limit)
    limits = StallSpec(timeout=limit, startup_timeout=9e9)
    first, said = stall_detection.judge_stall(plain, limits, NOW)
    assert said.phase is SUSPECTED

    def looked(seconds: float) -> StallPhase:
        later = replace(first, ranks={0: rank(has_framework=False, seen_at=NOW + seconds)})
        return stall_detection.judge_stall(later, limits, NOW + seconds)[1].phase

    assert (looked(sure - 0.1), looked(sure)) == (SUSPECTED, CONFIRMED)


def test_progress_between_two_looks_begins_the_second_look_anew() -> None:
    first, _ = stall_detection.judge_stall(watch(**stepping(40.0)), StallSpec(), NOW)
    later = replace(first, ranks={0: rank(seen_at=NOW + 60)}, progress_at=NOW + 20)
    again, said = stall_detection.judge_stall(later, StallSpec(), NOW + 60)
    assert said.phase is SUSPECTED
    last, said = stall_detection.judge_stall(replace(again, ranks={0: rank(seen_at=NOW + 80)}), StallSpec(), NOW + 80)
    assert said.phase is CONFIRMED
    moved, said = stall_detection.judge_stall(
        replace(last, ranks={0: rank(seen_at=NOW + 90)}, progress_at=NOW + 90), StallSpec(), NOW
    )
    assert (said.phase, moved.suspected, moved.confirmed) == (NONE, None, False)


def test_stragglers_are_those_behind_by_the_limit_while_others_move() -> None:
    ranks = [rank(progress_at=NOW - age) for age in (0.0, 30.0, 29.0, 99.0)]
    ranks += [rank(), rank(is_alive=False, progress_at=0.0)]

    assert judged(watch(*ranks, **stepping(0.0))).stragglers == (1, 3)
    assert judged(watch(*ranks, **stepping(29.9))).stragglers == (1, 3)
    assert judged(watch(*ranks, **stepping(30.0))).stragglers == ()
    assert judged(watch(*ranks)).stragglers == ()


def test_the_view_is_as_old_as_the_rank_that_was_heard_of_least() -> None:
    two = watch(rank(), rank(seen_at=NOW - 7), **stepping(20.0))

    said = judged(two, now=NOW + 1)
    assert (said.sample_age_s, said.since_s, said.last_progress_s, said.has_all_samples) == (8.0, 13.0, 13.0, True)
    assert judged(two, now=NOW - 99).sample_age_s == 0.0
    ahead = replace(two, progress_at=NOW)
    assert (judged(ahead).since_s, judged(ahead).last_progress_s) == (0.0, 0.0)
    assert judged(watch()).last_progress_s is None


def test_before_every_rank_was_seen_nothing_is_said() -> None:
    unseen = replace(watch(began_at=NOW - 50), expected_ranks=frozenset({0, 1}))

    assert judged(unseen) == StallJudgement(has_all_samples=False, sample_age_s=50.0)
    assert judged(unseen, now=NOW - 60) == StallJudgement(has_all_samples=False, sample_age_s=0.0)
    assert judged(watch(rank(is_alive=False))) == StallJudgement(has_all_samples=False, sample_age_s=NOW)


@pytest.mark.parametrize(
    ("timeout", "group", "said"),
    [
        pytest.param(
            300.0,
            360.0,
            "`stall.timeout` of 300 s does not lie before the process group's own timeout of 360 s,"
            " which would end the ranks and their evidence first; 288 s or less does",
            id="sure only when the group ends",
        ),
        pytest.param(
            None,
            25.0,
            "`stall.timeout` of 20 s (the default) does not lie before the process group's own timeout of 25 s,"
            " which would end the ranks and their evidence first; 9 s or less does",
            id="a short timeout of the group",
        ),
        pytest.param(
            5.0,
            10.0,
            "`stall.timeout` of 5 s does not lie before the process group's own timeout of 10 s,"
            " which would end the ranks and their evidence first; with a longer timeout of the group it does",
            id="no limit is short enough",
        ),
        pytest.param(299.0, 360.0, None, id="sure before the group ends"),
        pytest.param(300.0, None, None, id="no timeout of a group"),
    ],
)
def test_a_limit_that_is_too_long_is_warned_of(timeout: float | None, group: float | None, said: str | None) -> None:
    seen = watch(rank(), rank(group_timeout_s=group), rank(group_timeout_s=group and group + 1))

    assert stall_detection.describe_late_stall_limit(seen, StallSpec(timeout=timeout)) == said


# --- taking in


def sample(moment: float, *, watched: Any = None, gpus: bool = False, **content: Any) -> dict[str, Any]:
    ranks = {"0": {"alive": True, "output": 0, "read": 0, "written": 0, "cpu_s": 0.0, "inside": None, **content}}
    return {"m": moment, "gpus": gpus, "watched": watched, "ranks": ranks}


def taken(*samples: tuple[float, dict[str, Any]]) -> StallWatch:
    seen = stall_detection.start_stall_watch(0, [0], 0.0)
    for now, content in samples:
        seen = stall_detection.add_sample(seen, content, node="a", attempt=0, now=now)
    return seen


def inside(beats: int, age: float, **more: Any) -> dict[str, Any]:
    return {"pid": 7, "beats": beats, "seq": {}, "age_s": 0.0, "progress_age_s": age, "main_age_s": 99.0, **more}


def test_the_gaps_between_signs_of_progress_are_remembered() -> None:
    seen = taken(*((float(t), sample(float(t), inside=inside(t, 0.0))) for t in (2, 4, 7, 9)))

    assert (seen.progress_at, seen.recorded_at, seen.advances) == (9.0, 9.0, 4)
    assert seen.intervals == (2.0, 3.0, 2.0)


def test_signs_within_a_second_are_one_advance() -> None:
    seen = taken(*((t, sample(t, inside=inside(int(10 * t), 0.0))) for t in (2.0, 2.9, 3.0)))

    assert (seen.progress_at, seen.recorded_at, seen.advances, seen.intervals) == (3.0, 3.0, 3, (pytest.approx(0.1),))


def test_only_the_newest_gaps_are_kept() -> None:
    seen = taken(*((2.0 * t, sample(2.0 * t, inside=inside(t, 0.0))) for t in range(1, 60)))

    assert (len(seen.intervals), seen.advances) == (stall_detection.MAX_INTERVALS, 59)


def test_of_a_time_when_nobody_looked_only_five_seconds_count() -> None:
    seen = taken((10.0, sample(10.0, inside=inside(1, 0.0))), (100.0, sample(100.0, inside=inside(9, 0.0))))

    assert seen.intervals == (5.0,)


def test_a_sample_that_was_seen_already_is_passed_over() -> None:
    once = taken((2.0, sample(2.0, inside=inside(1, 0.0))))

    again = stall_detection.add_sample(once, sample(2.0, inside=inside(5, 0.0)), node="a", attempt=0, now=9.0)

    assert again.ranks == once.ranks


def test_a_watched_file_that_changes_is_activity_from_the_second_look_on() -> None:
    assert taken((2.0, sample(2.0, watched={"x": [1, 1]}))).activity_at is None
    seen = taken((2.0, sample(2.0, watched={"x": [1, 1]})), (4.0, sample(4.0, watched={"x": [1, 2]})))
    assert seen.activity_at == 4.0
    assert taken((2.0, sample(2.0)), (4.0, sample(4.0, watched={}))).activity_at is None


@pytest.mark.parametrize(
    ("before", "after", "held"),
    [
        pytest.param(None, ("save", 1.0), 4.0, id="it begins"),
        pytest.param(("save", 1.0), None, 4.0, id="it ends"),
        pytest.param(("save", 1.0), ("read", 3.0), 4.0, id="another one"),
        pytest.param(("save", 1.0), ("save", 0.5), 4.0, id="the same anew"),
        pytest.param(("save", 1.0), ("save", 3.0), None, id="the same goes on"),
        pytest.param(("save", 1.0), ("save", 2.0), None, id="the same, seen a second later"),
        pytest.param(None, None, None, id="none"),
    ],
)
def test_a_phase_that_changes_holds_the_rule_up(
    before: tuple[str, float] | None, after: tuple[str, float] | None, held: float | None
) -> None:
    def phase(said: tuple[str, float] | None) -> dict[str, Any]:
        return inside(1, 0.0, phase=said and {"name": said[0], "age_s": said[1], "limit_s": 60.0})

    seen = taken((2.0, sample(2.0, inside=phase(before))), (4.0, sample(4.0, inside=phase(after))))

    assert seen.phase_changed_at == held


def collected(seconds: int, each: int, *, until: int) -> StallWatch:
    """A job without steps whose collectives go on for so many seconds, seen until a later moment."""
    moments = [2.0 * turn for turn in range(1, until // 2 + 1)]
    return taken(
        *(
            (
                t,
                sample(
                    t,
                    inside=inside(
                        0, max(0.0, t - seconds), seq={"0": [each * int(min(t, seconds)), each * int(min(t, seconds))]}
                    ),
                ),
            )
            for t in moments
        )
    )


@pytest.mark.parametrize(
    ("seconds", "each", "stalls"),
    [
        pytest.param(8, 6, True, id="collectives for a while"),
        pytest.param(2, 300, False, id="a burst of them, as when a model is set up"),
        pytest.param(8, 1, False, id="a few"),
    ],
)
def test_a_job_whose_progress_shows_as_collectives_alone_has_begun(seconds: int, each: int, stalls: bool) -> None:
    seen = collected(seconds, each, until=200)

    _, stall = stall_detection.judge_stall(seen, StallSpec(), 200.0)

    assert (stall.phase is not StallPhase.NONE) == stalls
