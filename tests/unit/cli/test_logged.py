from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.agent.protocol.run_files import format_output_path
from clusterctl.cli.commands.logs import explain_missing_output, parse_existing_ranks, validate_attempt
from clusterctl.errors import NotFoundError
from clusterctl.logs.log_line import LogQuery
from clusterctl.run.record.rundir import RunDir
from clusterctl.run.rules.state import RunState

STATE = RunState(run="r-1", attempt=1, placements=((0, "a", (0, 1)), (0, "b", (2, 3)), (1, "a", (0, 1))))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of which rank 1 has written something."""
    folder = RunDir(tmp_path / "r-1")
    path = folder.node("a") / format_output_path(0, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"hello\n")
    return folder


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        pytest.param(None, None, id="no choice"),
        pytest.param("0", frozenset({0}), id="one of now"),
        pytest.param("2-3", frozenset({2, 3}), id="of an earlier attempt"),
    ],
)
def test_ranks_that_were_ever_there_can_be_asked_for(text: str | None, asked: frozenset[int] | None) -> None:
    assert parse_existing_ranks(STATE, text) == asked


def test_a_rank_that_never_was_is_not_met_with_silence() -> None:
    with pytest.raises(NotFoundError, match="no rank 4,9 in r-1") as caught:
        parse_existing_ranks(STATE, "3-4,9")
    assert caught.value.hint == "its ranks are 0-3"


def test_an_attempt_that_never_was_is_not_met_with_silence() -> None:
    assert validate_attempt(STATE, 1) == 1
    with pytest.raises(NotFoundError, match="no attempt 2 in r-1") as caught:
        validate_attempt(STATE, 2)
    assert caught.value.hint == "its attempts are 0-1"
    with pytest.raises(NotFoundError) as caught:
        validate_attempt(replace(STATE, attempt=0), 2)
    assert caught.value.hint == "its only attempt is 0"


@pytest.mark.parametrize(
    ("state", "query", "said"),
    [
        pytest.param(RunState(run="r-1"), LogQuery(), "has started no worker", id="never started"),
        pytest.param(STATE, LogQuery(ranks=frozenset({0})), "rank 0 wrote nothing; 1 rank of r-1 wrote", id="another"),
        pytest.param(STATE, LogQuery(ranks=frozenset({1})), "no line matches", id="filtered"),
    ],
)
def test_it_is_said_why_there_is_nothing_to_show(run: RunDir, state: RunState, query: LogQuery, said: str) -> None:
    assert said in explain_missing_output(run, state, query)


def test_of_a_run_without_any_output_just_that_is_said(tmp_path: Path) -> None:
    assert explain_missing_output(RunDir(tmp_path / "r-1"), STATE, LogQuery()) == "no rank of r-1 has written anything"
