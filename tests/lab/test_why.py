"""`clusterctl why` of real runs: one that hangs in a collective, one that fails. `make why` plays every kind."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from tests.lab.why.kinds import CONTROLS, KINDS
from tests.lab.why.play import JOB, PER_NODE, PROGRAM, Told, play

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.lab import Lab

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

PLAYED = ("skips_one", "raises_in_a_library")


@pytest.fixture(scope="module")
def told(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Told]]:
    base = tmp_path_factory.mktemp("why")
    env = lab.head_env(XDG_STATE_HOME=str(base / "state"))
    made = lab.add(2 * len(PLAYED))
    with ThreadPoolExecutor(len(PLAYED)) as pool:
        begun = {
            kind: pool.submit(play, kind, random.randrange(2 * PER_NODE), base / kind, env, made[2 * i : 2 * i + 2])
            for i, kind in enumerate(PLAYED)
        }
    yield {kind: future.result() for kind, future in begun.items()}
    lab.remove(made)
    lab.end_head_processes()


@pytest.mark.parametrize("kind", PLAYED)
def test_who_did_it_and_what_it_was_is_said(told: dict[str, Told], kind: str) -> None:
    assert told[kind].exact and told[kind].classed, json.dumps(told[kind].verdict)  # noqa: PT018 - one line tells both
    assert told[kind].confidence == "certain"


def test_the_job_has_a_function_for_each_kind_that_starts() -> None:
    text = JOB.read_text()
    plain = [kind for kind, expected in KINDS.items() if not expected.more and not expected.command]

    assert [kind for kind in (*plain, *CONTROLS) if f"def {kind}(" not in text] == []


def test_the_programs_have_a_function_for_each_kind_that_names_one() -> None:
    texts = {script.name: script.read_text() for script in (JOB, PROGRAM)}
    named = [expected.command for expected in KINDS.values() if expected.command]

    assert [(script, name) for script, *names in named for name in names if f"def {name}(" not in texts[script]] == []
