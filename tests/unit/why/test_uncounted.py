"""Who is missing where nothing is counted: other programs than torch, and ranks that tell nothing of themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.agent.protocol.record_types import TcpConnection
from clusterctl.why.evidence_types import Node, RankSnapshot, StackFrame
from clusterctl.why.run_verdict import judge_run
from clusterctl.why.verdict import Confidence, Fault, Verdict
from tests.unit.why.cases import USER, case, elsewhere, entry, waiting

HUB = 29500
ONE_MACHINE = {name: Node(node=name, addresses=("10.0.0.1",)) for name in ("gpu01", "gpu02")}


def of(*looks: RankSnapshot, **more: object) -> Verdict:
    return judge_run(case(*looks, stalled=True, **more))


def named(verdict: Verdict) -> list[int | None]:
    return [culprit.rank for culprit in verdict.culprits]


def connection(**fields: Any) -> TcpConnection:
    """A connection on which nothing waits."""
    quiet: Any = {"state": "ESTABLISHED", "unacked": 0, "unread": 0, "lost": 0, "awaited": False}
    return quiet | fields


def reads(rank: int, *, awaited: bool = True, **more: object) -> TcpConnection:
    """The connection of a rank to rank 0, as that rank has it."""
    return connection(
        address=f"10.0.0.{rank // 2 + 1}",
        port=40_000 + rank,
        peer="10.0.0.1",
        peer_port=HUB,
        awaited=awaited,
        **more,
    )


def answers(rank: int, *, awaited: bool = False, **more: object) -> TcpConnection:
    """The same, as rank 0 has it."""
    return connection(
        address="10.0.0.1",
        port=HUB,
        peer=f"10.0.0.{rank // 2 + 1}",
        peer_port=40_000 + rank,
        awaited=awaited,
        **more,
    )


def at_socket(*sockets: TcpConnection, line: int = 70) -> RankSnapshot:
    frames = (StackFrame(function="answer", file=USER, line=line),)
    return RankSnapshot(source="signal", state="S", wchan="wait_woken", cpu=0.0, frames=frames, sockets=sockets)


def test_of_ranks_that_read_from_each_other_the_one_that_reads_from_nobody_is_named() -> None:
    hub = at_socket(answers(1), answers(2, awaited=True), answers(3))
    verdict = of(hub, at_socket(reads(1)), elsewhere(sockets=(reads(2, awaited=False),)), at_socket(reads(3)))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_the_rank_that_all_read_from_is_named_where_it_reads_from_nobody() -> None:
    hub = elsewhere(sockets=(answers(1), answers(2), answers(3)))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_socket(reads(3)))

    assert named(verdict) == [0]
    assert "sent no data" in verdict.summary


def test_the_client_is_named_for_whose_data_a_thread_of_the_server_waits() -> None:
    hub = at_socket(answers(1), answers(2, awaited_by_thread=True), answers(3))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_socket(reads(3)))

    assert (verdict.confidence, named(verdict)) == (Confidence.LIKELY, [2])
    assert "a thread of rank 0 waits" in verdict.summary


def test_a_server_that_has_read_the_only_request_is_named_itself() -> None:
    hub = elsewhere(sockets=(answers(2, awaited_by_thread=True),))
    quiet = [elsewhere(line=90) for _ in range(2)]
    verdict = of(hub, quiet[0], at_socket(reads(2)), quiet[1])

    assert 2 not in named(verdict)


@pytest.mark.parametrize("line", ["epoch 3 val_error 0.12", "0 failed, 3 passed", "mean squared error: 0.3"])
def test_a_metric_is_no_printed_error(line: str) -> None:
    polls = [elsewhere(main_age=0.1, tail=("step 9",)) for _ in range(3)]

    assert named(of(*polls, elsewhere(main_age=0.1, tail=(line,)))) == []


def test_a_server_that_computes_is_named_itself() -> None:
    hub = elsewhere(sockets=(answers(1), answers(2, awaited_by_thread=True), answers(3)), state="R", wchan="", cpu=1.0)
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_socket(reads(3)))

    assert named(verdict) == [0]


def test_the_only_rank_that_has_printed_an_error_is_named_if_all_wait_for_something() -> None:
    polls = [elsewhere(main_age=0.1, tail=("step 9", "done")) for _ in range(3)]
    verdict = of(*polls[:2], elsewhere(main_age=0.1, tail=("job 5 failed: [Errno 5]", "job 6")), polls[2])

    assert (verdict.cls, named(verdict)) == (Fault.EXTERNAL_WAIT, [2])
    assert "only rank 2 on gpu02 has printed an error: job 5 failed: [Errno 5]" in verdict.summary


def test_a_server_whose_threads_wait_for_several_clients_is_named_itself() -> None:
    hub = elsewhere(sockets=tuple(answers(rank, awaited_by_thread=True) for rank in (1, 2, 3)))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_socket(reads(3)))

    assert named(verdict) == [0]


def test_ranks_that_read_from_each_other_in_a_circle_are_a_deadlock() -> None:
    first = at_socket(answers(1, awaited=True), answers(2))
    verdict = of(first, at_socket(reads(1)), at_socket(reads(2)))

    assert (verdict.cls, named(verdict)) == (Fault.DEADLOCK, [0, 1])


def test_a_rank_apart_from_all_chains_makes_it_ambiguous() -> None:
    hub = elsewhere(sockets=(answers(1), answers(2)))
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), elsewhere(line=5))

    assert verdict.confidence is Confidence.AMBIGUOUS
    assert named(verdict) == [0, 3]


def test_without_stacks_the_rank_that_the_kernel_holds_elsewhere_is_likely() -> None:
    in_futex = RankSnapshot(source="proc", state="S", wchan="futex_do_wait", cpu=0.0)
    asleep = RankSnapshot(source="proc", state="S", wchan="hrtimer_nanosleep", cpu=0.0)
    verdict = of(in_futex, in_futex, asleep, in_futex)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.NOT_JOINED, Confidence.LIKELY, [2])


def test_that_no_rank_tells_of_itself_is_said() -> None:
    verdict = of(waiting(), waiting(), elsewhere(), waiting())

    assert any("`job.inject: false`" in text for text in verdict.missing_evidence)


def test_between_which_nodes_nothing_arrives_is_said_where_all_have_joined() -> None:
    begun = (entry(12),)
    lost = [waiting(entries=begun, sockets=(reads(rank, awaited=False, lost=5, unacked=96),)) for rank in (2, 3)]
    verdict = of(waiting(entries=begun), waiting(entries=begun, sockets=()), *lost)

    assert (verdict.cls, verdict.confidence) == (Fault.NETWORK, Confidence.LIKELY)
    assert [(one.rank, one.node) for one in verdict.culprits] == [(None, "gpu01"), (None, "gpu02")]
    assert "96 bytes were resent 5 times" in verdict.summary


def test_a_segment_that_was_sent_again_once_is_no_broken_network() -> None:
    looks = [waiting(entries=(entry(12),), sockets=(reads(rank, awaited=False, lost=1),)) for rank in range(4)]
    verdict = of(*looks)

    assert verdict.confidence is Confidence.AMBIGUOUS
    assert verdict.culprits == ()


def test_connections_within_two_nodes_that_look_alike_are_two() -> None:
    inside = connection(address="127.0.0.1", port=5, peer="127.0.0.1", peer_port=6, awaited=True)
    turned = connection(address="127.0.0.1", port=6, peer="127.0.0.1", peer_port=5)
    verdict = of(at_socket(inside), elsewhere(), elsewhere(sockets=(turned,)), elsewhere(line=5))

    assert named(verdict) != [2]


def test_ranks_of_two_nodes_on_one_machine_read_from_each_other_over_loopback() -> None:
    inside = connection(address="127.0.0.1", port=5, peer="127.0.0.1", peer_port=6, awaited=True)
    turned = connection(address="127.0.0.1", port=6, peer="127.0.0.1", peer_port=5)
    evidence = case(at_socket(inside), at_socket(), elsewhere(sockets=(turned,)), at_socket(), stalled=True)
    nodes = {name: replace(node, addresses=("127.0.0.1",)) for name, node in evidence.nodes.items()}

    assert named(judge_run(replace(evidence, nodes=nodes))) == [2]


def at_child(state: str = "S", wchan: str | None = "futex_do_wait") -> RankSnapshot:
    """A rank that waits for the Python that it started."""
    child: Any = {"pid": 40, "state": state, "wchan": wchan}
    return elsewhere(wchan="do_wait", children=(child,))


def at_outside(**more: Any) -> RankSnapshot:
    """A rank that waits for an answer of a server that is no rank."""
    server = connection(address="10.0.0.1", port=50_000, peer="10.9.9.9", peer_port=443, awaited=True)
    return replace(at_socket(server), **more)


def polls(line: int = 21, **more: Any) -> RankSnapshot:
    return elsewhere(line, main_age=0.1, **more)


def test_of_ranks_that_only_started_the_trainer_the_one_is_named_whose_trainer_does_something_else() -> None:
    verdict = of(at_child(), at_child("R", None), at_child(), at_child())

    assert (named(verdict), verdict.confidence) == ([1], Confidence.LIKELY)
    assert verdict.culprits[0].evidence == "its child process runs"


@pytest.mark.parametrize(
    "look",
    [at_outside(), polls(), elsewhere(wchan="flock_lock_inode_wait"), at_outside(wchan="poll_schedule_timeout")],
    ids=["server", "file", "lock", "select"],
)
def test_where_all_wait_at_one_line_for_something_outside_no_rank_is_named(look: RankSnapshot) -> None:
    verdict = of(look, look, look, look)

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.EXTERNAL_WAIT, Confidence.LIKELY, [])


def test_the_server_for_which_all_wait_is_told() -> None:
    assert "10.9.9.9:443" in of(at_outside(), at_outside(), at_outside()).summary


def test_where_one_could_not_be_seen_nothing_outside_is_blamed() -> None:
    assert of(polls(), polls(), polls(), RankSnapshot(source="proc", error="gone")).confidence is Confidence.UNKNOWN


def test_a_rank_that_waits_elsewhere_than_at_the_server_that_waits_for_it_is_named() -> None:
    hub = replace(at_socket(answers(1), answers(2)), wchan="inet_csk_accept")
    verdict = of(hub, at_socket(reads(1)), at_socket(reads(2)), at_outside())

    assert (named(verdict), verdict.confidence) == ([3], Confidence.LIKELY)
    assert "has no connection to rank 0" in verdict.summary


def test_a_server_that_waits_for_any_of_its_connections_is_not_named_beside_the_one_that_does_not_wait() -> None:
    hub = replace(at_socket(answers(1), answers(2), answers(3)), wchan="ep_poll")
    verdict = of(hub, at_socket(reads(1)), elsewhere(sockets=(reads(2, awaited=False),)), at_socket(reads(3)))

    assert (named(verdict), verdict.confidence) == ([2], Confidence.LIKELY)


def test_where_rank_0_and_its_workers_all_poll_no_rank_is_named_alone() -> None:
    verdict = of(polls(), polls(40), polls(40), polls(40))

    assert (named(verdict), verdict.confidence) == ([0, 1, 2, 3], Confidence.AMBIGUOUS)


def test_of_ranks_at_one_line_the_one_that_came_there_from_another_is_named() -> None:
    outer = StackFrame(function="train", file=USER, line=99)
    verdict = of(polls(), polls(), replace(polls(), frames=((polls().frames or ())[0], outer)), polls())

    assert (named(verdict), verdict.confidence) == ([2], Confidence.LIKELY)


def at_store(awaited: str | None, *set_keys: str, **more: Any) -> RankSnapshot:
    keys = tuple((awaited or "").split())
    return elsewhere(wchan="poll_schedule_timeout", awaited_keys=keys, set_keys=set_keys, **more)


def test_the_rank_that_skipped_the_key_for_which_another_waits_is_named() -> None:
    """The others wait for each other, because one of them does not go on."""
    verdict = of(
        at_store("w/51/1", "w/50/0", "w/51/0"),
        at_store("w/50/2", "w/49/1", "w/50/1"),
        at_store("w/53/3", "w/49/2", "w/51/2", "w/53/2"),
        at_store("w/52/0", "w/51/3", "w/52/3"),
    )

    assert (named(verdict), verdict.confidence) == ([2], Confidence.LIKELY)
    assert "did not set w/50/2" in verdict.summary


def test_the_rank_that_sets_no_key_and_waits_for_none_is_named() -> None:
    verdict = of(
        at_store("w/51/1", "w/51/0"),
        at_store("w/51/2", "w/51/1"),
        at_store(None, "w/50/2"),
        at_store("w/51/0", "w/51/3"),
    )

    assert named(verdict) == [2]


def test_the_rank_that_waits_for_its_own_key_is_named() -> None:
    assert named(of(*(at_store("w/5/0", f"w/4/{rank}", *(["w/5/1"] if rank == 1 else [])) for rank in range(3)))) == [0]


def test_the_only_rank_that_sets_a_key_is_named_where_it_skipped_one() -> None:
    reader = at_store("step/7", "done/1/6")
    verdict = of(at_store("done/1/7", "step/6", "step/8"), reader, reader)

    assert named(verdict) == [0]


def test_the_rank_that_set_its_key_under_another_name_is_named() -> None:
    every = "data/2/a/0 data/2/a/1 data/2/b/0 data/2/b/1"
    ranks = [[f"data/{epoch}/{node}/{local}" for epoch in range(3)] for node in "ab" for local in range(2)]
    ranks[2][-1] = "data/2/b.internal/0"
    verdict = of(*(at_store(every, *keys) for keys in ranks))

    assert named(verdict) == [2]
    assert "did not set data/2/b/0" in verdict.summary


def test_the_rank_that_set_the_key_of_another_rank_is_named() -> None:
    every = " ".join(f"ready/{rank}" for rank in range(4))

    assert named(of(*(at_store(every, f"ready/{rank}") for rank in (0, 1, 2, 1)))) == [3]


def test_of_ranks_that_wait_for_one_key_the_one_that_waits_for_another_is_named() -> None:
    assert named(of(*(at_store(key) for key in ("epoch-3", "epoch-3", "epoch-4", "epoch-3")))) == [2]


@pytest.mark.parametrize(
    ("ranks", "culprits"),
    [
        (["#aa", "#aa", "#aa", "#bb"], [3]),
        (["#bb", "#aa", "#aa", "#aa"], [0]),
        (["7", "7", "6", "7"], [2]),
        (["6", "7", "7", "7"], [0]),
        (["51", "50", "53", "52"], [2]),  # each waits for the next one, and the last one skipped something
        (["51", "50", "59", "52"], []),
        (["1", "0", "3", "2"], []),  # ranks
        (["1", "0", "0", "0"], []),  # the peer of rank 0 is another one
        (["#aa", "#aa", "#bb", "#bb"], []),
        (["#aa", "#bb", "#cc", "#dd"], []),  # a name with the rank in it
    ],
)
def test_of_ranks_at_one_line_the_one_is_named_whose_call_has_another_value(
    ranks: list[str], culprits: list[int]
) -> None:
    same = {"load.self.path": "#00"}
    verdict = of(*(polls(call_values={**same, "load.self.folder": value}) for value in ranks))

    assert named(verdict) == culprits
    assert verdict.confidence is Confidence.LIKELY
    assert not culprits or "`load.self.folder`" in verdict.summary


def test_two_values_that_name_two_ranks_name_none() -> None:
    values = [("1", "1"), ("2", "1"), ("1", "2"), ("1", "1")]

    assert named(of(*(polls(call_values={"load.a": a, "load.b": b}) for a, b in values))) == []


def test_rank_0_may_wait_for_another_key_than_the_others_that_wait_for_it() -> None:
    assert named(of(*(at_store(key) for key in ("x/1", "x/0", "x/0", "x/0")))) == []


def test_numbers_of_files_and_connections_name_nobody() -> None:
    assert named(of(*(polls(call_values={"load.self.fd": number}) for number in "7757"))) == []


def test_a_number_of_a_library_names_nobody() -> None:
    assert named(of(*(polls(call_values={"_get_data.ready": number}) for number in "2232"))) == []


def test_a_rank_that_polls_is_not_named_beside_one_that_waits_for_an_answer() -> None:
    verdict = of(polls(39), waiting("barrier"), elsewhere(50, "wait_woken"), waiting("barrier"))

    assert (verdict.confidence, named(verdict)) == (Confidence.LIKELY, [2])


def test_a_rank_that_polls_is_named_too_if_the_other_one_reads_from_a_rank() -> None:
    reader = at_socket(reads(2))
    verdict = of(polls(39, sockets=(answers(2),)), waiting("barrier"), reader, waiting("barrier"))

    assert named(verdict) != [2]


def test_the_only_rank_that_has_gone_on_while_all_others_poll_is_named_with_doubt() -> None:
    counted = {"seq": {"0": (8, 8)}}
    verdict = of(*(polls(35, **counted) for _ in range(3)), waiting(seq={"0": (9, 8)}))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.AMBIGUOUS, [3])
    assert "gone on to" in verdict.summary


def test_the_only_rank_that_has_gone_on_while_the_others_wait_in_recv_is_named() -> None:
    receives = {"op": "recv", "seq": {"0": (8, 8)}}
    verdict = of(waiting(**receives), waiting(seq={"0": (9, 8)}), waiting(**receives), waiting(**receives))

    assert (verdict.cls, verdict.confidence, named(verdict)) == (Fault.MISMATCH, Confidence.LIKELY, [1])


def test_a_ring_in_which_all_send_and_nobody_reads_is_a_deadlock() -> None:
    def link(of_sender: bool, sender: int) -> TcpConnection:
        ends = {"address": f"10.0.0.{sender // 2 + 1}", "port": 40_000 + sender}
        receiver = (sender + 1) % 4
        other = {"peer": f"10.0.0.{receiver // 2 + 1}", "peer_port": 5000 + receiver}
        if of_sender:
            return connection(**ends, **other, unacked=9)
        back = {
            "address": other["peer"],
            "port": other["peer_port"],
            "peer": ends["address"],
            "peer_port": ends["port"],
        }
        return connection(**back, unread=9)

    verdict = of(*(elsewhere(sockets=(link(True, rank), link(False, (rank - 1) % 4))) for rank in range(4)))

    assert (named(verdict), verdict.cls) == ([0, 1, 2, 3], Fault.DEADLOCK)
    assert "wait to send to each other" in verdict.summary


def test_a_rank_whose_server_answers_others_no_more_is_named_although_it_has_joined() -> None:
    joined = {"0": (12, 11)}
    server = waiting(seq=joined, sockets=(answers(1), answers(2)))
    late = {"0": (11, 11)}
    asking = [elsewhere(wchan="wait_woken", seq=late, sockets=(reads(rank),)) for rank in (1, 2)]
    verdict = of(server, *asking, waiting(seq=joined))

    assert (named(verdict), verdict.confidence) == ([0], Confidence.LIKELY)
    assert "ranks 1-2 wait for an answer of rank 0" in verdict.summary


def test_ranks_whose_connection_was_accepted_by_nobody_wait_for_the_rank_that_listens() -> None:
    joined, late = {"0": (12, 11)}, {"0": (11, 11)}
    listens = connection(state="listen", address="0.0.0.0", port=HUB, peer="0.0.0.0", peer_port=0)
    asking = [elsewhere(wchan="wait_woken", seq=late, sockets=(reads(rank),)) for rank in (1, 2)]
    verdict = of(waiting(seq=joined, sockets=(listens,)), *asking, waiting(seq=joined))

    assert (named(verdict), verdict.confidence) == ([0], Confidence.LIKELY)


def test_a_rank_that_waits_for_a_socket_is_late_without_certainty_and_its_peer_is_shown() -> None:
    joined = {"0": (12, 11)}
    asks = connection(peer="10.9.9.9", peer_port=8080, awaited=True, address="10.0.0.1", port=40_001)
    late = elsewhere(wchan="wait_woken", seq={"0": (11, 11)}, sockets=(asks,))
    verdict = of(waiting(seq=joined), late, waiting(seq=joined), waiting(seq=joined))

    assert (named(verdict), verdict.confidence) == ([1], Confidence.LIKELY)
    assert "it waits for a network socket (10.9.9.9:8080)" in verdict.summary


def lock_wait(holder: int, **more: Any) -> RankSnapshot:
    return elsewhere(wchan="locks_lock_inode_wait", lock_holder=holder, **more)


def test_a_rank_that_is_in_a_collective_with_the_lock_of_a_file_is_named_and_not_those_that_wait_for_the_lock() -> None:
    late = {"0": (11, 11)}
    verdict = of(
        lock_wait(71, pid=70, seq=late),
        waiting("barrier", pid=71, seq={"0": (12, 11)}),
        *(lock_wait(71, pid=pid, seq=late) for pid in (72, 73)),
        nodes=ONE_MACHINE,
    )

    assert (named(verdict), verdict.confidence) == ([1], Confidence.LIKELY)
    assert verdict.summary.startswith("ranks 0,2-3 wait for the lock that rank 1 on gpu01 (train.py:26) took on a file")


def test_a_rank_whose_child_has_inherited_a_locked_file_is_named_although_it_waits_for_the_lock_too() -> None:
    verdict = of(*(lock_wait(72, pid=pid) for pid in (70, 71, 72, 73)), nodes=ONE_MACHINE)

    assert (named(verdict), verdict.cls) == ([2], Fault.NOT_JOINED)


def test_a_process_of_another_machine_with_the_number_of_the_holder_is_not_named() -> None:
    verdict = of(*(lock_wait(72, pid=pid) for pid in (70, 71, 72, 73)))

    assert named(verdict) == []
