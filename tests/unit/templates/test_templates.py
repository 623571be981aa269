"""What every template promises without being run: files that load, flags that exist, a place in the documentation."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from clusterctl.config.loader import load_cluster_file
from clusterctl.config.spec import ClusterSpec
from tests import recipes

REPOSITORY = Path(__file__).resolve().parents[3]
TEMPLATES = sorted(path.parent for path in REPOSITORY.glob("templates/*/cluster.yaml"))
EVERY = pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
SCRIPTS = pytest.mark.parametrize(
    "template", [path for path in TEMPLATES if (path / "train.py").is_file()], ids=lambda path: path.name
)


def spec_of(path: Path) -> ClusterSpec:
    return load_cluster_file([path], environ={}, require_job=True).spec


@EVERY
def test_its_cluster_file_runs_it_on_this_machine_and_names_its_framework(template: Path) -> None:
    spec = spec_of(template / "cluster.yaml")

    assert spec.job is not None
    assert (spec.job.script == "train.py") == (template / "train.py").is_file()
    assert spec.job.framework.value != "auto"
    assert {host.transport.value for host in spec.hosts} == {"local"}


@EVERY
def test_its_cluster_file_for_real_machines_loads_as_well(template: Path, tmp_path: Path) -> None:
    text = (template / "cluster.yaml").read_text()
    above, _, below = text.partition("# The same on")
    real = "\n".join(line[2:] for line in below.splitlines()[1:] if line.startswith("# "))
    real = yaml.safe_load(real)
    merged = yaml.safe_load(above) | real
    for key in ("job", "defaults"):
        merged[key] = yaml.safe_load(above).get(key, {}) | real.get(key, {})
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(merged))
    (tmp_path / "train.py").touch()

    spec = spec_of(tmp_path / "cluster.yaml")

    assert all(host.transport.value == "ssh" and host.gpus for host in spec.hosts)


@SCRIPTS
def test_its_page_names_only_flags_that_its_script_has(template: Path) -> None:
    page, script = (template / "README.md").read_text(), (template / "train.py").read_text()
    # In the block of commands: what follows `--` of clusterctl, or the script.
    lines = [line for line in page.splitlines() if re.match(r"(clusterctl up|python train.py)", line)]
    typed = [re.split(r" -- |train\.py", line.partition("#")[0], maxsplit=1)[-1] for line in lines]
    flags = {word for text in typed for word in shlex.split(text) if word.startswith("--")}
    quoted = set(re.findall(r"`(--[a-z-]+)", page))

    missing = [flag for flag in sorted(flags | quoted) if f'"{flag}"' not in script]

    assert not missing


@pytest.mark.parametrize("name", sorted({*(recipe.template for recipe in recipes.RECIPES), *recipes.SERVERS}))
def test_a_recipe_is_short_and_its_page_is_one_screen_that_says_what_to_change(name: str) -> None:
    template = REPOSITORY / "templates" / name
    own = [path for path in template.iterdir() if path.name not in ("README.md", "cluster.yaml", ".gitignore")]
    lines = [line for path in own for line in path.read_text().splitlines()]
    page = (template / "README.md").read_text()

    assert len([line for line in lines if line.strip() and not line.lstrip().startswith("#")]) <= 60
    assert len(page.splitlines()) <= 40
    assert "\n## Your own " in page


def test_every_template_with_a_restart_is_tested_as_a_recipe_or_by_a_test_of_its_own() -> None:
    restarting = {path.name for path in TEMPLATES if spec_of(path / "cluster.yaml").restart.max_restarts}

    tested = {*(recipe.template for recipe in recipes.RECIPES), *recipes.SERVERS, "checkpoint_resume"}
    assert restarting == tested


@EVERY
def test_the_page_of_workloads_has_it(template: Path) -> None:
    page = (REPOSITORY / "docs" / "workloads.md").read_text()
    assert f"| [{template.name}](../templates/{template.name}/README.md) |" in page
