"""JSON without `json`: the same words, read and written."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.agent.protocol import quick

if TYPE_CHECKING:
    from collections.abc import Callable

TEXTS = st.text(st.characters(codec=None), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
ALMOST = [
    "",
    " ",
    "{",
    "[1,]",
    "1 2",
    "nul",
    '"a',
    "\ufeff1",
    "{1:2}",
    "'a'",
    "[1]x",
    '"\n"',
    "01",
    "+1",
    "--1",
    "\x0b1",
]


def refuses(read: Callable[[str], Any], text: str) -> bool:
    try:
        read(text)
    except ValueError:
        return True
    return False


@given(VALUES)
def test_values_are_written_as_json_writes_them(value: Any) -> None:
    assert quick.dumps(value) == json.dumps(value, separators=(",", ":"))
    assert quick.dumps(value, ascii_only=False) == json.dumps(value, separators=(",", ":"), ensure_ascii=False)


@given(VALUES, st.sampled_from(["", " ", "\r\n\t"]))
def test_values_are_read_as_json_reads_them(value: Any, blanks: str) -> None:
    text = blanks + json.dumps(value, indent=1) + blanks

    assert quick.loads(text) == quick.loads(text.encode()) == json.loads(text)


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", "-Infinity", "1e999", "-0", "1E5"])
def test_numbers_that_only_some_know_are_read_as_json_reads_them(text: str) -> None:
    assert repr(quick.loads(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ALMOST, ids=ascii)
def test_what_json_refuses_is_refused(text: str) -> None:
    assert [refuses(read, text) for read in (json.loads, quick.loads)] == [True, True]


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000], ids=["lists", "objects"])
def test_what_is_nested_too_deeply_is_refused_as_json_refuses_it(deep: str) -> None:
    with pytest.raises(RecursionError):
        quick.loads(deep)


def test_what_json_has_not_is_not_written() -> None:
    with pytest.raises(TypeError, match="a set is nothing that JSON has"):
        quick.dumps({"a": {1}})


def test_a_python_without_the_parts_in_c_says_the_same() -> None:
    script = (
        "import sys; sys.modules['_json'] = None\n"
        "from clusterctl.agent.protocol import quick\n"
        'value = quick.loads(\' [1, {"k": "\\u00e9"}] \')\n'
        "print(ascii([value, quick.dumps(value), quick.dumps(value, ascii_only=False)]))\n"
        "for text in ('1 2', '', '{'):\n"
        "    try: print(quick.loads(text))\n"
        "    except ValueError: print('refused')\n"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == [
        ascii([[1, {"k": "é"}], '[1,{"k":"\\u00e9"}]', '[1,{"k":"é"}]']),
        "refused",
        "refused",
        "refused",
    ]
