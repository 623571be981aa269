"""A run whose GPUs do nothing is reported or ended, as the cluster file says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import fake_nvml
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

SLOW = 60.0


@pytest.fixture
def scene(make_head: MakeHead) -> tuple[LocalHead, fake_nvml.Scenario]:
    head = make_head()
    scene = fake_nvml.Scenario(head.folder / "scene.json", 2)
    return type(head)(head.folder, {**head.env, **scene.environment()}), scene


def write(head: LocalHead, action: str) -> None:
    head.write_local(
        {"command": "sleep 600", "grace": "1s"},
        workers=(1,),
        health={"thresholds": {"during.interval": 1}},
        idle={"after": "4s", "action": action},
    )
    text = (head.folder / "cluster.yaml").read_text()
    (head.folder / "cluster.yaml").write_text(text.replace("gpus: 0", "gpus: [1]"))


def test_a_run_with_idle_gpus_is_ended_with_a_code_of_its_own(scene: tuple[LocalHead, fake_nvml.Scenario]) -> None:
    head, gpus = scene
    gpus.gpu(0, util=90)  # not a GPU of the run
    write(head, "end")

    done = head.run("up", "--no-health")
    why = head.run("why")

    assert done.returncode == 107, done.stderr
    assert "idle GPUs: stopping every worker (no GPU has done anything for " in done.stderr
    assert "its GPUs were idle" in head.run("ps", "-a").stdout
    assert "no GPU has done anything for " in why.stdout


def test_a_run_with_idle_gpus_is_reported_until_a_gpu_works(scene: tuple[LocalHead, fake_nvml.Scenario]) -> None:
    head, gpus = scene
    write(head, "report")
    run = head.start()
    try:
        wait_for(lambda: head.json("status", run)["idle_since"], SLOW, "the report", 0.5)
        shown = head.run("status", run).stdout
        gpus.gpu(1, util=50)
        wait_for(lambda: head.json("status", run)["idle_since"] is None, SLOW, "its end", 0.5)
        state = head.json("status", run)["state"]
    finally:
        head.run("down", run)

    assert "idle: no GPU of the run has done anything for " in shown
    assert state == "running"
