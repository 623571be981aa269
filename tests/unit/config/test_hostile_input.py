"""Whatever stands in a file, parsing ends soon, in bounded memory, with a spec or a readable error."""

from __future__ import annotations

import io
import time
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clusterctl.errors import ConfigError
from clusterctl.render.console import Terminal
from clusterctl.render.error_messages import render_config_error
from tests.unit.config.hostile import LAUGHS, PIECES

if TYPE_CHECKING:
    from collections.abc import Callable

    from clusterctl.config.loader import LoadedClusterFile

NARROW = Terminal(io.StringIO(), colour=False, live=False, unicode=True, width=80)


def _survives(parse_text: Callable[..., LoadedClusterFile], content: bytes | str) -> None:
    wrong = None
    try:
        parse_text(content, require_job=True, with_secrets=True)
    except ConfigError as error:
        wrong = error
    if wrong is not None:
        assert all(line.isprintable() for line in render_config_error(wrong, NARROW))
        assert all(p.line >= 1 and p.column >= 1 for p in wrong.problems)


@given(content=st.binary(max_size=300))
def test_no_bytes_make_parsing_crash(parse_text: Callable[..., LoadedClusterFile], content: bytes) -> None:
    _survives(parse_text, content)


@given(content=st.lists(PIECES, max_size=40).map("".join))
@settings(max_examples=400)
def test_no_mixture_of_yaml_makes_parsing_crash(parse_text: Callable[..., LoadedClusterFile], content: str) -> None:
    _survives(parse_text, content)


@given(content=st.text(max_size=100))
def test_no_text_below_a_key_makes_parsing_crash(parse_text: Callable[..., LoadedClusterFile], content: str) -> None:
    _survives(parse_text, f"version: 1\nhosts: gpu01\nname: {content}\n")


MERGED_LAUGHS = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{p: *a{i - 1}, q: *a{i - 1}, <<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(LAUGHS, "more than 50000 values", id="billion_laughs"),
        pytest.param(MERGED_LAUGHS, "", id="laughs_by_merge_keys"),
        pytest.param("[" * 100_000, "nested deeper", id="deep_flow"),
        pytest.param("{a: " * 10_000, "nested deeper", id="deep_mappings"),
        pytest.param("- " * 50_000, "nested deeper", id="deep_block"),
        pytest.param("a: b\n" * 300_000, "too large for a cluster file: more than 1024 KiB", id="too_large"),
        pytest.param("- a\n" * 200_000, "more than 50000 values", id="too_many_values"),
        pytest.param("x: '" + "$${env:a}" * 90_000 + "'\nversion: 1\nhosts: a\n", "", id="many_variables"),
        pytest.param("version: 1\nhosts: " + "a[1-9999]," * 50_000 + "b\n", "more than 10000", id="many_ranges"),
        pytest.param(
            "version: 1\nhosts: gpu01\nnetwork: {master_port: " + "9" * 900_000 + "}\n", "port", id="long_number"
        ),
        pytest.param(
            "version: 1\nhosts: gpu01\njob: {grace: " + "1m" * 400_000 + "}\n", "not a duration", id="long_duration"
        ),
        pytest.param("version: 1\nhosts: [" + "'a[1-9999]'," * 2000 + "]\n", "more than 10000 hosts", id="many_hosts"),
    ],
)
def test_a_hostile_file_is_refused_within_bounds(
    content: str, words: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(ConfigError) as caught:
            parse_text(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert any(words in problem.text for problem in caught.value.problems)
    assert peak < 200 * 1024**2
    assert time.process_time() - began < 60
