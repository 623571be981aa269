"""What a cluster file is for other programs."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from clusterctl.config.spec import CheckpointSpec, ClusterSpec, HostSpec, JobSpec, Role
from clusterctl.render.exports import slurm


def spec_of(*hosts: HostSpec, **job: object) -> ClusterSpec:
    wanted = hosts or (HostSpec(name="a", host="a", gpus=0), HostSpec(name="b", host="b", gpus=0))
    return ClusterSpec(name="llm", path="/p/cluster.yaml", hosts=wanted, job=JobSpec(script="t.py", **job))  # type: ignore[arg-type]


def exported(spec: ClusterSpec, *sets: str) -> str:
    return slurm.script(spec, folder="/p/my jobs", files=["/p/my jobs/cluster.yaml"], sets=sets)


def host(name: str, **more: object) -> HostSpec:
    return HostSpec(name=name, host=name, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        pytest.param(spec_of(), "#SBATCH --nodes=2", id="nodes"),
        pytest.param(spec_of(host("a", gpus=8), host("b", gpus=(0, 1))), "#SBATCH --gpus-per-node=8", id="gpus"),
        pytest.param(spec_of(host("a", gpus=0, workers=4)), "#SBATCH --ntasks-per-node=4", id="workers"),
        pytest.param(spec_of(max_duration=3600.0, grace=30.0), "#SBATCH --time=62", id="limit"),
        pytest.param(spec_of(grace=30.0), "#SBATCH --signal=B:USR1@90", id="grace"),
        pytest.param(spec_of(host("a")), "# The file leaves the GPUs open", id="open"),
        pytest.param(spec_of(host("a", gpus=0), host("b", role=Role.SPARE)), "# Spares of the file", id="spares"),
        pytest.param(spec_of(host("a", gpus=0, user="ann")), "# What the file says of ways", id="ways"),
    ],
)
def test_the_batch_script_asks_for_what_the_file_has(spec: ClusterSpec, line: str) -> None:
    assert any(found.startswith(line) for found in exported(spec).splitlines())


def test_the_batch_script_is_one_that_bash_reads_whatever_the_names() -> None:
    text = exported(replace(spec_of(), name="llm"), "env.A=it's $(id)")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    assert """'env.A=it'"'"'s $(id)'""" in text
    assert "cd '/p/my jobs'" in text


def test_a_requeued_job_goes_on_from_the_checkpoints_of_the_one_before() -> None:
    text = exported(spec_of(checkpoint=CheckpointSpec(pattern="ckpt/*")))
    assert "${SLURM_RESTART_COUNT:+--set job.checkpoint.resume=any}" in text
    assert "SLURM_RESTART_COUNT" not in exported(spec_of())
