"""Several runs on the same nodes share nothing, and a refusal names the run that stands in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.lab.head_cli import Head

if TYPE_CHECKING:
    from tests.lab.conftest import NodeFactory

SHOW = """\
import json, os, time
print(json.dumps({**os.environ, "cwd": os.getcwd()}), flush=True)
time.sleep(600)
"""
PRIVATE = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "CLUSTERCTL_RUN_ID", "TORCHELASTIC_ERROR_FILE", "cwd")


def project(tmp_path: Path, env: dict[str, str], name: str, **more: Any) -> Head:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    head = Head(folder, env)
    document = {"version": 1, "name": name, "job": {"script": "show.py", "grace": "1s"}, **more}
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    return head


def start(head: Head) -> str:
    return str(head.json("up", "-d", "--no-health")["run"])


def said(head: Head, run: str) -> list[dict[str, str]]:
    lines = head.run("logs", run, "--all-ranks", "--format", "json").stdout.splitlines()
    return [json.loads(json.loads(line)["text"]) for line in lines]


@pytest.mark.usefixtures("lab")
def test_runs_side_by_side_share_no_port_path_marker_or_gpu_and_refusals_name_the_other(
    nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str]
) -> None:
    first, second = nodes(2)
    names = [first.name, second.name]
    one = project(tmp_path, head_env, "one", hosts=[{"host": n, "gpus": [0, 1], "workers": 2} for n in names])
    two = project(tmp_path, head_env, "two", hosts=[{"host": n, "gpus": [2], "workers": 1} for n in names])
    greedy = project(tmp_path, head_env, "greedy", hosts=[{"host": n, "gpus": [1, 2], "workers": 2} for n in names])

    runs = [start(one), start(two)]
    entries = [said(head, run) for head, run in zip((one, two), runs, strict=True)]
    third = greedy.run("up", "--no-health")

    assert [len(found) for found in entries] == [4, 2]
    for name in PRIVATE:
        mine, theirs = ({entry[name] for entry in found} for found in entries)
        assert not mine & theirs, name
    assert {e["CUDA_VISIBLE_DEVICES"] for e in entries[0]} == {"0,1"}
    assert {e["CUDA_VISIBLE_DEVICES"] for e in entries[1]} == {"2"}
    assert third.returncode == 6, third.stderr
    assert f"GPU 1 is held by run {runs[0]}" in third.stderr

    ended = one.run("down", runs[0])
    assert ended.returncode == 0, ended.stderr
    assert two.json("status", runs[1])["state"] == "running"
    assert [len(n.pids_of("show.py")) for n in (first, second)] == [1, 1]
    fourth = greedy.run("up", "--no-health")
    assert fourth.returncode == 6
    assert f"GPU 2 is held by run {runs[1]}" in fourth.stderr

    assert two.run("down", runs[1]).returncode == 0
    assert greedy.run("up", "-d", "--no-health").returncode == 0
    assert greedy.run("down").returncode == 0


def test_a_sync_that_would_change_files_under_a_live_run_is_refused_and_names_it(
    nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str]
) -> None:
    (made,) = nodes(1)
    hosts = [{"host": made.name, "gpus": 0, "workers": 1, "workdir": "~/shared"}]
    sync = {"exclude": ["cluster.yaml"]}
    one = project(tmp_path, head_env, "one", hosts=hosts, sync=sync)
    same = project(tmp_path, head_env, "same", hosts=hosts, sync=sync)
    run = start(one)

    beside = same.run("up", "-d", "--no-health")
    (same.folder / "show.py").write_text(SHOW + "# changed\n")
    refused = same.run("up", "--no-health")

    assert beside.returncode == 0, beside.stderr
    assert refused.returncode == 6
    assert run in refused.stderr
    assert "`show.py`" in refused.stderr
    assert made.path("shared/show.py").read_text() == SHOW
    assert same.run("down", "--all").returncode == 0
    assert same.run("up", "-d", "--no-health").returncode == 0
    assert made.path("shared/show.py").read_text() == SHOW + "# changed\n"
    assert same.run("down", "--all").returncode == 0


def test_two_checkouts_in_folders_of_one_name_started_at_once_run_each_its_own_code(
    nodes: NodeFactory, tmp_path: Path, head_env: dict[str, str]
) -> None:
    (made,) = nodes(1)
    starts = {}
    for owner in ("ann", "bob"):
        head = Head(tmp_path / owner / "train", head_env)
        head.folder.mkdir(parents=True)
        (head.folder / "show.py").write_text(f"print('the code of {owner}')\n")
        hosts = [{"host": made.name, "gpus": 0, "workers": 1}]
        (head.folder / "cluster.yaml").write_text(
            yaml.safe_dump({"version": 1, "hosts": hosts, "job": {"script": "show.py"}})
        )
        starts[owner] = head.start("up", "--no-health")

    ends = {owner: (*start.communicate(timeout=60), start.returncode) for owner, start in starts.items()}

    for owner, (output, said, code) in ends.items():
        assert code == 0, said
        assert [line for line in output.splitlines() if "the code of" in line and owner not in line] == []
        assert f"the code of {owner}" in output
