"""Runs in containers of the real podman: as without, and no container remains."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.lab.containers import IMAGE, MOUNTS, Podman, find_missing, make_head_podman
from tests.lab.head_cli import Head
from tests.lab.locks import lock_holder
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lab.conftest import NodeFactory
    from tests.lab.node import Node

pytestmark = [pytest.mark.skipif(bool(find_missing()), reason=find_missing()), pytest.mark.timeout(300)]

ON_NODE = Podman("/root/podman")
SHOW = """\
import os, sys, time
print(os.environ["RANK"], os.environ["FROM_IMAGE"], os.path.exists("/only-in-image"), flush=True)
def wait_for_more():
    while os.environ.get("WAIT"):
        time.sleep(0.1)
wait_for_more()
sys.exit(int(os.environ.get("CODE", "0")))
"""


SYSTEM_PYTHON = "/usr/bin/python{}.{}".format(*sys.version_info)
"""A Python that the image has by its mounts, and that can import the packages of this one."""
HANG = """\
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
def stand_still():
    time.sleep(1000)
for step in range(1000):
    if step == 30 and dist.get_rank() == 1:
        stand_still()
    dist.all_reduce(torch.ones(2))
    time.sleep(0.1)
"""


class Project(Head):
    """A folder with a script that shows where it runs."""

    def declare(self, made: list[Node], job: dict[str, Any] | None = None, **more: Any) -> None:
        keys = ("image", "runtime", "args", "mounts")
        container = {"image": IMAGE, "mounts": MOUNTS, **{key: more.pop(key) for key in keys if key in more}}
        environment = {"container": container, **({"fetch": more.pop("fetch")} if "fetch" in more else {})}
        self.write({node.name: 2 for node in made}, job or {"script": "show.py"}, environment=environment, **more)


@pytest.fixture(scope="module")
def head_podman(tmp_path_factory: pytest.TempPathFactory) -> Podman:
    return make_head_podman(tmp_path_factory.mktemp("podman"))


@pytest.fixture
def project(tmp_path: Path, head_env: dict[str, str], head_podman: Podman) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "show.py").write_text(SHOW)
    return Project(folder, {**head_env, **head_podman.env, "XDG_CACHE_HOME": str(tmp_path / "cache")})


@pytest.fixture
def with_podman(nodes: NodeFactory) -> Any:
    """Makes nodes with podman; a node sees the machine's cgroups, in which runc makes one for each container."""

    def make(count: int = 1, **more: Any) -> list[Node]:
        made = nodes(count, env=ON_NODE.env, files=ON_NODE.files, **more)
        for node in made:
            script = "for m in $(awk '$3 ~ /cgroup|tmpfs/ && $2 ~ /cgroup/ {print $2}' /proc/mounts); do"
            node.run(["sh", "-c", f"{script} mount -o remount,bind,rw $m; done"], check=True)
        return made

    return make


def containers(node: Node) -> str:
    """What remains of containers on a node: names, processes, mounts."""
    names = node.run(["podman", "ps", "-a", "--format", "{{.Names}} {{.Status}}"], env=ON_NODE.env).stdout
    processes = [p.command for p in node.leftovers() if re.search("conmon|read -r line|podman", p.command)]
    mounts = [line for line in node.path("/proc/1/mounts").read_text().splitlines() if "/podman/" in line]
    return "\n".join([*names.splitlines(), *processes, *mounts])


def test_ranks_run_in_the_files_of_an_image_that_the_head_sends_once_and_their_exit_codes_arrive(
    with_podman: Any, project: Project
) -> None:
    made = with_podman(2)
    project.declare(made)
    done = project.run("up", "--all-ranks", timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search("n1 r0 │ 0 yes True", done.stdout), done.stdout
    assert re.search(r"environment +2/2 .*sent to n\[1-2\]", done.stderr), done.stderr
    assert [containers(node) for node in made] == ["", ""]
    project.declare(made, env={"CODE": "7"})
    again = project.run("up", "--no-health", timeout=120)
    assert (again.returncode, "sent to" in again.stderr, "exit code 7" in again.stderr) == (100, False, True)


def test_signals_stacks_and_other_commands_are_as_without_a_container(with_podman: Any, project: Project) -> None:
    (node,) = with_podman()
    project.declare([node], env={"WAIT": "1"})
    assert project.run("up", "-d", "--no-health", timeout=120).returncode == 0
    shown = wait_for(lambda: (found := project.run("stacks").stdout) and "wait_for_more" in found and found)
    assert "/show.py:" in str(shown)
    inside = project.run("exec", "--env", "--", "cat", "/proc/self/environ")
    assert "FROM_IMAGE=yes" in inside.stdout, inside.stderr
    shell = subprocess.run(
        ["script", "-qec", f"{sys.executable} -m clusterctl shell --rank 1", "/dev/null"],
        cwd=project.folder,
        env=dict(project.env),
        input="echo $FROM_IMAGE-$RANK; exit 5\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (shell.returncode, "yes-1" in shell.stdout) == (5, True), shell.stdout
    assert f"python /usr/bin/python3 in {IMAGE}" in project.run("status").stdout
    pid = project.json("status")["workers"][1]["pid"]
    node.signal(pid, signal.SIGSEGV)
    done = project.run("wait", timeout=60)
    assert (done.returncode, containers(node)) == (100, ""), done.stderr
    assert "SIGSEGV" in project.run("why").stdout


@pytest.mark.torch
@pytest.mark.skipif(not Path(SYSTEM_PYTHON).exists(), reason=f"needs {SYSTEM_PYTHON}")
def test_why_says_of_a_hang_in_a_container_what_it_says_of_one_without(with_podman: Any, project: Project) -> None:
    made = with_podman(2)
    (project.folder / "hang.py").write_text(HANG)
    job = {"script": "hang.py"}
    more = {"defaults": {"python": SYSTEM_PYTHON}, "stall": {"timeout": "10s", "action": "report"}}
    packages = Path(getattr(importlib.util.find_spec("torch"), "origin", "")).parents[1]
    project.declare(
        made,
        job,
        mounts=[*MOUNTS, f"{packages}:/opt/site-packages:ro"],
        **more,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": "/opt/site-packages"},
    )
    inside = judge_hang(project)
    outside = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(packages)}
    project.write({node.name: 2 for node in made}, job, **more, env=outside)

    assert judge_hang(project) == inside
    assert [culprit["rank"] for culprit in inside["culprits"]] == [1]


def judge_hang(project: Project) -> dict[str, Any]:
    """Start a run, wait for its stall, and return the verdict on it without what differs between two runs."""
    assert project.run("up", "-d", "--no-health", timeout=120).returncode == 0
    wait_for(lambda: (project.json("status")["stall"] or {}).get("phase") == "confirmed", 90.0, "the stall", every=1.0)
    verdict: dict[str, Any] = project.json("why")
    assert project.run("down", timeout=120).returncode == 0
    # What a rank does besides waiting differs from moment to moment.
    culprits = [{key: culprit[key] for key in ("rank", "node", "where", "op")} for culprit in verdict["culprits"]]
    return {key: verdict[key] for key in ("kind", "class", "waiting", "missing")} | {"culprits": culprits}


@pytest.mark.parametrize(
    ("spec", "wanted", "words"),
    [
        pytest.param({}, {"image": "lab/none:9"}, "and this head cannot pull it", id="no image"),
        pytest.param(
            {"programs": dict.fromkeys(("docker", "podman"), "#!/bin/sh\necho broken >&2; exit 1\n")},
            {},
            "`docker version` fails: broken; `podman version` fails: broken; no program `apptainer`",
            id="none",
        ),
        pytest.param(
            {"programs": {"podman": "#!/bin/sh\nexec sleep 600\n"}},
            {"runtime": "podman"},
            "it does not answer for 10 s",
            id="hangs",
        ),
        pytest.param({}, {"mounts": ["/nowhere"]}, "there is no `/nowhere` on this node to mount", id="mount"),
        pytest.param({}, {"mounts": []}, "the image `lab/tools:1` has no program `python3`", id="no Python"),
    ],
)
def test_what_is_wrong_with_a_container_is_one_sentence_and_nothing_is_started(
    spec: dict[str, Any], wanted: dict[str, Any], words: str, with_podman: Any, project: Project
) -> None:
    (node,) = with_podman(**spec)
    project.declare([node], **wanted)
    done = project.run("up", timeout=120)
    assert (done.returncode, words in done.stderr) == (5, True), done.stderr
    assert [p.command for p in node.leftovers() if "read -r line" in p.command] == []


KINDS = ("keeper", "monitor", "supervisor", "agent", "controller", "rank")


def find_pids(kind: str, node: Node, run: str) -> list[int]:
    patterns = {
        "keeper": "read -r line",
        "monitor": r"^\S*conmon ",
        "supervisor": f"clusterctl-agent supervise {node.mark(run)}",
        "agent": "agent serve",
        "rank": r"show\.py$",
    }
    return node.pids_of(patterns[kind])


def kill_and_end(kinds: Sequence[str], wait_s: float | None, node: Node, project: Project) -> None:
    """Start a run, kill processes of it, end it with `down`, and check that nothing of its container remains.

    Args:
        kinds: The processes.
        wait_s: When to kill, in seconds after the start of the run; `None`: as soon as a rank works.
        node: The node.
        project: The project.
    """
    folder = project.folder.parent / "state/clusterctl/runs"
    folder.mkdir(parents=True, exist_ok=True)
    known = set(folder.iterdir())
    started = project.start("up", "-d", "--no-health")
    run = wait_for(lambda: next((path.name for path in folder.iterdir() if path not in known), None), what="the run")
    if wait_s is None:
        wait_for(lambda: find_pids("rank", node, run), 60.0, "a rank")
        assert containers(node)
    else:
        time.sleep(wait_s)
    for kind in kinds:
        if kind == "controller":
            pid = lock_holder(folder / run / "lock")
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        else:
            for pid in find_pids(kind, node, run):
                node.signal(pid, signal.SIGKILL)
    started.communicate(timeout=120)
    ended = project.run("down", run, timeout=120)
    assert ended.returncode in (0, 3), ended.stderr
    wait_for(lambda: not containers(node), 60.0, f"the end of {containers(node)} after {kinds}")


def test_no_container_remains_whatever_is_killed(with_podman: Any, project: Project) -> None:
    (node,) = with_podman()
    project.declare([node], env={"WAIT": "1"})
    for kinds in (["keeper", "monitor"], ["controller", "agent", "supervisor", "monitor", "rank"]):
        kill_and_end(kinds, None, node, project)


@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="takes an hour: `make killer`")
@pytest.mark.timeout(7200)
def test_no_container_remains_after_a_hundred_kills_at_random_moments(with_podman: Any, project: Project) -> None:
    (node,) = with_podman()
    project.declare([node], env={"WAIT": "1"})
    dice = random.Random(int(os.environ.get("CONTAINER_SEED", "37")))
    for number in range(int(os.environ.get("CONTAINER_ROUNDS", "100"))):
        kinds, wait_s = dice.sample(KINDS, dice.choice([1, 1, 1, 2, 3])), dice.uniform(0.0, 6.0)
        print(f"round {number}: {', '.join(kinds)} after {wait_s:.1f} s", flush=True)
        kill_and_end(kinds, wait_s, node, project)
