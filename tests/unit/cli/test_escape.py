"""How a person leaves a terminal that does not answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.cli.interactive.escape import Typed, sift


def typed(*pieces: bytes) -> tuple[bytes, bool]:
    """What goes to the node of what was typed in pieces, and whether the person left."""
    state, passed = Typed(), b""
    for piece in pieces:
        state, more, leaves = sift(state, piece)
        passed += more
        if leaves:
            return passed, True
    return passed, False


@pytest.mark.parametrize(
    ("pieces", "passed", "leaves"),
    [
        pytest.param([b"~."], b"", True, id="at the very beginning"),
        pytest.param([b"ls\r~."], b"ls\r", True, id="at the beginning of a line"),
        pytest.param([b"ls\r", b"~", b"."], b"ls\r", True, id="key by key"),
        pytest.param([b"ls\n~.rest"], b"ls\n", True, id="what follows is nobody's"),
        pytest.param([b"ls ~."], b"ls ~.", False, id="within a line"),
        pytest.param([b"~~."], b"~.", False, id="two are one"),
        pytest.param([b"~/bin\r"], b"~/bin\r", False, id="a path"),
        pytest.param([b"~\r~."], b"~\r", True, id="a line of a tilde alone"),
        pytest.param([b"~x\r~."], b"~x\r", True, id="after a line that began with one"),
        pytest.param([b"~"], b"", False, id="kept back until the next key"),
    ],
)
def test_leaving(pieces: list[bytes], passed: bytes, leaves: bool) -> None:
    assert typed(*pieces) == (passed, leaves)


@given(st.binary().filter(lambda data: b"~" not in data), st.integers(0, 100))
def test_without_a_tilde_everything_passes_however_it_is_cut(data: bytes, at: int) -> None:
    assert typed(data[:at], data[at:]) == (data, False)


@given(st.lists(st.sampled_from([b"~", b".", b"\r", b"a", b"\n"])))
def test_pieces_make_no_difference(keys: list[bytes]) -> None:
    assert typed(*keys) == typed(b"".join(keys))
