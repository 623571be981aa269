"""Runs inside a real allocation of Slurm: its nodes, its steps, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.documented import typed
from tests.lab.slurm import Slurm
from tests.lab.waiting import wait_for


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
    job = slurm.submit("clusterctl up --no-health --all; echo code $?", "-N2", "--ntasks-per-node=2")
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
    job = slurm.submit("clusterctl up --no-health --all; echo code $?", "-N2")
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
    assert "this is inside a step of Slurm" in said
    assert "code 3" in said


PATIENT = 'trap "echo asked to end; exit 0" TERM; echo began $RANK; while :; do sleep 0.2; done'


def exported(slurm: Slurm, hosts: str, job: str, *options: str) -> str:
    """Hand in what `export slurm` makes of a file; return the job's id once its workers have begun."""
    text = f"version: 1\nname: exported\nhosts: {hosts}\nsync: none\njob: {{command: '{job}', grace: 5s}}\n"
    (slurm.root / "cluster.yaml").write_text(text)
    argv = [sys.executable, "-m", "clusterctl", *typed("clusterctl export slurm cluster.yaml")]
    script = subprocess.run(argv, cwd=slurm.root, env=slurm.env, capture_output=True, text=True, check=True).stdout
    job_id = slurm.submit(script, *options)
    wait_for(lambda: "began 0" in slurm.output(job_id), 60.0, what=f"the workers of {script}")
    return job_id


def exit_code(slurm: Slurm, job: str) -> str:
    shown = slurm.ask("scontrol", "show", "job", "-o", job).split()
    return next(word.partition("=")[2] for word in shown if word.startswith("ExitCode="))


def test_an_exported_script_ends_its_run_in_order_when_it_is_cancelled(slurm: Slurm) -> None:
    job = exported(slurm, '{"gpu[01-02]": {gpus: 0, workers: 2}}', PATIENT)
    slurm.ask("scancel", job)
    state, said = slurm.wait(job)
    assert (state, exit_code(slurm, job)) == ("CANCELLED", "103:0"), said
    wait_for(lambda: not slurm.ask("squeue", "-h", "-s"), what="no step to be left")


def test_an_exported_script_ends_its_run_in_order_before_the_time_limit(slurm: Slurm) -> None:
    job = exported(slurm, '{"gpu[01-02]": 0}', PATIENT, "--time=1", "--signal=B:USR1@20")
    state, said = slurm.wait(job)
    assert (state, exit_code(slurm, job)) == ("FAILED", "106:0"), said
    assert "cancelled" in said


def test_an_exported_script_passes_on_how_its_run_ended(slurm: Slurm) -> None:
    job = exported(slurm, '{"gpu[01-02]": 0}', "echo began $RANK; exit 3")
    state, said = slurm.wait(job)
    assert (state, exit_code(slurm, job)) == ("FAILED", "100:0"), said
