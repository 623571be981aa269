"""Runs inside a real allocation of Slurm: its nodes, its steps, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.documented import typed
from tests.lab.slurm import Slurm
from tests.lab.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    reason = Slurm.unavailable()
    if reason:
        pytest.skip(reason)
    started = Slurm()
    try:
        started.start()
        yield started
    finally:
        started.end()


def write(slurm: Slurm, command: str) -> None:
    (slurm.root / "cluster.yaml").write_text(
        f"version: 1\nname: slurm\nhosts: {{from: slurm}}\nsync: none\njob: {{command: '{command}', grace: 2s}}\n"
    )


def test_a_run_is_made_of_the_nodes_and_tasks_of_the_job_and_leaves_nothing(slurm: Slurm) -> None:
    write(slurm, "echo rank $RANK of $WORLD_SIZE on $SLURMD_NODENAME")
    job = slurm.submit("clusterctl up --no-health --all-ranks; echo code $?", "-N2", "--ntasks-per-node=2")
    state, said = slurm.wait(job)
    assert state == "COMPLETED"
    assert "code 0" in said, said
    for rank, node in enumerate(("s1", "s1", "s2", "s2")):
        assert f"rank {rank} of 4 on {node}" in said
    wait_for(lambda: not slurm.ask("squeue", "-h", "-s"), what="no step to be left")
    assert slurm.processes("srun", "sh", "python3", "python", "clusterctl") == []


def test_every_node_has_all_that_the_job_has_there(slurm: Slurm) -> None:
    write(slurm, "true")
    script = "clusterctl exec -- sh -c 'echo $SLURMD_NODENAME has $SLURM_CPUS_PER_TASK'"
    _, said = slurm.wait(slurm.submit(script, "-N2", "-c3"))
    assert "s1 has 3" in said
    assert "s2 has 3" in said


def test_a_run_outlives_the_steps_that_lead_to_it(slurm: Slurm) -> None:
    write(slurm, f"until [ -e {slurm.root}/go ]; do sleep 0.2; done; echo went on $RANK $$")
    job = slurm.submit("clusterctl up --no-health --all-ranks; echo code $?", "-N2")
    wait_for(lambda: "2/2" in slurm.output(job) and "start" in slurm.output(job), what="the start")
    before = slurm.processes("srun")
    # Each with the child that it has: one that outlives its parent has Slurm end the step.
    for group in {os.getpgid(pid) for pid in before}:
        os.killpg(group, signal.SIGKILL)
    leaders = 2

    def again() -> bool:
        return len([pid for pid in slurm.processes("srun") if pid not in before]) >= leaders

    wait_for(again, 60.0, what="other steps")
    (slurm.root / "go").touch()
    _, said = slurm.wait(job)
    assert "code 0" in said, said
    assert "went on 0" in said
    assert "went on 1" in said


def test_a_step_is_refused(slurm: Slurm) -> None:
    write(slurm, "true")
    _, said = slurm.wait(slurm.submit("srun -n1 -N1 clusterctl exec -- true; echo code $?", "-N2"))
    assert "clusterctl runs in a step of Slurm" in said
    assert "code 3" in said


PATIENT = 'trap "echo asked to end; exit 0" TERM; echo began $RANK; while :; do sleep 0.2; done'
FOUR = '{"gpu[01-04]": {gpus: 0, workers: 2}}'
RANKS = 8


def exported(slurm: Slurm, job: str, *options: str, more: str = "") -> str:
    """Hand in what `export slurm` makes of a file of four nodes with two tasks each; return the id of the job.

    Returns when its workers have begun.
    """
    text = f"version: 1\nname: exported\nhosts: {FOUR}\nsync: none\njob: {{command: '{job}', grace: 5s{more}}}\n"
    (slurm.root / "cluster.yaml").write_text(text)
    argv = [sys.executable, "-m", "clusterctl", *typed("clusterctl export slurm cluster.yaml")]
    script = subprocess.run(argv, cwd=slurm.root, env=slurm.env, capture_output=True, text=True, check=True).stdout
    job_id = slurm.submit(script, *options)
    wait_for(lambda: "began 0" in slurm.output(job_id), 90.0, what=f"the workers of {script}")
    return job_id


def ended(slurm: Slurm, job: str, state: str, code: int) -> str:
    """Return what a job has said that ended like this and left nothing."""
    shown, said = slurm.wait(job)
    told = slurm.ask("scontrol", "show", "job", "-o", job).split()
    assert (shown, f"ExitCode={code}:0" in told) == (state, True), said
    wait_for(lambda: not slurm.left(), what=f"nothing to be left: {slurm.left()}")
    return said


def test_a_run_of_an_exported_script_that_is_cancelled_ends_in_order(slurm: Slurm) -> None:
    job = exported(slurm, PATIENT)
    slurm.ask("scancel", job)
    ended(slurm, job, "CANCELLED", 103)


def test_it_does_before_the_time_limit(slurm: Slurm) -> None:
    job = exported(slurm, PATIENT, "--time=1", "--signal=B:USR1@20")
    assert "cancelled" in ended(slurm, job, "FAILED", 106)


def test_it_passes_on_how_it_ended(slurm: Slurm) -> None:
    ended(slurm, exported(slurm, "echo began $RANK; exit 3"), "FAILED", 100)


def test_a_job_that_is_requeued_goes_on_from_the_newest_checkpoint(slurm: Slurm) -> None:
    work = slurm.root / "work"
    work.mkdir(exist_ok=True)
    writes = f"[ $RANK = 0 ] && echo weights >{work}/step-1; while :; do sleep 0.2; done"
    command = f'echo began $RANK from:$CLUSTERCTL_RESUME_FROM; if [ -z "$CLUSTERCTL_RESUME_FROM" ]; then {writes}; fi'
    checkpoint = f', checkpoint: {{pattern: "step-*", shared: true}}}}\ndefaults: {{workdir: {work}'
    job = exported(slurm, command, "--requeue", more=checkpoint)
    wait_for((work / "step-1").exists, what="a checkpoint")

    slurm.ask("scontrol", "requeue", job)

    said = ended(slurm, job, "COMPLETED", 0)
    assert sum("from:step-1" in line for line in said.splitlines()) == 1, said
    assert "Restarts=1" in slurm.ask("scontrol", "show", "job", "-o", job)


def test_a_slurmd_that_dies_and_comes_back_disturbs_nothing(slurm: Slurm) -> None:
    go = slurm.root / "go-on"
    job = exported(slurm, f"echo began $RANK; until [ -e {go} ]; do sleep 0.2; done")
    slurm.kill_slurmd("s2")
    slurm.start_slurmd("s2")
    go.touch()
    said = ended(slurm, job, "COMPLETED", 0)
    assert "no answer" not in said, said


def test_what_leaves_session_and_environment_dies_with_the_allocation(slurm: Slurm) -> None:
    name = f"stray-of-{slurm.root.name}"
    stray = f'(setsid env -i /bin/bash -c "exec -a {name} /bin/sleep 86400" </dev/null >/dev/null 2>&1 &)'
    job = exported(slurm, f"{stray}; {PATIENT}".replace("'", "''"))
    wait_for(lambda: len(strays(name)) == RANKS, what="a stray of each rank")
    # Nobody is there any more who would sweep.
    for pid in slurm.processes("clusterctl", "python", "python3"):
        os.kill(pid, signal.SIGKILL)
    slurm.wait(job)
    wait_for(lambda: not strays(name) and not slurm.left(), 90.0, what="nothing to be left")


def strays(name: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.read_bytes().startswith(name.encode()):
                found.append(entry.parent.name)
    return found


def test_a_heterogeneous_job_is_refused(slurm: Slurm) -> None:
    write(slurm, "true")
    parts = "#SBATCH -N1\n#SBATCH hetjob\n#SBATCH -N1"
    job = slurm.submit(f"#!/bin/bash\n{parts}\ncd {slurm.root}\nclusterctl exec -- true; echo code $?\n")
    wait_for(lambda: "code" in slurm.output(job), what="the end of the job")
    assert "heterogeneous jobs of Slurm are not supported" in slurm.output(job)
    assert "code 3" in slurm.output(job)


LONG = "CLUSTERCTL_LONG" in os.environ


@pytest.mark.torch
@pytest.mark.timeout(600)
@pytest.mark.skipif(not LONG or find_spec("keras") is None, reason="CLUSTERCTL_LONG=1, and torch and Keras")
def test_the_example_trains_in_an_exported_script(slurm: Slurm) -> None:
    example = yaml.safe_load((REPOSITORY / "cluster.example.yaml").read_text())
    example |= {"hosts": yaml.safe_load(FOUR), "sync": "none", "env": {"OMP_NUM_THREADS": "1"}}
    example["job"]["script"] = str(REPOSITORY / example["job"]["script"])
    (slurm.root / "cluster.yaml").write_text(yaml.safe_dump(example))
    argv = [sys.executable, "-m", "clusterctl", *typed("clusterctl export slurm cluster.yaml")]
    script = subprocess.run(argv, cwd=slurm.root, env=slurm.env, capture_output=True, text=True, check=True).stdout
    job = slurm.submit(script)
    wait_for(lambda: slurm.ask("squeue", "-h", "-j", job) == "", 500.0, what=f"the end of {slurm.output(job)}")
    said = ended(slurm, job, "COMPLETED", 0)
    assert "accuracy" in said
