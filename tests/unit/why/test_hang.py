"""For whom the others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.why.case import Call, Look, Node
from clusterctl.why.judge import judge
from clusterctl.why.verdict import Class, Confidence, Kind, Verdict
from tests.unit.why.cases import case, elsewhere, entry, waiting

BEGUN, LATE = {"0": (12, 11)}, {"0": (11, 11)}


def of(*looks: Look | None, **more: object) -> Verdict:
    return judge(case(*looks, stalled=True, **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def test_the_rank_that_did_not_join_is_named_with_its_line_and_what_it_does_there() -> None:
    verdict = of(waiting(seq=BEGUN), waiting(seq=BEGUN), elsewhere(seq=LATE), waiting(seq=BEGUN))

    assert (verdict.kind, verdict.cls, verdict.confidence) == (Kind.HANG, Class.NOT_JOINED, Confidence.CERTAIN)
    assert (verdict.culprits[0].rank, verdict.culprits[0].where) == (2, "train.py:21")
    assert "it sleeps" in verdict.summary
    assert [(w.ranks, w.where, w.op) for w in verdict.waiting] == [("0-1,3", "train.py:26", "all_reduce")]


def test_without_any_counter_the_rank_that_is_elsewhere_is_likely() -> None:
    verdict = of(waiting(), waiting(), elsewhere(), waiting())

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Class.NOT_JOINED, Confidence.LIKELY, [2])


@pytest.mark.parametrize(
    ("look", "cls"),
    [
        pytest.param(elsewhere(state="T", wchan="do_signal_stop"), Class.STOPPED, id="stopped"),
        pytest.param(elsewhere(state="t", wchan="ptrace_stop"), Class.STOPPED, id="held by a debugger"),
        pytest.param(elsewhere(state="D", wchan="kernel_clone"), Class.DSTATE, id="a wait that nothing interrupts"),
        pytest.param(elsewhere(state="D", wchan="rpc_wait_bit_killable"), Class.STORAGE, id="NFS"),
        pytest.param(elsewhere(wchan="request_wait_answer"), Class.STORAGE, id="FUSE"),
        pytest.param(elsewhere(state="R", cpu=1.0, wchan=None, status_age=9.0), Class.GIL_HELD, id="interpreter lock"),
        pytest.param(elsewhere(wchan="pipe_read"), Class.NOT_JOINED, id="a pipe"),
        pytest.param(elsewhere(state="R", cpu=1.0, wchan=None), Class.NOT_JOINED, id="computing"),
    ],
)
def test_what_the_kernel_says_of_the_one_that_is_missing_tells_the_class(look: Look, cls: Class) -> None:
    verdict = of(waiting(seq=BEGUN), replace(look, seq=LATE), waiting(seq=BEGUN), waiting(seq=BEGUN))

    assert (verdict.cls, named(verdict)) == (cls, [1])


def test_a_rank_that_began_another_collective_under_the_same_number_is_named() -> None:
    alike = waiting(entries=(entry(11, done=True), entry(12)))
    other = waiting("broadcast", 30, entries=(entry(11, done=True), entry(12, "broadcast")))
    verdict = of(alike, other, alike, alike)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Class.MISMATCH, Confidence.CERTAIN, [1])


def test_a_collective_of_another_size_is_another_one() -> None:
    verdict = of(*(waiting(entries=(entry(5, sizes=size),)) for size in ("[[4]]", "[[4]]", "[[8]]")))

    assert (verdict.cls, named(verdict)) == (Class.MISMATCH, [2])


def test_where_half_began_one_collective_and_half_another_nobody_is_named_alone() -> None:
    verdict = of(*(waiting(op, entries=(entry(5, op),)) for op in ("all_reduce", "all_reduce", "barrier", "barrier")))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [0, 1, 2, 3])


def test_of_several_groups_the_rank_that_waits_in_none_is_the_root() -> None:
    def at(*entries: object) -> Look:
        return waiting(entries=entries)

    verdict = of(
        at(entry(7, group="rows 0"), entry(3, group="columns 0", done=True)),
        at(entry(6, group="rows 0", done=True), entry(4, group="columns 1")),
        at(entry(3, group="columns 0", done=True), entry(7, group="rows 1", done=True)),
        elsewhere(entries=(entry(3, group="columns 1", done=True), entry(7, group="rows 1", done=True))),
    )

    assert named(verdict) == [3]


def test_ranks_that_wait_for_each_other_in_two_groups_are_a_deadlock() -> None:
    verdict = of(
        waiting(entries=(entry(2, group="a", done=True), entry(6, group="b"))),
        waiting(entries=(entry(5, group="b", done=True), entry(3, group="a"))),
    )

    assert (verdict.cls, named(verdict)) == (Class.DEADLOCK, [0, 1])


def test_where_all_have_joined_no_rank_is_named() -> None:
    verdict = of(*(waiting(seq=BEGUN) for _ in range(4)))

    assert (verdict.cls, verdict.confidence, verdict.culprits) == (Class.NETWORK, Confidence.AMBIGUOUS, ())


def test_a_node_that_cannot_be_reached_is_named_where_all_have_joined() -> None:
    told = case(*(waiting(seq=BEGUN) for _ in range(4)), stalled=True)
    cut = {**told.nodes, "gpu02": Node(node="gpu02", link="unreachable", why="no answer")}
    verdict = judge(replace(told, nodes=cut))

    assert (verdict.cls, [culprit.node for culprit in verdict.culprits]) == (Class.NETWORK, ["gpu02"])


def test_a_lost_node_is_named_first() -> None:
    told = case(*(waiting(seq=BEGUN) for _ in range(4)), stalled=True)
    lost = {**told.nodes, "gpu02": Node(node="gpu02", link="lost", why="no sign of life for 120 s")}
    verdict = judge(replace(told, nodes=lost))

    assert (verdict.cls, [culprit.node for culprit in verdict.culprits]) == (Class.NODE_LOST, ["gpu02"])


def test_a_rank_that_waits_for_data_is_told_with_the_processes_that_load_it() -> None:
    loader = "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    frames = (Call(function="_try_get_data", file=loader, line=1), Call(function="train", file="/home/u/t.py", line=9))
    verdict = of(waiting(seq=BEGUN), elsewhere(frames=frames, wchan="poll_schedule_timeout", seq=LATE))

    assert (named(verdict), verdict.culprits[0].op) == ([1], "next batch")


def test_ranks_that_nobody_could_look_at_are_said_to_be_missing() -> None:
    verdict = of(waiting(seq=BEGUN), elsewhere(seq=LATE), None, Look(source="proc", error="no answer in time"))

    assert verdict.missing == ("rank 2: nobody looked at it", "rank 3: no answer in time")


def test_a_stall_at_which_nobody_could_look_has_no_name() -> None:
    verdict = of(None, None)

    assert (verdict.confidence, verdict.culprits) == (Confidence.UNKNOWN, ())


def test_a_run_that_moves_has_nothing_wrong() -> None:
    assert judge(case(waiting(), elsewhere())).kind is Kind.NONE
