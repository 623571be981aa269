"""The recipes among the templates: how the tests run each of them, and kill one of its ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml

from tests.lab.head_cli import Head
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

TEMPLATES: Final = Path(__file__).resolve().parents[1] / "templates"


@dataclass(frozen=True)
class Recipe:
    """A template that a person copies to begin a task.

    Attributes:
        template: The name of its folder.
        environment: The name of the virtual environment; several recipes may share one.
        installs: The requirements of each call of pip; without any, the recipe runs in the environment of the tests.
        resumed: What the job prints in an attempt that continues, with the step as a group.
        killed: What the command line of the process begins with that the test kills; if empty, the rank itself.
    """

    template: str
    resumed: str
    environment: str = ""
    installs: Sequence[Sequence[str]] = ()
    killed: str = ""


HUGGING_FACE: Final = (("transformers==5.*", "accelerate==1.*", "datasets==5.*", "trl==1.*"), ("deepspeed==0.19.*",))
OF_TRAINER: Final = r"resumes from checkpoints/checkpoint-(\d+)"

RECIPES: Final = (
    Recipe("pretrain_fsdp", r"rank 0 resumes at step (\d+)"),
    Recipe("finetune_transformers", OF_TRAINER, "hugging_face", HUGGING_FACE),
    Recipe("trl_sft", OF_TRAINER, "hugging_face", HUGGING_FACE),
    Recipe("trl_grpo", OF_TRAINER, "hugging_face", HUGGING_FACE),
    Recipe("accelerate_deepspeed", r"rank 0 resumes at step (\d+)", "hugging_face", HUGGING_FACE),
    Recipe("lightning", r"Restored all states .*step-(\d+)", "lightning", (("lightning==2.6.*",),)),
    Recipe("keras_jax", r"rank 0 resumes at epoch (\d+)", "keras_jax", (("jax==0.10.*",),)),
    Recipe("ray", r"resumed at round (\d+)", "ray", (("ray==2.*",),), killed="raylet/raylet"),
    Recipe("mpi", r"resumed at step (\d+)", "mpi", (("mpi4py==4.*",),), killed="python3 work.py"),
)
SERVERS: Final = ("serve_vllm",)
"""Recipes whose job does not end by itself."""


def write_cluster_file(
    head: Head, template: str, hosts: Sequence[Mapping[str, Any]] | None = None, **more: Any
) -> None:
    """Copy a template as `clusterctl init` does; put these hosts and keys into its cluster file."""
    done = head.run("init", "--template", template, "--force")
    assert done.returncode == 0, done.stderr
    path = head.folder / "cluster.yaml"
    document = yaml.safe_load(path.read_text())
    hosts = hosts or document["hosts"]
    for key in ("defaults", "env"):
        more[key] = {**document.get(key, {}), **more.get(key, {})}
    path.write_text(yaml.safe_dump({**document, "hosts": list(hosts), **more}))


def kill_rank_after_checkpoint(
    head: Head, recipe: Recipe, folder: Path, kill: Callable[[Mapping[str, Any]], object], patience_s: float
) -> str:
    """Run a recipe, kill its last rank as soon as a checkpoint exists, and return the output of rank 0.

    Args:
        head: A head whose cluster file is that of the recipe.
        recipe: The recipe.
        folder: The work folder, which all nodes share.
        kill: Kills the process of a worker, which is given as `status --json` has it.
        patience_s: Seconds for each step.

    Raises:
        AssertionError: The run did not succeed in its second attempt, or did not continue from a checkpoint.
    """
    pattern = yaml.safe_load((head.folder / "cluster.yaml").read_text())["job"]["checkpoint"]["pattern"]
    run = head.json("up", "-d", "--no-health", timeout=patience_s)["run"]

    victim = head.json("status", run)["workers"][-1]
    ended = Head.start(head, "wait", run)
    wait_for(lambda: any(folder.glob(pattern)) or ended.poll() is not None, patience_s, f"a checkpoint {pattern}", 0.2)
    kill(victim)
    _, error = ended.communicate(timeout=patience_s)

    output = head.run("logs", run, "--rank", "0", "-n", "100000", "--format", "raw").stdout
    status = head.json("status", run)
    assert ended.returncode == 0, error + output[-4000:]
    assert (status["state"], status["attempt"]) == ("succeeded", 1), output[-4000:]
    resumed = re.search(recipe.resumed, output)
    assert resumed, output[-4000:]
    assert int(resumed[1]) > 0, output[-4000:]
    return output
