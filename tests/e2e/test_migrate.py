"""Each cluster file of docs/migrate.md is valid, and trains a script that only knows the variables of torchrun."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from tests.lab.head_cli import Head

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migrate.md").read_text()
EXAMPLES = {yaml.safe_load(text)["name"]: text for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)}
SCRIPT = """\
import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "NCCL_DEBUG", "LOADED")
print(json.dumps({"argv": sys.argv[1:], **{name: os.environ.get(name) for name in names}}), flush=True)
"""


@pytest.fixture
def head(tmp_path: Path) -> Head:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / ".deepspeed_env").write_text("NCCL_DEBUG=WARN\n")
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state")}
    return Head(folder, env)


@pytest.mark.parametrize(
    ("name", "argv", "told"),
    [
        pytest.param("from-torchrun", ["--epochs", "3"], {}, id="torchrun"),
        pytest.param(
            "from-deepspeed", ["--deepspeed", "--deepspeed_config", "ds.json"], {"NCCL_DEBUG": "WARN"}, id="deepspeed"
        ),
        pytest.param("from-slurm", [], {"LOADED": "cuda/12.4"}, id="slurm"),
    ],
)
def test_an_example_is_valid_and_trains(head: Head, name: str, argv: list[str], told: dict[str, str]) -> None:
    path = head.folder / "cluster.yaml"
    path.write_text(EXAMPLES[name])
    checked = head.run("config", "-q")
    document = yaml.safe_load(EXAMPLES[name])
    # The same job on this machine, which has no `module`.
    document["hosts"] = [{"host": host, "workers": 2, "gpus": 0, "transport": "local"} for host in ("gpu01", "gpu02")]
    document["defaults"] = {"python": sys.executable}
    if "prologue" in document["job"]:
        document["job"]["prologue"] = 'module() { export LOADED="$2"; }\n' + document["job"]["prologue"]
    path.write_text(yaml.safe_dump(document))

    done = head.run("up", "--no-health", "--all-ranks")

    assert checked.returncode == 0, checked.stderr
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if "{" in line]
    assert sorted(line["RANK"] for line in lines) == ["0", "1", "2", "3"]
    assert all(line["argv"] == argv and line["WORLD_SIZE"] == "4" and line["MASTER_PORT"] for line in lines)
    assert all({name: line[name] for name in told} == told for line in lines)


def test_every_example_of_the_page_is_tried() -> None:
    assert set(EXAMPLES) == {"from-torchrun", "from-deepspeed", "from-slurm"}
