"""What a cluster file is for other programs."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterctl.config.loader import LoadedClusterFile, load_cluster_file
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, Role
from clusterctl.errors import RefusedError
from clusterctl.render import export_kubernetes, export_slurm


def spec_of(*hosts: HostSpec, **job: object) -> ClusterSpec:
    wanted = hosts or (HostSpec(name="a", host="a", gpus=0), HostSpec(name="b", host="b", gpus=0))
    return ClusterSpec(name="llm", path="/p/cluster.yaml", hosts=wanted, job=JobSpec(script="t.py", **job))  # type: ignore[arg-type]


def exported(spec: ClusterSpec, *sets: str) -> str:
    return export_slurm.render_batch_script(
        spec, program=("/my venv/bin/clusterctl",), folder="/p/my jobs", files=["/p/my jobs/cluster.yaml"], overrides=sets
    )  # fmt: skip


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
        pytest.param(spec_of(host("a")), "# The file does not set the number of GPUs", id="open"),
        pytest.param(
            spec_of(host("a", gpus=0), host("b", role=Role.SPARE)), "# The script requests no spares", id="spares"
        ),
        pytest.param(spec_of(host("a", gpus=0, user="ann")), "# The connection settings of the file", id="ways"),
    ],
)
def test_the_batch_script_asks_for_what_the_file_has(spec: ClusterSpec, line: str) -> None:
    assert any(found.startswith(line) for found in exported(spec).splitlines())


def test_the_batch_script_is_one_that_bash_reads_whatever_the_names() -> None:
    text = exported(replace(spec_of(), name="llm"), "env.A=it's $(id)")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=True).stderr == ""
    assert """'env.A=it'"'"'s $(id)'""" in text
    assert "cd '/p/my jobs'" in text


def test_the_batch_script_starts_the_program_that_made_it_and_says_so_in_its_first_lines() -> None:
    lines = exported(spec_of()).splitlines()

    assert "'/my venv/bin/clusterctl'" in lines[1]
    assert any(line.startswith("'/my venv/bin/clusterctl' up --file") for line in lines)


def test_the_batch_script_says_which_program_is_missing_where_it_runs() -> None:
    done = subprocess.run(["bash"], input=exported(spec_of()), text=True, capture_output=True, check=False)

    assert done.returncode == 127
    assert "has no /my venv/bin/clusterctl" in done.stdout


def pods(spec: ClusterSpec) -> tuple[Any, Any, Any]:
    """The service, the job, and the container of its pods."""
    assert spec.job is not None
    service, job = yaml.safe_load_all(export_kubernetes.render_manifest(spec, spec.job, image="registry/llm:1"))
    return service, job, job["spec"]["template"]["spec"]["containers"][0]


def test_the_job_has_a_pod_for_each_node_and_they_find_the_first_by_its_name() -> None:
    spec = replace(spec_of(host("a", gpus=8), host("b", gpus=8), max_duration=90.0), name="LLM_one", env={"A": "$(id)"})
    service, job, container = pods(spec)
    assert (service["spec"]["clusterIP"], service["metadata"]["name"]) == ("None", "llm-one")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    assert (job["spec"]["backoffLimit"], job["spec"]["activeDeadlineSeconds"]) == (0, 90)
    assert job["spec"]["template"]["spec"]["subdomain"] == "llm-one"
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (env["MASTER_ADDR"], env["MASTER_PORT"], env["A"]) == ("llm-one-0.llm-one", "29500", "$$(id)")


def test_a_secret_is_named_and_its_value_is_nowhere() -> None:
    spec = replace(spec_of(), secrets={"TOKEN": "s3cret"})
    assert "s3cret" not in export_kubernetes.render_manifest(spec, spec.job, image="i")  # type: ignore[arg-type]
    assert pods(spec)[2]["env"][-1]["valueFrom"] == {"secretKeyRef": {"name": "llm", "key": "TOKEN"}}


def run_pod(spec: ClusterSpec, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what the second pod runs, as its shell gets it from Kubernetes."""
    command = [word.replace("$$(", "$(") for word in pods(spec)[2]["command"]]
    env = {"PATH": os.environ["PATH"], "JOB_COMPLETION_INDEX": "1", "MASTER_ADDR": "x"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(JobSpec(command="echo $RANK $LOCAL_RANK of $WORLD_SIZE on $NODE_RANK $(echo sub)"), id="text"),
        pytest.param(
            JobSpec(command=("bash", "-c", "echo $RANK $LOCAL_RANK of $WORLD_SIZE on $NODE_RANK sub")), id="list"
        ),
        pytest.param(JobSpec(command="echo $RANK $LOCAL_RANK of", prologue="W=1", args=("x",)), id="prologue"),
    ],
)
def test_a_pod_runs_the_workers_of_its_node_with_our_variables(job: JobSpec, tmp_path: Path) -> None:
    hosts = (host("a", gpus=0, workers=2), host("b", gpus=0, workers=2))
    done = run_pod(replace(spec_of(*hosts), job=job), tmp_path)
    tail = "of x" if job.prologue else "of 4 on 1 sub"
    assert sorted(done.stdout.splitlines()) == [f"2 0 {tail}", f"3 1 {tail}"], done.stderr
    assert done.returncode == 0


def test_a_worker_that_fails_ends_its_pod_with_its_code(tmp_path: Path) -> None:
    job = JobSpec(command="if [ $LOCAL_RANK = 1 ]; then exit 7; fi; exec sleep 50")
    spec = replace(spec_of(host("a", gpus=0, workers=2)), job=job)
    assert run_pod(spec, tmp_path).returncode == 7


RICH = """\
version: 1
name: llm
hosts:
  - {host: gpu01, gpus: 4, env: {NCCL_IB_HCA: mlx5_0, A: 1}}
  - {host: gpu02, gpus: 4, env: {NCCL_IB_HCA: mlx5_1, A: 1}, user: ann}
  - {host: gpu03, gpus: 4, role: spare}
defaults: {python: /opt/venv/bin/python}
env: {HF_HOME: /data/hf}
env_file: train.env
secrets: {HF_TOKEN: {env: HF_TOKEN}}
job:
  command: echo
  prologue: module load cuda/12.4
  grace: 2m
  stop_signal: SIGINT
  checkpoint: {pattern: "ckpt/*.pt"}
restart: {max_restarts: 3, never_codes: [2]}
results: [ckpt/best*]
stall: {action: restart}
on_controller_loss: {stop_after: 10m}
"""


@pytest.fixture
def rich(tmp_path: Path) -> LoadedClusterFile:
    (tmp_path / "cluster.yaml").write_text(RICH)
    (tmp_path / "train.env").write_text("WANDB_PROJECT=llm\n")
    return load_cluster_file([tmp_path / "cluster.yaml"], environ={"HF_TOKEN": "s3cret"}, sets=["sync.exclude=[data/]"])


def test_keys_that_do_not_hold_in_pods_are_named(rich: LoadedClusterFile) -> None:
    lost = export_kubernetes.list_unsupported_settings(rich.spec, rich.written_keys)

    dropped, variables, *others = lost
    assert dropped == "not carried over: " + ", ".join(
        f"`{key}`"
        for key in (
            *("hosts[].user", "job.checkpoint", "restart.max_restarts", "restart.never_codes", "results"),
            *("stall.action", "on_controller_loss.stop_after", "sync.exclude"),
        )
    )
    assert variables.endswith(": NCCL_IB_HCA")
    assert [line.partition("`:")[0].strip("`") for line in others] == [
        *("hosts[].role", "defaults.python", "env_file", "job.prologue", "job.stop_signal", "secrets")
    ]
    assert "kubectl create secret generic llm --from-literal=HF_TOKEN=VALUE" in others[-1]
    assert rich.spec.job is not None
    text = export_kubernetes.render_manifest(rich.spec, rich.spec.job, image="i", unsupported=lost)
    assert [line.removeprefix("# ") for line in text.splitlines()[2 : 2 + len(lost)]] == lost
    assert [*yaml.safe_load_all(text)]


def test_variables_that_all_hosts_have_alike_hold_in_pods(rich: LoadedClusterFile) -> None:
    names = {entry["name"]: entry.get("value") for entry in pods(rich.spec)[2]["env"]}
    assert (names["A"], names["HF_HOME"], names["WANDB_PROJECT"]) == ("1", "/data/hf", "llm")
    assert "NCCL_IB_HCA" not in names


def test_keys_of_hosts_that_do_not_hold_in_an_allocation_are_named(rich: LoadedClusterFile) -> None:
    lost = export_slurm.list_unsupported_settings(rich.spec, rich.written_keys)

    assert lost == [
        "not carried over: `hosts[].env`, `hosts[].user`, `hosts[].role`: the nodes are those of the allocation",
        "`secrets`: `HF_TOKEN` must be available on the node that runs the script, as here",
    ]
    text = export_slurm.render_batch_script(
        rich.spec, program=("x",), folder="/p", files=[], overrides=[], unsupported=lost
    )
    assert {f"# {line}" for line in lost} <= {*text.splitlines()}


def test_a_file_that_holds_in_whole_has_nothing_to_name() -> None:
    keys = ("version", "hosts[].host", "hosts[].gpus", "defaults.env", "env", "job.script", "job.args", "job.grace")
    assert (
        export_kubernetes.list_unsupported_settings(spec_of(), keys)
        == export_slurm.list_unsupported_settings(spec_of(), keys)
        == []
    )


def test_unlike_hosts_are_refused_with_the_key_and_how_to_export_the_others() -> None:
    hosts = (host("a", gpus=8), host("b", gpus=4), host("c", gpus=8), host("d", gpus=8, workers=1))
    with pytest.raises(RefusedError, match="`gpus` is 8 on a and 4 on b") as refused:
        pods(spec_of(*hosts))
    assert "`--exclude b`" in str(refused.value.hint)
    with pytest.raises(RefusedError, match="`workers` is auto on a and 1 on d"):
        pods(spec_of(*hosts[::2], hosts[3]))


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        pytest.param([host("a", gpus=8), host("b", gpus=4)], "all pods of a job are equal", id="unlike"),
        pytest.param([host("a")], "does not say how many GPUs", id="open"),
    ],
)
def test_hosts_that_pods_cannot_be_are_refused(hosts: list[HostSpec], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        pods(spec_of(*hosts))


@pytest.mark.parametrize(
    "text", ["\U0001f600", "a\u00e9\u20ac", 'quo"te', "back\\slash \\ud83d", "tab\tline\n", "\x7f\x85\u2028"]
)
def test_the_pods_get_a_text_as_it_is(text: str) -> None:
    _, _, container = pods(replace(spec_of(), env={"A": text}))
    assert {"name": "A", "value": text} in container["env"]


def test_bytes_that_are_no_text_are_refused_by_their_name() -> None:
    with pytest.raises(RefusedError, match="`env.A` contains bytes"):
        pods(replace(spec_of(), env={"A": "\udcff"}))
