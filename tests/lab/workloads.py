"""Templates on lab nodes: what a user copies, with the lab's hosts in place of this machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.documented import typed
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.lab.head_cli import Head
    from tests.lab.node import Node

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
LONG = 400.0
"""Seconds that a run with a framework may take on a machine that has other things to do."""

_ALONE = textwrap.dedent("""
    import json, runpy, sys
    for path, arguments in json.loads(sys.argv[1]):
        sys.argv = [path, *arguments]
        print("---", path, flush=True)
        runpy.run_path(path, run_name="__main__")
""")


def copy(head: Head, template: str, hosts: Sequence[Mapping[str, Any]], **more: Any) -> None:
    """Put a template into the head's folder as `clusterctl init` does, with these hosts."""
    done = head.run("init", "--template", template, "--force")
    assert done.returncode == 0, done.stderr
    path = head.folder / "cluster.yaml"
    document = yaml.safe_load(path.read_text())
    env = {"OMP_NUM_THREADS": "1", **document.pop("env", {}), **more.pop("env", {})}
    path.write_text(yaml.safe_dump({**document, "name": template, "hosts": list(hosts), "env": env, **more}))


def workers(nodes: Sequence[Node], count: int = 2, **more: Any) -> list[dict[str, Any]]:
    """Return these nodes as hosts with CPU workers."""
    return [{"host": node.name, "gpus": 0, "workers": count, **more} for node in nodes]


def alone(
    folder: Path,
    *runs: tuple[str, Sequence[str]],
    python: str = sys.executable,
    env: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Run templates one after the other in one process without a launcher; return what each said."""
    asked = [(str(TEMPLATES / name / "train.py"), list(arguments)) for name, arguments in runs]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch", **(env or {})}
    done = subprocess.run(
        [python, "-c", _ALONE, json.dumps(asked)],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    parts = done.stdout.split("--- ")[1:]
    return {name: part for (name, _), part in zip(runs, parts, strict=True)}


def by_hand(folder: Path) -> str:
    """Run the script of a template without a launcher, as its page says; return what it says."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KERAS_BACKEND": "torch"}
    done = subprocess.run(
        [sys.executable, *typed("python train.py")],
        cwd=folder, env=env, capture_output=True, text=True, timeout=LONG, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(text: str) -> list[float]:
    """Return the loss of each epoch."""
    return [float(found) for found in re.findall(r"epoch \d+/\d+  loss ([\d.]+)", text)]


def accuracy(text: str) -> float:
    """Return the accuracy at the end."""
    return float(re.findall(r"(?:test accuracy|accuracy) ([\d.]+)", text)[-1])


def nothing_left(made: Sequence[Node]) -> None:
    """Agents and supervisors take their leave a moment after the run's end; workers must be gone by then."""
    wait_for(lambda: not any(n.leftovers() for n in made), 30.0, what=f"{[n.leftovers() for n in made]} to be gone")
