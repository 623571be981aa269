"""For whom the others wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from clusterctl.agent.protocol.record_types import FlightRecorderEntry, GroupSetup
from clusterctl.why.evidence_types import Node, RankExit, RankSnapshot, StackFrame
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, ProblemKind, Verdict
from tests.unit.why.cases import USER, case, elsewhere, ended, entry, waiting

BEGUN, LATE = {"0": (12, 11)}, {"0": (11, 11)}


def of(*looks: RankSnapshot | RankExit | None, **more: object) -> Verdict:
    return judge_run(case(*looks, stalled=True, **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


@pytest.mark.parametrize(
    ("peers", "named_ranks", "confidence"),
    [
        pytest.param((0, 0, 1, 0), [2], Confidence.CERTAIN, id="one against three"),
        pytest.param((0, "done", 1, "done"), [2], Confidence.LIKELY, id="the source that it names has gone on"),
        pytest.param((0, 0, 2, 2), [0, 1, 2, 3], Confidence.AMBIGUOUS, id="two against two"),
        pytest.param((1, 0, 0, 0), [0], Confidence.CERTAIN, id="the source itself"),
    ],
)
def test_ranks_that_name_another_source_than_most_are_the_culprits(peers, named_ranks, confidence):
    ranks = [
        waiting(entries=(entry(7, "broadcast", done=True), entry(8)))
        if peer == "done"
        else waiting(entries=(entry(7, "broadcast", peer=peer),))
        for peer in peers
    ]
    verdict = of(*ranks)
    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, confidence, named_ranks)


def setting_up(rank: int, world_size: int = 4, address: str | None = "10.0.0.1:29500") -> RankSnapshot:
    """A rank that waits in `init_process_group`."""
    frames = (
        StackFrame(
            function="init_process_group",
            file="/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
            line=1,
        ),
        StackFrame(function="train", file=USER, line=9),
    )
    return waiting(frames=frames, setup={"address": address, "world_size": world_size, "rank": rank})


@pytest.mark.parametrize(
    ("looks", "named_ranks", "confidence", "text"),
    [
        pytest.param(
            [setting_up(0), setting_up(1), setting_up(2, 5), setting_up(3)],
            [2],
            Confidence.LIKELY,
            "world size 5, the others with world size 4",
            id="a world size one too big",
        ),
        pytest.param(
            [setting_up(0), setting_up(1, address="10.0.0.1:29501"), setting_up(2), setting_up(3, address=None)],
            [1],
            Confidence.LIKELY,
            "the store at 10.0.0.1:29501, the others with the store at 10.0.0.1:29500",
            id="another port",
        ),
        pytest.param(
            [setting_up(0, 2), setting_up(1, 3)],
            [1],
            Confidence.LIKELY,
            "the others with world size 2",
            id="as many ranks as there are",
        ),
        pytest.param(
            [setting_up(0), setting_up(1, address="10.0.0.2:29500")],
            [0, 1],
            Confidence.AMBIGUOUS,
            "the store at 10.0.0.1:29500 and the store at 10.0.0.2:29500",
            id="two that differ",
        ),
        pytest.param(
            [setting_up(0), setting_up(1), setting_up(1), setting_up(3)],
            [2],
            Confidence.LIKELY,
            "as rank 1, as another rank does",
            id="one rank twice",
        ),
    ],
)
def test_ranks_that_set_up_the_group_with_other_values_than_most_are_the_culprits(
    looks, named_ranks, confidence, text
) -> None:
    verdict = of(*looks)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, confidence, named_ranks)
    assert text in verdict.summary


def test_groups_that_were_set_up_with_their_own_values_are_not_compared() -> None:
    apart = [{"address": None, "world_size": 2, "rank": 0}, {"address": None, "world_size": 3, "rank": 0}]
    verdict = of(*(waiting(setup=setup) for setup in apart))

    assert verdict.cls is not Fault.MISMATCH


def in_new_group(name: str, size: str, line: int) -> RankSnapshot:
    values = {"_new_process_group_helper.group_name": name, "_new_process_group_helper.group_size": size}
    return waiting("new_group", line, call_values=values)


ALL = in_new_group("#2", "4", 27)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([ALL, ALL, ALL], id="all create the second group"),
        pytest.param([in_new_group("#1", "3", 24)] * 3, id="its members create the first group"),
        pytest.param([in_new_group("#1", "3", 24), ALL, ALL], id="one member is slower"),
    ],
)
def test_a_rank_that_left_out_a_group_without_itself_is_named(others: list[RankSnapshot]) -> None:
    verdict = of(in_new_group("#1", "4", 27), *others)

    assert (named(verdict), verdict.cls, verdict.confidence) == ([0], Fault.MISMATCH, Confidence.LIKELY)
    assert "new_group" in verdict.summary


def test_ranks_that_create_groups_of_halves_contradict_nobody() -> None:
    first, second = in_new_group("#1", "2", 24), in_new_group("#2", "2", 24)

    assert named(of(first, first, second, second)) == []


def test_the_rank_that_did_not_join_is_named_with_its_line_and_what_it_does_there() -> None:
    verdict = of(waiting(seq=BEGUN), waiting(seq=BEGUN), elsewhere(seq=LATE), waiting(seq=BEGUN))

    assert (verdict.kind, verdict.cls, verdict.confidence) == (
        ProblemKind.HANG,
        Fault.NOT_JOINED,
        Confidence.CERTAIN,
    )
    assert (verdict.culprits[0].rank, verdict.culprits[0].where) == (2, "train.py:21")
    assert "it sleeps" in verdict.summary
    assert [(w.ranks, w.where, w.op) for w in verdict.waiting] == [("0-1,3", "train.py:26", "all_reduce")]


def test_without_any_counter_the_rank_that_is_elsewhere_is_likely() -> None:
    verdict = of(waiting(), waiting(), elsewhere(), waiting())

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


@pytest.mark.parametrize(
    ("look", "cls"),
    [
        pytest.param(elsewhere(state="T", wchan="do_signal_stop"), Fault.STOPPED, id="stopped"),
        pytest.param(elsewhere(state="t", wchan="ptrace_stop"), Fault.STOPPED, id="held by a debugger"),
        pytest.param(elsewhere(state="D", wchan="kernel_clone"), Fault.DSTATE, id="a wait that nothing interrupts"),
        pytest.param(elsewhere(state="D", wchan="rpc_wait_bit_killable"), Fault.STORAGE, id="NFS"),
        pytest.param(elsewhere(wchan="request_wait_answer"), Fault.STORAGE, id="FUSE"),
        pytest.param(elsewhere(state="R", cpu=1.0, wchan=None, status_age=9.0), Fault.GIL_HELD, id="interpreter lock"),
        pytest.param(elsewhere(wchan="pipe_read"), Fault.NOT_JOINED, id="a pipe"),
        pytest.param(elsewhere(state="R", cpu=1.0, wchan=None), Fault.NOT_JOINED, id="computing"),
    ],
)
def test_what_the_kernel_says_of_the_one_that_is_missing_tells_the_class(look: RankSnapshot, cls: Fault) -> None:
    verdict = of(waiting(seq=BEGUN), replace(look, seq=LATE), waiting(seq=BEGUN), waiting(seq=BEGUN))

    assert (verdict.cls, named(verdict)) == (cls, [1])


def test_a_rank_that_began_another_collective_under_the_same_number_is_named() -> None:
    alike = waiting(entries=(entry(11, done=True), entry(12)))
    other = waiting("broadcast", 30, entries=(entry(11, done=True), entry(12, "broadcast")))
    verdict = of(alike, other, alike, alike)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.CERTAIN, [1])


def test_a_collective_of_another_size_is_another_one() -> None:
    verdict = of(*(waiting(entries=(entry(5, sizes=size),)) for size in ("[[4]]", "[[4]]", "[[8]]")))

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [2])


def test_where_half_began_one_collective_and_half_another_nobody_is_named_alone() -> None:
    verdict = of(*(waiting(op, entries=(entry(5, op),)) for op in ("all_reduce", "all_reduce", "barrier", "barrier")))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [0, 1, 2, 3])


def test_of_several_groups_the_rank_that_waits_in_none_is_the_root() -> None:
    def at(*entries: object) -> RankSnapshot:
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

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, [0, 1])


def test_where_all_have_joined_no_rank_is_named() -> None:
    verdict = of(*(waiting(seq=BEGUN) for _ in range(4)))

    assert (verdict.cls, verdict.confidence, verdict.culprits) == (Fault.NETWORK, Confidence.AMBIGUOUS, ())


def test_a_node_that_cannot_be_reached_is_named_where_all_have_joined() -> None:
    told = case(*(waiting(seq=BEGUN) for _ in range(4)), stalled=True)
    cut = {**told.nodes, "gpu02": Node(node="gpu02", link="unreachable", why="no answer")}
    verdict = judge_run(replace(told, nodes=cut))

    assert (verdict.cls, [culprit.node for culprit in verdict.culprits]) == (Fault.NETWORK, ["gpu02"])


def test_a_lost_node_is_named_first() -> None:
    told = case(*(waiting(seq=BEGUN) for _ in range(4)), stalled=True)
    lost = {**told.nodes, "gpu02": Node(node="gpu02", link="lost", why="no sign of life for 120 s")}
    verdict = judge_run(replace(told, nodes=lost))

    assert (verdict.cls, [culprit.node for culprit in verdict.culprits]) == (Fault.NODE_LOST, ["gpu02"])


def test_a_rank_that_waits_for_data_is_told_with_the_processes_that_load_it() -> None:
    loader = "/usr/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    frames = (
        StackFrame(function="_try_get_data", file=loader, line=1),
        StackFrame(function="train", file="/home/u/t.py", line=9),
    )
    verdict = of(waiting(seq=BEGUN), elsewhere(frames=frames, wchan="poll_schedule_timeout", seq=LATE))

    assert (named(verdict), verdict.culprits[0].op) == ([1], "next batch")


def test_ranks_that_nobody_could_look_at_are_said_to_be_missing() -> None:
    verdict = of(waiting(seq=BEGUN), elsewhere(seq=LATE), None, RankSnapshot(source="proc", error="no answer in time"))

    assert verdict.missing_evidence == ("rank 2: it was not examined", "rank 3: no answer in time")


def test_a_stall_at_which_nobody_could_look_has_no_name() -> None:
    verdict = of(None, None)

    assert (verdict.confidence, verdict.culprits) == (Confidence.UNKNOWN, ())


def test_a_run_that_moves_has_nothing_wrong() -> None:
    assert judge_run(case(waiting(), elsewhere())).kind is ProblemKind.NONE


def began(*entries: FlightRecorderEntry, **more: object) -> RankSnapshot:
    """A rank that waits in a collective, with what its recorder holds."""
    return waiting(entries=entries, **more)


def test_of_three_different_collectives_all_that_are_not_with_the_most_are_named() -> None:
    ops = ("all_reduce", "all_reduce", "broadcast", "barrier")
    verdict = of(*(began(entry(5, op)) for op in ops))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.LIKELY, [2, 3])


def test_a_rank_that_sent_something_else_and_went_on_is_named_and_not_those_that_it_is_ahead_of() -> None:
    alike = began(entry(11, done=True), entry(12))
    ahead = began(entry(11, done=True), entry(12, "broadcast", done=True), entry(13))
    verdict = of(alike, ahead, alike, alike)

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [1])


def test_of_a_chain_that_waits_through_messages_the_last_is_named() -> None:
    receives = waiting("recv", entries=(entry(11, done=True), entry(4, "recv", p2p=True)))
    verdict = of(began(entry(12)), began(entry(12)), receives, elsewhere(entries=(entry(11, done=True),)))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.CERTAIN, [3])


@pytest.mark.parametrize("more", [{}, {"frames": None}], ids=["with its stack", "without a stack"])
def test_a_rank_that_waits_for_one_that_never_used_its_group_is_not_named(more: dict[str, object]) -> None:
    middle = began(entry(4, group="b", done=True), entry(1, group="a"), **more)
    verdict = of(elsewhere(entries=()), middle, began(entry(5, group="b")))

    assert (verdict.confidence, named(verdict)) == (Confidence.LIKELY, [0])


def test_a_rank_that_waits_for_its_peers_is_not_named_for_a_page_that_it_reads() -> None:
    reads = began(entry(12), state="D", wchan="io_schedule")
    verdict = of(reads, began(entry(12)), elsewhere(entries=(entry(11, done=True),)), began(entry(12)))

    assert (verdict.cls, named(verdict)) == (Fault.NOT_JOINED, [2])


@pytest.mark.parametrize(
    "chain",
    [
        pytest.param((began(entry(12)), began(entry(12))), id="in one group"),
        pytest.param(
            (began(entry(7, group="a")), began(entry(6, group="a", done=True), entry(2, group="b"))), id="in two groups"
        ),
    ],
)
def test_where_all_that_could_be_seen_wait_nobody_is_named_for_the_one_that_could_not(
    chain: tuple[RankSnapshot, ...],
) -> None:
    verdict = of(*chain, RankSnapshot(source="proc", error="no answer in time"))

    assert (verdict.confidence, verdict.culprits) == (Confidence.UNKNOWN, ())
    assert verdict.summary.endswith("rank 2 could not be examined")


def test_a_group_of_which_the_newest_entries_hold_nothing_is_known_by_its_counter() -> None:
    busy = waiting(entries=(entry(90, group="a", done=True),), seq=BEGUN)
    verdict = of(busy, elsewhere(entries=(entry(90, group="a", done=True),), seq=LATE), busy)

    assert (verdict.confidence, named(verdict)) == (Confidence.CERTAIN, [1])


def test_ranks_that_are_through_are_not_named_for_one_that_goes_on() -> None:
    assert judge_run(case(elsewhere(wchan="folio_wait_bit"), *(ended(0),) * 3)).kind is ProblemKind.NONE


def test_ranks_that_are_through_are_not_named_for_one_that_hangs_by_itself() -> None:
    verdict = of(elsewhere(wchan="wait_for_partner"), *(ended(0),) * 3)

    assert (verdict.cls, named(verdict)) == (Fault.NOT_JOINED, [0])


def test_where_one_has_left_and_another_did_not_join_neither_is_named_alone() -> None:
    verdict = of(waiting(seq=BEGUN), ended(0), elsewhere(seq=LATE), waiting(seq=BEGUN))

    assert (verdict.confidence, named(verdict)) == (Confidence.AMBIGUOUS, [1, 2])


def test_of_one_that_waits_after_most_are_through_it_is_not_told_who_is_wrong() -> None:
    verdict = of(waiting(seq=BEGUN), ended(0), ended(0))

    assert (verdict.cls, verdict.confidence) == (Fault.EXITED_EARLY, Confidence.AMBIGUOUS)
    assert sorted(rank for rank in named(verdict) if rank is not None) == [0, 1, 2]


def test_a_rank_that_takes_two_groups_in_another_order_than_most_is_named() -> None:
    first = waiting(entries=(entry(0, group="b", done=True), entry(1, group="a")))
    other = waiting(entries=(entry(0, group="a", done=True), entry(1, group="b")))
    verdict = of(first, first, other, first)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.DEADLOCK, Confidence.LIKELY, [2])


def test_where_as_many_take_two_groups_in_one_order_as_in_the_other_all_are_named() -> None:
    first = waiting(entries=(entry(0, group="b", done=True), entry(1, group="a")))
    other = waiting(entries=(entry(0, group="a", done=True), entry(1, group="b")))
    verdict = of(first, first, other, other)

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, [0, 1, 2, 3])


def in_messages(rank: int, *messages: str, op: str = "recv") -> RankSnapshot:
    """Return a rank whose last messages are these; with `2 0->1` the second from rank 0 to rank 1."""
    texts = [text.split() for text in messages]
    entries = [
        entry(int(number), op=op, group=f"0:{pair}", p2p=True, done=at < len(texts) - 1)
        for at, (number, pair) in enumerate(texts)
    ]
    return waiting(op, entries=tuple(entries), setup=setup(rank))


def setup(rank: int) -> GroupSetup:
    return {"address": None, "world_size": 4, "rank": rank, "is_joined": True}


@pytest.mark.parametrize(
    ("messages", "named_ranks"),
    [
        pytest.param(["1 0->1", "1 1->2", "1 2->3", "1 3->0"], [0, 1, 2, 3], id="a ring in which all send"),
        pytest.param(["1 1->0", "1 0->1", "1 1->2", "1 2->3"], [0, 1], id="two that receive"),
    ],
)
def test_ranks_whose_messages_wait_for_each_other_are_named(messages: list[str], named_ranks: list[int]) -> None:
    verdict = of(*(in_messages(rank, text) for rank, text in enumerate(messages)))

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, named_ranks)


def test_a_rank_that_collects_parts_although_another_rank_does_is_named() -> None:
    sent = waiting(entries=(entry(1, op="send", group="0:1->0", p2p=True, done=True), entry(9)), setup=setup(1))
    sends = in_messages(3, "1 3->0", op="send")
    verdict = of(in_messages(0, "1 1->0", "1 2->0"), sent, in_messages(2, "1 0->2"), sends)

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, [2])


def test_a_rank_that_leaves_out_its_last_messages_is_named() -> None:
    own = entry(9, op="all_reduce")
    messages = entry(8, group="0:0->1", op="recv", p2p=True, done=True)
    gone_on = waiting(entries=(messages, own), setup=setup(1))
    ahead = waiting(entries=(entry(9, group="0:2->3", op="recv", p2p=True, done=True), own), setup=setup(3))
    verdict = of(in_messages(0, "9 3->0", "9 0->1", op="send"), gone_on, in_messages(2, "9 2->3", "9 1->2"), ahead)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.LIKELY, [1])


def test_a_rank_that_never_sends_the_first_message_is_named() -> None:
    busy = elsewhere(entries=(), setup=setup(0))
    verdict = of(busy, in_messages(1, "1 0->1"), in_messages(2, "1 1->2"), in_messages(3, "1 2->3"))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [0])


def test_a_message_that_a_rank_does_not_wait_for_is_no_wait() -> None:
    sends = elsewhere(entries=(entry(1, group="0:0->1", op="send", p2p=True),), setup=setup(0))
    received = in_messages(1, "1 2->1")
    verdict = of(sends, received, elsewhere(line=40, entries=(), setup=setup(2)), in_messages(3, "1 2->3"))

    assert named(verdict) == [2]


def test_a_rank_that_waits_for_a_message_too_many_is_named() -> None:
    others = [waiting(entries=(entry(9),), setup=setup(rank)) for rank in range(3)]
    asks = waiting(
        "recv",
        entries=(entry(1, op="recv", group="0:0->3", p2p=True), entry(8, done=True)),
        setup=setup(3),
    )
    verdict = of(*others, asks)

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [3])


def test_a_rank_that_leaves_out_a_collective_and_goes_on_to_the_next_message_is_named() -> None:
    done = [entry(4, op="recv", group=f"0:{rank + 1}->{rank}", p2p=True, done=True) for rank in range(3)]
    first = waiting(entries=(done[0], entry(5, group="1")), setup=setup(0))
    last = in_messages(3, "5 2->3")
    last = replace(last, entries=(*(last.entries or ()), entry(4, group="1", done=True)))
    middle = [
        replace(one, entries=(done[rank], *(one.entries or ())))
        for rank, one in ((1, in_messages(1, "5 0->1")), (2, in_messages(2, "5 1->2")))
    ]
    verdict = of(first, *middle, last)

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [3])


def test_the_first_of_a_chain_of_messages_is_named_if_it_has_gone_on_without_its_message() -> None:
    sent = tuple(entry(4, op="send", group=f"0:{rank}->{rank + 1}", p2p=True, done=True) for rank in range(3))
    ranks = [in_messages(rank, f"5 {rank - 1}->{rank}") for rank in (1, 2, 3)]
    ranks = [replace(one, entries=(*sent[rank : rank + 1], *(one.entries or ()))) for rank, one in enumerate(ranks, 1)]
    verdict = of(waiting(entries=(sent[0], entry(5)), setup=setup(0)), *ranks)

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [0])


def test_of_two_ranks_that_disagree_whether_a_message_follows_both_are_named() -> None:
    gone_on = waiting(entries=(entry(4, op="send", group="0:0->1", p2p=True, done=True), entry(5)), setup=setup(0))
    awaits = in_messages(1, "5 0->1")
    awaits = replace(awaits, entries=(*(awaits.entries or ()), entry(4, done=True)))

    assert named(of(gone_on, awaits)) == [0, 1]


def test_a_rank_that_chooses_another_partner_is_named() -> None:
    def mixed(rank: int, *messages: str, done: bool) -> tuple[FlightRecorderEntry, ...]:
        texts = [text.split() for text in messages]
        return tuple(entry(int(n), op="recv", group=f"0:{pair}", p2p=True, done=done) for n, pair in texts)

    collective = entry(9)
    left = [
        waiting(entries=(*mixed(rank, f"5 {rank}->{5 - rank}", f"5 {5 - rank}->{rank}", done=True), collective))
        for rank in (2, 3)
    ]
    chooser = waiting("recv", entries=(*mixed(0, "4 1->0", done=True), *mixed(0, "6 3->0", done=False)))
    partner = waiting("recv", entries=(*mixed(1, "4 1->0", done=True), *mixed(1, "6 0->1", done=False)))
    ranks = [chooser, partner, *left]
    verdict = of(*(replace(one, setup=setup(rank)) for rank, one in enumerate(ranks)))

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [0])


def test_the_rank_whose_message_has_another_tag_than_those_of_all_others_is_named() -> None:
    def tagged(rank: int, op: str, pair: str, tag: int) -> RankSnapshot:
        one = in_messages(rank, f"7 {pair}", op=op)
        return replace(one, entries=tuple({**each, "sizes": f"[[16, 64]] tag {tag}"} for each in one.entries or ()))

    verdict = of(
        tagged(0, "send", "0->1", 8),
        tagged(1, "recv", "0->1", 7),
        tagged(2, "recv", "1->2", 7),
        tagged(3, "recv", "2->3", 7),
    )

    assert (verdict.cls, named(verdict)) == (Fault.MISMATCH, [0])
    assert "tag 8" in verdict.summary


def test_a_server_that_receives_from_any_rank_is_not_named_for_its_missing_answers() -> None:
    server = in_messages(0, "4 0->1", "4 0->2", "12 *->0")
    verdict = of(server, in_messages(1, "5 0->1"), in_messages(2, "5 0->2"), elsewhere(entries=(), setup=setup(3)))

    assert named(verdict) == [3]


def test_a_handle_that_nobody_waits_for_is_no_message_that_others_lack() -> None:
    kept = waiting(entries=(entry(1, op="send", group="0:1->0", p2p=True), entry(9)), setup=setup(1))
    others = [waiting(entries=(entry(9),), setup=setup(rank)) for rank in (0, 2, 3)]
    verdict = of(others[0], kept, *others[1:])

    assert (verdict.cls, named(verdict)) == (Fault.NETWORK, [])


def test_a_rank_in_its_data_loader_does_not_wait_for_a_message_that_it_has_begun() -> None:
    frames = (
        StackFrame(function="get", file="/usr/lib/python3.11/queue.py", line=171),
        StackFrame(function="train", file=USER, line=24),
    )
    begun = entry(2, op="recv", group="0:1->0", p2p=True)
    loads = elsewhere(wchan="futex_do_wait", entries=(begun,), setup=setup(0), frames=frames)
    verdict = of(loads, *(in_messages(rank, f"2 {rank - 1}->{rank}") for rank in (1, 2, 3)))

    assert (verdict.cls, named(verdict)) == (Fault.NOT_JOINED, [0])
