from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.shim.file_writer import encode_json
from clusterctl.agent.shim.progress_counters import ProgressCounters, parse_time_limit

_TEXT = st.text(max_size=60)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(_VALUES)
def test_what_is_encoded_reads_back_as_it_was(value):
    assert json.loads(encode_json(value)) == value


def test_what_json_cannot_say_becomes_null_or_text():
    assert json.loads(encode_json([math.nan, math.inf, b"x", object])) == [None, None, "b'x'", str(object)]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        (900, 900.0), (0.5, 0.5), ("90", 90.0), ("90s", 90.0), ("15m", 900.0), ("1h30m", 5400.0),
        ("", None), ("0s", None), (0, None), ("soon", None), ("-5m", None), ("m", None), (None, None),
    ],
)  # fmt: skip
def test_the_limit_of_a_phase(limit, seconds):
    assert parse_time_limit(limit) == seconds


def test_with_several_optimizers_the_step_is_that_of_the_busiest():
    state, one, other = ProgressCounters(), object(), object()
    for optimizer in (one, other, one, other, one):
        state.count_optimizer_step(optimizer, (), {})
    assert (state.step, state.beats) == (3, 5)


def test_what_the_user_says_wins_over_what_is_counted():
    state = ProgressCounters()
    state.count_step("keras")
    state.store_report(500, {})
    state.count_step("keras")
    assert (state.step, state.source) == (500, "user")


def test_a_step_that_is_no_number_is_said_and_not_raised():
    state = ProgressCounters()
    state.store_report("many", {})  # type: ignore[arg-type]
    assert state.beats == 1
    assert "progress" in state.degraded


def test_of_nested_phases_the_one_that_may_last_longest_counts():
    state = ProgressCounters()
    outer, inner = state.begin_phase("validation", "30m"), state.begin_phase("save", "1m")
    assert state.get_longest_phase() == outer
    state.end_phase(inner)
    state.end_phase(outer)
    assert state.get_longest_phase() is None
