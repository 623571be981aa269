"""Pieces of a cast, their messages, and the choice of the next one."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.cast.piece_choice import PieceChoice, list_neighbours
from clusterctl.agent.protocol import pieces
from clusterctl.agent.protocol.frames import FrameError
from clusterctl.agent.protocol.pieces import PIECE_BYTES, CastPlan, Kind, MessageDecoder, PieceMap, RateLimit
from clusterctl.run.rules.piece_giving import PieceGiving

SIZES = st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=6)


@given(SIZES)
def test_the_pieces_cover_every_byte_of_every_content_once(sizes: list[int]) -> None:
    places = PieceMap(sizes)
    covered: dict[int, list[tuple[int, int]]] = {}
    for piece in range(places.count):
        parts = list(places.list_parts(piece))
        assert sum(length for _, _, length in parts) == places.get_length(piece) > 0
        for number, offset, length in parts:
            assert piece in places.list_pieces(number)
            covered.setdefault(number, []).append((offset, offset + length))

    assert sum(len(places.list_pieces(number)) for number in range(len(sizes))) == sum(map(len, covered.values()))
    for number, size in enumerate(sizes):
        spans = covered.get(number, [])
        assert all(first[1] == second[0] for first, second in pairwise(spans))
        assert (spans[0][0], spans[-1][1]) == (0, size) if size else not spans


def test_a_plan_arrives_as_it_was_sent() -> None:
    plan = CastPlan("id", [("a" * 64, 5)], [b"\0" * 32, b"\1" * 32], "certificate", "key", "10.0.0.1", 7)

    assert vars(CastPlan.decode(plan.encode())) == vars(plan)


@given(st.lists(st.integers(1, 50)), st.lists(st.integers(0, 9), max_size=10), st.binary(min_size=1, max_size=99))
def test_messages_arrive_whole_however_they_are_cut(cuts: list[int], numbers: list[int], data: bytes) -> None:
    sent = (
        pieces.encode_numbers(Kind.HAVE, numbers)
        + pieces.encode_message(Kind.END)
        + pieces.encode_numbers(Kind.PIECE, [9], data)
    )
    decoder, position, got = MessageDecoder(10, Kind), 0, []
    for cut in [*cuts, len(sent)]:
        got += list(decoder.feed(sent[position : position + cut]))
        position += cut

    assert got == [(Kind.HAVE, numbers, b""), (Kind.END, [], b""), (Kind.PIECE, [9], data)]


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(pieces.encode_message(Kind.END), id="a kind that only the head may send"),
        pytest.param(b"\xff\0\0\0\0", id="no kind"),
        pytest.param(pieces.encode_numbers(Kind.WANT, [1, 2]), id="two pieces at once"),
        pytest.param(pieces.encode_message(Kind.WAIT, b"x"), id="a body where none belongs"),
        pytest.param(pieces.encode_numbers(Kind.WANT, [10]), id="a piece beyond the last"),
        pytest.param(pieces.encode_numbers(Kind.HAVE, [0] * 11), id="more pieces than there are"),
        pytest.param(pieces.encode_message(Kind.HAVE, b"\0" * 6), id="half a number"),
        pytest.param(b"\4\xff\xff\xff\xff", id="a piece of 4 GiB"),
        pytest.param(pieces.encode_numbers(Kind.PIECE, [1]), id="an empty piece"),
    ],
)
def test_a_message_beyond_its_limits_is_refused_before_its_body_arrives(message: bytes) -> None:
    with pytest.raises(FrameError):
        list(MessageDecoder(10, {Kind.WANT, Kind.WAIT, Kind.HAVE, Kind.PIECE}).feed(message))


@given(st.integers(1, 1 << 30), st.lists(st.tuples(st.integers(1, 1 << 22), st.floats(0, 10)), min_size=1))
def test_a_limit_holds_on_average(limit: int, transfers: list[tuple[int, float]]) -> None:
    rate, now = RateLimit(limit), 0.0
    for count, pause in transfers:
        now += pause + rate.spend(count, now + pause)

    last = transfers[-1][0]
    assert sum(count for count, _ in transfers) - last <= limit * now * (1 + 1e-9) + 1


# --- neighbours


@given(st.sets(st.integers(0, 999), min_size=2, max_size=60), st.data())
def test_neighbours_are_mutual_few_and_connect_all(peers: set[int], data: st.DataObject) -> None:
    graph = {peer: list_neighbours(peer, peers - {peer}) for peer in peers}

    assert all(len(near) == len(set(near)) <= 2 * (len(peers) - 1).bit_length() for near in graph.values())
    assert all(peer in graph[other] for peer, near in graph.items() for other in near)
    start = data.draw(st.sampled_from(sorted(peers)))
    reached, steps = {start}, 0
    while reached != peers:
        reached |= {near for peer in reached for near in graph[peer]}
        steps += 1
        assert steps <= (len(peers) - 1).bit_length()


# --- one peer


def test_the_rarest_piece_comes_first() -> None:
    choice = PieceChoice(range(3))
    choice.add_offer(1, [0, 1, 2])
    choice.add_offer(2, [0, 1])

    assert choice.choose_piece(1, 0.0, random.Random(1)) == 2


def test_a_piece_is_requested_once_until_its_request_is_overdue_or_its_neighbour_is_gone() -> None:
    choice, chance = PieceChoice([0]), random.Random(1)
    for neighbour in (1, 2, 3):
        choice.add_offer(neighbour, [0])

    assert [choice.choose_piece(n, at, chance) for n, at in ((1, 0.0), (2, 0.5), (2, 2.0), (3, 2.5))] == [
        0,
        None,
        0,
        None,
    ]
    choice.remove_neighbour(1)
    choice.remove_neighbour(2)
    assert choice.choose_piece(3, 2.5, chance) == 0
    choice.finish_piece(0, 3, 2.6)
    assert choice.choose_piece(1, 9.0, chance) is None
    assert not choice.missing


# --- the head


def give_all(giving: PieceGiving, now: float) -> list[tuple[str, int]]:
    gifts = []
    while (gift := giving.choose_gift(now)) is not None:
        gifts.append(gift)
    return gifts


def test_the_head_gives_each_piece_to_one_node_and_spreads_them() -> None:
    giving = PieceGiving({"a": {0, 1, 2, 3}, "b": {0, 1, 2, 3}}, 0.0)

    assert give_all(giving, 0.0) == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
    for node, piece in (("a", 0), ("b", 1), ("a", 2), ("b", 3)):
        giving.add_pieces(node, [piece], 1.0)
    assert give_all(giving, 5.0) == []
    assert not giving.fed


def test_a_node_gets_one_piece_at_a_time() -> None:
    giving = PieceGiving({"a": {0, 1}, "b": {0, 1}}, 0.0)

    assert giving.choose_gift(0.0, {"a"}) == ("b", 0)
    assert giving.choose_gift(0.0, {"a", "b"}) is None


def test_what_only_a_lost_node_had_is_given_again() -> None:
    giving = PieceGiving({"a": {0, 1}, "b": {0, 1}}, 0.0)
    give_all(giving, 0.0)
    giving.add_pieces("a", [0], 1.0)
    giving.remove_node("a")

    assert give_all(giving, 1.0) == [("b", 0)]


def test_a_node_that_reaches_no_other_gets_everything_from_the_head() -> None:
    giving = PieceGiving({"a": {0, 1}, "b": {0, 1}}, 0.0)
    give_all(giving, 0.0)
    giving.add_pieces("a", [0], 1.0)
    giving.add_pieces("b", [1], 1.0)
    giving.set_isolated("b", is_isolated=True)

    assert give_all(giving, 1.0) == [("b", 0)]
    assert giving.fed == {"b"}


# --- all together


@given(st.data())
def test_whoever_dies_the_living_end_whole_if_each_piece_has_a_living_copy(data: st.DataObject) -> None:
    count, total = data.draw(st.integers(2, 12), label="nodes"), data.draw(st.integers(1, 20), label="pieces")
    whole = frozenset(range(total))
    held = {n: set(data.draw(st.sets(st.integers(0, total - 1)), label=f"node {n} has")) for n in range(count)}
    deaths = data.draw(
        st.dictionaries(st.integers(0, count - 1), st.integers(0, 30), max_size=count - 1), label="deaths"
    )
    head_dies = data.draw(st.none() | st.integers(0, 30), label="head dies")
    chance = random.Random(data.draw(st.integers(0, 99), label="chance"))
    giving = PieceGiving({str(n): whole for n in held}, 0.0)
    choices = {n: PieceChoice(whole - pieces) for n, pieces in held.items()}
    for n, has in held.items():
        giving.add_pieces(str(n), has, 0.0)
    gifts: list[tuple[int, int]] = []
    for step in range(200):
        now = float(step)
        for dead in [n for n, at in deaths.items() if at == step and n in choices]:
            del choices[dead]
            giving.remove_node(str(dead))
            for choice in choices.values():
                choice.remove_neighbour(dead)
        arrived = [(int(node), piece, None) for node, piece in gifts if int(node) in choices]
        gifts = [] if head_dies is not None and step >= head_dies else [(int(n), p) for n, p in give_all(giving, now)]
        for own, choice in choices.items():
            for near in list_neighbours(own, choices.keys() - {own}):
                choice.add_offer(near, held[near])
                piece = choice.choose_piece(near, now, chance)
                if piece is not None:
                    arrived.append((own, piece, near))
        for own, piece, near in arrived:
            held[own].add(piece)
            choices[own].finish_piece(piece, near, now)
            giving.add_pieces(str(own), [piece], now)

    has_all = head_dies is None or set().union(*(held[n] for n in choices)) == whole
    if has_all:
        assert {n: held[n] for n in choices} == dict.fromkeys(choices, whole)
