from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.validation.node_samples import (
    MAX_LINE_BYTES,
    RankFields,
    SampleLineSplitter,
    may_be_sample,
    parse_samples,
)


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


PROGRESS = RankFields(activity=("alive",), status=("step",))


def activity(**rank: object) -> bytes:
    return json.dumps({"t": 1.5, "m": 2.5, "attempt": 0, "ranks": {"3": rank}, "kind": "activity"}).encode()


def test_a_reader_of_few_fields_gets_these_alone() -> None:
    line = activity(alive=True, pid=7, inside={"step": 4, "pid": 7, "looks": 9})

    (sample,) = parse_samples([line], "activity", fields=PROGRESS)

    ranks = {"3": {"alive": True, "inside": {"step": 4}}}
    assert sample == {"kind": "activity", "t": 1.5, "m": 2.5, "attempt": 0, "ranks": ranks}


@pytest.mark.parametrize(
    ("line", "count"),
    [
        pytest.param(activity(alive=True, inside=None), 1, id="a rank without a status"),
        pytest.param(activity(pid="no number", inside={"step": 4}), 1, id="a bad field that is not read"),
        pytest.param(activity(inside={"step": "\x1b[31m"}), 0, id="a bad field that is read"),
        pytest.param(b'{"ranks":7,"kind":"activity"}', 0, id="ranks that are a number"),
        pytest.param(b'{"ranks":{"3":null},"kind":"activity"}', 0, id="a rank that is null"),
    ],
)
def test_only_the_fields_that_are_read_must_be_valid(line: bytes, count: int) -> None:
    assert len(list(parse_samples([line], "activity", fields=PROGRESS))) == count
