"""What `why` sees with each release of torch: hangs with known culprits, in an environment per release.

The environments come from a package index (CUDA builds, up to 6 GB), one at a time. `TORCH_VERSIONS` chooses releases.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.heavy import hanging_job
from tests.heavy.conftest import CACHE
from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(3600)

RELEASES = ["2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1"]
VERSIONS = os.environ.get("TORCH_VERSIONS", " ".join(RELEASES)).split()
RECORDER_OFF = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
FIRST_WITH_GLOO_RECORDER, FIRST_WITH_HOOKS = (2, 8), (2, 14)


@dataclass(frozen=True)
class Answer:
    """What `why` said of one hang."""

    kind: str
    verdict: dict[str, Any]

    @property
    def culprits(self) -> list[int]:
        return [culprit["rank"] for culprit in self.verdict["culprits"]]

    def line(self) -> str:
        named = ",".join(map(str, self.culprits))
        words = "; ".join([self.verdict["summary"], *self.verdict["missing"]])
        return f"{self.kind:<16} {self.verdict['class']:<12} {self.verdict['confidence']:<10} {named:<8} {words}"


@pytest.fixture(scope="module", params=VERSIONS)
def python(request: pytest.FixtureRequest) -> Iterator[Path]:
    """The interpreter of a fresh environment with one release of torch; the environment is removed afterwards."""
    folder = CACHE / f"torch-{request.param}"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*pip, f"torch=={request.param}", "numpy"], check=True)
    yield folder / "bin/python"
    shutil.rmtree(folder)


@pytest.mark.parametrize("env", [{}, RECORDER_OFF], ids=["default", "recorder off"])
def test_why_names_the_rank_that_causes_a_hang(python: Path, tmp_path: Path, env: dict[str, str]) -> None:
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda kind: ask_why(kind, python, tmp_path / kind, env), hanging_job.CULPRITS))

    table = "\n".join(answer.line() for answer in answers)
    print(f"\n{python.parents[1].name} {env}\n{table}")
    release = tuple(map(int, python.parents[1].name.partition("-")[2].split(".")[:2]))
    is_recorded = release >= FIRST_WITH_GLOO_RECORDER and not env
    blind = "sees only the begin" if release >= FIRST_WITH_HOOKS and not is_recorded else None
    for answer in answers:
        named = answer.verdict["confidence"] in ("certain", "likely")
        assert not named or answer.culprits == [hanging_job.CULPRITS[answer.kind]], table
        assert blind is None or any(blind in text for text in answer.verdict["missing"]), table
        assert blind is None or answer.verdict["class"] == "MISMATCH" or answer.verdict["confidence"] != "certain", (
            table
        )
    assert [answer.kind for answer in answers if not answer.culprits] == [], table


def ask_why(kind: str, python: Path, folder: Path, env: dict[str, str]) -> Answer:
    """Run one kind on two local nodes with two ranks each until it is called stalled, and return the verdict."""
    folder.mkdir()
    home = folder / "home"
    home.mkdir()
    shutil.copy(hanging_job.__file__, folder)
    spec = {
        "version": 1,
        "name": kind.replace("_", "-"),
        "hosts": [{"host": "localhost", "transport": "local", "gpus": 0, "workers": 2}] * 2,
        "defaults": {"python": str(python)},
        "job": {"script": "hanging_job.py", "args": [kind], "grace": "1s"},
        "stall": {"timeout": "12s", "startup_timeout": "45s"},
        "env": env,
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(spec))
    head = Head(folder, {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / ".local/state")})
    started = head.run("up", "-d", "--json", "--no-health", timeout=180.0)
    assert started.returncode == 0, started.stderr
    run = json.loads(started.stdout)["run"]
    try:
        wait_for(
            lambda: head.json("status", run)["state"] == "stalled", 300.0, f"{kind} to be called stalled", every=1.0
        )
        return Answer(kind, json.loads(head.run("why", run, "--json").stdout))
    finally:
        head.run("down", "--kill", run, timeout=120.0)
