from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.validation.samples import MAX_LINE_BYTES, SampleLineSplitter, may_be_sample, parse_samples


@given(st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_bytes_may_be_cut_anywhere(lines: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    splitter = SampleLineSplitter()
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert [line for piece in pieces for line in splitter.split("a", piece)] == lines


def test_of_each_node_the_begin_of_a_line_waits_for_its_own_end() -> None:
    splitter = SampleLineSplitter()
    assert splitter.split("a", b"one") == splitter.split("b", b"two") == []
    assert splitter.split("a", b"!\n") == [b"one!"]
    assert splitter.split("b", b"?\n") == [b"two?"]


@pytest.mark.parametrize(
    ("size", "kept"),
    [pytest.param(MAX_LINE_BYTES, True, id="the most"), pytest.param(MAX_LINE_BYTES + 1, False, id="more")],
)
def test_of_a_line_longer_than_any_may_be_nothing_is_held(size: int, kept: bool) -> None:
    splitter = SampleLineSplitter()
    splitter.split("a", b"x" * size)
    assert splitter.split("a", b"\n") == [b"x" * size if kept else b""]


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(b'{"t":1.0,"attempt":0,"kind":"health"}', id="as nodes write it"),
        pytest.param(b'{"kind": "health", "t": 1.0, "attempt": 0}', id="in another order"),
        pytest.param(b'{"kind":"health","phase":"activity","t":1.0}', id="with the name of another kind in it"),
    ],
)
def test_a_sample_is_of_the_kind_that_it_says_wherever_it_says_so(line: bytes) -> None:
    assert may_be_sample(line, "health")
    assert not list(parse_samples([line], "activity"))
