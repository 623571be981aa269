from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.door.samples import MOST_LINE, SampleLines, may_be, readable


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_bytes_may_be_cut_anywhere(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    taker = SampleLines()
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert [line for piece in pieces for line in taker.take("a", piece)] == lines


def test_of_each_node_the_begin_of_a_line_waits_for_its_own_end() -> None:
    taker = SampleLines()
    assert taker.take("a", b"one") == taker.take("b", b"two") == []
    assert taker.take("a", b"!\n") == [b"one!"]
    assert taker.take("b", b"?\n") == [b"two?"]


@pytest.mark.parametrize(
    ("size", "kept"), [pytest.param(MOST_LINE, True, id="the most"), pytest.param(MOST_LINE + 1, False, id="more")]
)
def test_of_a_line_longer_than_any_may_be_nothing_is_held(size: int, kept: bool) -> None:
    taker = SampleLines()
    taker.take("a", b"x" * size)
    assert taker.take("a", b"\n") == [b"x" * size if kept else b""]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"t":1.0,"attempt":0,"kind":"health"}', id="as nodes write it"),
        pytest.param(b'{"kind": "health", "t": 1.0, "attempt": 0}', id="in another order"),
        pytest.param(b'{"kind":"health","phase":"activity","t":1.0}', id="with the name of another kind in it"),
    ],
)
def test_a_sample_is_of_the_kind_that_it_says_wherever_it_says_so(line: bytes) -> None:
    assert may_be(line, "health")
    assert not list(readable([line], "activity"))
