"""torch's own analyser of flight-recorder dumps, beside which `why` is set (`python -m tests.lab.why.compare`)."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.documented import REPOSITORY, typed
from tests.lab.why import compare, dumps, rivals
from tests.unit.why.test_rivals import FOUR, of_raw, raw

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]


@pytest.mark.parametrize("named", [True, False], ids=["with the name of the group", "as gloo writes them"])
def test_torchs_analyser_says_the_same_from_here_as_from_its_command(tmp_path: Path, named: bool) -> None:
    made = dumps.of_case(of_raw())
    for rank, dump in raw().items():
        known = {**dump, "pg_config": made[rank]["pg_config"]} if named else dump
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(known))
    command = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace", str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    here = rivals.torch_says(made if named else dumps.nameless(made), list(FOUR), 4)

    if named:
        assert rivals.first_named(told.stderr.splitlines()) == here.ranks == {2}
    else:
        assert "KeyError" in told.stderr
        assert here.trouble.startswith("KeyError")


def test_of_a_kept_run_a_row_tells_what_each_says_and_of_one_without_dumps_that_there_is_none() -> None:
    hang, crash = (compare.row_of(compare.KEPT / f"{name}.tar.gz") for name in ("skips_one-3", "raises-3"))

    assert [answer.right for answer in hang.answers] == [True, False, False, False]
    assert hang.as_gloo_writes == "KeyError"
    assert [answer.judged for answer in crash.answers] == [True, False, False, False]
    assert compare.table([hang])[2].startswith("| `skips_one` | 3 | **3 `MISMATCH`, certain** |")
    assert compare.sums([hang, crash])[2:6] == [
        "| why | 2 | 2 of 2 | 0 | 0 |",
        "| torch | 1 | 0 of 1 | 1 | 0 |",
        "| NVRx | 1 | 0 of 1 | 0 | 1 |",
        "| Ray | 1 | 0 of 1 | 0 | 1 |",
    ]


def test_the_command_prints_the_table_and_the_sums_of_a_folder(tmp_path: Path) -> None:
    shutil.copy(compare.KEPT / "sleeps-0.tar.gz", tmp_path)
    words = [*typed("python -m tests.lab.why.compare"), "--bundles", str(tmp_path)]
    told = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=100
    )

    assert told.returncode == 0, told.stderr
    assert "| `sleeps` | 0 | **0 `NOT_JOINED`, certain** | **0** | **0** | **0** |" in told.stdout
    assert "| torch | 1 | 1 of 1 | 0 | 0 |" in told.stdout
