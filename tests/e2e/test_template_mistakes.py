"""What the templates for torch say of a mistake: one line with the remedy, at the start, on the rank and its node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead

if not all(map(find_spec, ("torch", "keras", "sklearn"))):
    pytest.skip("needs torch, keras and scikit-learn", allow_module_level=True)

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
DAMAGED = "checkpoints/step-00000002"
# One interpreter for all of them, since importing torch takes longer than everything else here.
RUN_ALL = textwrap.dedent("""
    import json, pathlib, runpy, sys
    import torch.distributed as dist

    answers = {}
    for key, path, arguments, edit in json.loads(sys.argv[1]):
        sys.argv = [path, *arguments]
        if edit:
            file, old, new = edit
            file = pathlib.Path(file)
            file.write_text(file.read_text(errors="surrogateescape").replace(old, new), errors="surrogateescape")
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            answers[key] = end.code
        if dist.is_initialized():
            dist.destroy_process_group()
    print("\\n" + json.dumps(answers))
""")
SAVE = ["--steps", "2", "--every", "2", "--min-accuracy", "0"]
RESUME = [*SAVE, "--resume", DAMAGED]
CASES = [
    pytest.param(
        ("torch_ddp", ["--backend", "nccl"], None),
        "error: --backend nccl needs a GPU per worker: 1 workers here, torch sees 0 GPUs; "
        "use --backend gloo, start fewer workers, or install a CUDA build of torch",
        id="nccl-without-gpus",
    ),
    pytest.param(
        ("keras_ddp", ["--backend", "nccl"], None),
        "error: --backend nccl needs a GPU per worker: 1 workers here, torch sees 0 GPUs; "
        "use --backend gloo, start fewer workers, or install a CUDA build of torch",
        id="nccl-without-gpus-in-keras",
    ),
    pytest.param(
        ("torch_ddp", ["--batch-size", "1"], None),
        "error: a batch of 1 cannot be split over 1 ranks x 2 micro-steps; raise --batch-size",
        id="batch-smaller-than-its-parts",
    ),
    pytest.param(
        ("checkpoint_resume", ["--batch-size", "0"], None),
        "error: a batch of 0 leaves some of 1 ranks without data; raise --batch-size",
        id="batch-smaller-than-the-world",
    ),
    pytest.param(
        ("keras_ddp", ["--batch-size", "2000"], None),
        "error: 1437 samples do not fill one batch of 2000 on 1 ranks; lower --batch-size or start fewer workers",
        id="batch-larger-than-the-data",
    ),
    pytest.param(
        ("torch_model_parallel", ["--batch-size", "97", "--mode", "pipeline"], None),
        "error: --batch-size 97 does not divide into 2 micro-batches",
        id="batch-that-does-not-divide",
    ),
    pytest.param(
        ("keras_ddp", ["--data", "mnist"], None),
        "error: MNIST cannot be downloaded: ",
        id="dataset-out-of-reach",
    ),
    pytest.param(
        ("checkpoint_resume", RESUME, (f"{DAMAGED}/about.json", '"world_size": 1', '"world_size": 4')),
        f"error: cannot resume from {DAMAGED}: it is from 4 ranks, this run has 1; start 4 workers, or begin a new run",
        id="checkpoint-of-another-world-size",
    ),
    pytest.param(
        ("checkpoint_resume", [*RESUME, "--sharded"], (f"{DAMAGED}/about.json", '"world_size": 4', '"world_size": 1')),
        f"error: cannot resume from {DAMAGED}: it was written without --sharded; start the job in the same way",
        id="checkpoint-of-another-kind",
    ),
    pytest.param(
        ("checkpoint_resume", RESUME, (f"{DAMAGED}/state.pt", "optimizer", "optimiser")),
        f"error: cannot resume from {DAMAGED}: it is damaged: state.pt has changed; "
        "delete the checkpoint, then the job loads an older one",
        id="checkpoint-torn",
    ),
    pytest.param(
        ("checkpoint_resume", RESUME, (f"{DAMAGED}/about.json", '"step"', "step")),
        f"error: cannot resume from {DAMAGED}: it is incomplete or not a checkpoint",
        id="checkpoint-without-its-description",
    ),
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each mistake is answered with, by template, arguments and damage."""
    folder = tmp_path_factory.mktemp("mistakes")
    asked = [(str(case.values[0]), *case.values[0]) for case in CASES]
    runs = [("saved", "checkpoint_resume", SAVE, None), *asked]
    runs = [(key, str(TEMPLATES / name / "train.py"), arguments, edit) for key, name, arguments, edit in runs]
    nowhere = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "KERAS_HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps(runs)],
        cwd=folder,
        env={**os.environ, **nowhere, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize(("mistake", "answer"), CASES)
def test_a_mistake_is_answered_with_its_remedy(answers: dict[str, str], mistake: object, answer: str) -> None:
    said = answers[str(mistake)]
    assert said.startswith(answer)
    assert "\n" not in said


def test_a_data_set_out_of_reach_is_answered_with_one_that_needs_no_network(answers: dict[str, str]) -> None:
    said = next(text for text in answers.values() if "MNIST" in text)
    assert said.endswith("use --data digits, which needs no network")


def test_the_report_of_a_run_names_the_node_of_a_mistake(head: LocalHead) -> None:
    assert head.run("init", "--template", "torch_ddp").returncode == 0
    head.write_local({"script": "train.py", "framework": "torch"}, (1,))

    done = head.run("up", "--no-health", "--", "--backend", "nccl", timeout=200)

    assert done.returncode == 100, done.stderr
    assert "first observed failure: rank 0 on localhost, exit code 1: error: --backend nccl needs a GPU" in done.stderr


def test_a_framework_that_a_node_lacks_is_named_before_anything_starts(head: LocalHead) -> None:
    head.write_local({"command": ["true"], "framework": "jax"}, (1,))
    assert find_spec("jax") is None, "this test needs an environment without jax"

    done = head.run("up", timeout=200)

    assert done.returncode == 5, done.stderr
    assert "no jax in " in done.stderr
    assert "set `python` of the host to the Python of an environment that has it" in done.stderr
