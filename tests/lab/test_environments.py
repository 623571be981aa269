"""Environments on real nodes that have no internet: made by uv from a lock, once, whole or not at all."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.documented import typed
from tests.lab.head_cli import Head
from tests.lab.packages import Index, find_program, lock, make_conda_environment, pack_python, write_wheel
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lab.conftest import NodeFactory
    from tests.lab.lab import Lab
    from tests.lab.node import Node

OTHER_PYTHON = "/root/.pyenv/versions/3.9.18/bin/python3"
HERE = "{}.{}".format(*sys.version_info[:2])
STORE = ".local/share/clusterctl/environments"
SHOW = "import sys, greeting\nprint(greeting.TEXT, '%d.%d' % sys.version_info[:2], sys.prefix)\n"

pytestmark = [
    pytest.mark.skipif(find_program("uv") is None, reason="needs uv: `pip install uv`"),
    pytest.mark.timeout(300),
]


class Project(Head):
    """A folder with `uv.lock`, a script that shows what it imports, and the wheels on the head."""

    @property
    def wheels(self) -> Path:
        return self.folder.parent / "wheels"

    def lock(self, index: str | None = None, **wanted: str) -> None:
        lock(self.folder, index or f"{self.wheels.as_uri()}/simple", wanted, self.env)

    def declare(self, made: list[Node], **more: Any) -> None:
        job = more.pop("job", {})
        job = job if "command" in job else {"script": "show.py", **job}
        environment = more if "venv" in more else {"uv": ".", "python": HERE, **more}
        self.write({node.name: 1 for node in made}, job, environment=environment)


@pytest.fixture
def project(tmp_path: Path, head_env: dict[str, str]) -> Project:
    folder = tmp_path / "project"
    folder.mkdir()
    env = {**head_env, "XDG_CACHE_HOME": str(tmp_path / "cache"), "UV_CACHE_DIR": str(tmp_path / "uv")}
    made = Project(folder, env)
    write_wheel(made.wheels, "greeting", "1.0", "TEXT = 'hello'\n")
    write_wheel(made.wheels, "greeting", "2.0", "TEXT = 'welcome'\n")
    write_wheel(made.wheels, "ballast", "1.0", f"DATA = {'x' * 100_000!r}\n")
    (folder / "show.py").write_text(SHOW)
    made.lock(greeting="1.0", ballast="1.0")
    return made


def listed(node: Node, below: str = "") -> list[str]:
    return node.run(["sh", "-c", f"ls ~/{STORE}/{below}"]).stdout.split()


def made_in(node: Node) -> list[str]:
    return [name for name in listed(node) if name.startswith("py")]


def test_nodes_without_internet_run_in_the_environment_of_the_lock(nodes: NodeFactory, project: Project) -> None:
    made = nodes(2)
    project.declare(made)

    done = project.run("up", "--all-ranks")

    assert done.returncode == 0, done.stderr
    assert re.search(rf"│ hello {HERE} /root/{STORE}/py\w+", done.stdout)
    assert re.search(r"environment +2/2 .*made on 2 nodes", done.stderr)


def test_a_second_start_makes_and_sends_nothing_and_a_changed_package_is_sent_alone(
    nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    project.declare([node])
    assert project.run("up").returncode == 0
    before = node.run(["sh", "-c", f"stat -c '%n %i %Z' ~/{STORE}/packages/*"]).stdout.splitlines()

    again = project.run("up")
    assert re.search(r"environment +1/1 .*as before", again.stderr), again.stderr
    assert node.run(["sh", "-c", f"stat -c '%n %i %Z' ~/{STORE}/packages/*"]).stdout.splitlines() == before

    project.lock(greeting="2.0", ballast="1.0")
    changed = project.run("up")
    assert "welcome" in changed.stdout, changed.stderr
    after = node.run(["sh", "-c", f"stat -c '%n %i %Z' ~/{STORE}/packages/*"]).stdout.splitlines()
    assert [line.split()[0].rpartition("/")[2] for line in after if line not in before] == [
        "greeting-2.0-py3-none-any.whl"
    ]


def test_nodes_with_another_python_or_none_that_fits_get_one(
    nodes: NodeFactory, project: Project, tmp_path: Path
) -> None:
    made = nodes(2, python=OTHER_PYTHON, only_python=True)
    project.declare(made)
    done = Project(project.folder, {**project.env, **pack_python(tmp_path)}).run("up", "--all-ranks", timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"│ hello {HERE} /root/", done.stdout)


def test_a_node_without_any_python_gets_one_and_every_command_then_finds_it(
    nodes: NodeFactory, project: Project, tmp_path: Path
) -> None:
    made = nodes(2, python=None)
    project.declare(made)
    known = Project(project.folder, {**project.env, **pack_python(tmp_path)})
    for _ in range(2):
        done = known.run("up", "--all-ranks", timeout=120)
        assert done.returncode == 0, done.stderr
        assert re.search(rf"│ hello {HERE} /root/", done.stdout)
    assert "as before" in done.stderr
    told = known.run("exec", "--", "hostname")
    assert told.returncode == 0, told.stderr


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        pytest.param({"programs": {"tar": "#!/bin/false\n"}}, "cannot unpack one", id="a tar that does not work"),
        pytest.param(
            {"programs": {"getconf": "#!/bin/sh\necho glibc 2.12\n"}}, "`glibc 2.12` fits no Python", id="libc"
        ),
    ],
)
def test_a_node_that_can_take_no_python_is_named_with_the_reason(
    spec: dict[str, Any], words: str, nodes: NodeFactory, project: Project, tmp_path: Path
) -> None:
    (node,) = nodes(1, python=None, **spec)
    project.declare([node])
    done = Project(project.folder, {**project.env, **pack_python(tmp_path)}).run("up", timeout=120)
    assert done.returncode == 4, done.stderr
    assert "error: n1: it has no Python, and" in done.stderr
    assert words in done.stderr


@pytest.mark.parametrize(
    ("fetch", "is_cut", "by_nodes"),
    [
        pytest.param("node", False, True, id="nodes that are told to"),
        pytest.param("auto", False, True, id="nodes that can"),
        pytest.param("auto", True, False, id="one node that cannot"),
        pytest.param("head", False, False, id="the head by default"),
    ],
)
def test_packages_are_downloaded_by(
    fetch: str, is_cut: bool, by_nodes: bool, nodes: NodeFactory, project: Project, lab: Lab
) -> None:
    made = nodes(2)
    with Index(project.wheels, lab.head_address) as index:
        project.lock(index.url, greeting="1.0")
        project.declare(made, fetch=fetch)
        if is_cut:
            made[1].run(["nft", "add", "table", "ip", "cut"])
            made[1].run(["nft", "add chain ip cut out { type filter hook output priority 0; }"])
            port = index.url.split(":")[2].split("/")[0]
            made[1].run(["nft", f"add rule ip cut out tcp dport {port} drop"], check=True)
        index.seen.clear()
        done = project.run("up")
    assert done.returncode == 0, done.stderr
    assert {node.address in {who for who, _ in index.seen} for node in made} == {by_nodes}


def test_the_key_of_a_private_index_is_used_on_the_head_and_never_sent(
    nodes: NodeFactory, project: Project, lab: Lab
) -> None:
    (node,) = nodes(1)
    with Index(project.wheels, lab.head_address, is_private=True) as index:
        known = Project(
            project.folder, {**project.env, "UV_INDEX_LAB_USERNAME": "user", "UV_INDEX_LAB_PASSWORD": "key"}
        )
        known.lock(index.url, greeting="1.0")
        project.declare([node])
        refused = project.run("up")
        assert refused.returncode == 5, refused.stderr
        assert "UV_INDEX_NAME_USERNAME" in refused.stderr
        done = known.run("up")
    assert done.returncode == 0, done.stderr
    assert node.run(["grep", "-rl", "UV_INDEX_LAB", "/root", "/run", "/var/tmp", "/dev/shm"]).stdout == ""


def test_a_virtual_environment_of_the_head_is_copied_with_scripts_that_work(
    nodes: NodeFactory, project: Project
) -> None:
    made = nodes(2)
    venv, uv = project.folder.parent / "mine", find_program("uv")
    assert uv is not None
    for command in (
        ["venv", "--python", sys.executable, str(venv)],
        [
            "pip",
            "install",
            "--python",
            f"{venv}/bin/python",
            "--no-index",
            "--find-links",
            str(project.wheels),
            "greeting==2.0",
        ],
    ):
        subprocess.run([uv, *command], env=dict(project.env), check=True, capture_output=True)
    script = venv / "bin" / "greet"
    script.write_text(f"#!{venv}/bin/python\nimport greeting, sys\nprint(greeting.TEXT, sys.prefix)\n")
    script.chmod(0o755)
    project.declare(made, venv=str(venv), job={"command": "greet"})
    for _ in range(2):
        done = project.run("up", "--all-ranks")
        assert done.returncode == 0, done.stderr
        assert re.search(rf"│ welcome /root/{STORE}/py\w+", done.stdout), done.stdout
    assert "as before" in done.stderr


def test_a_copy_that_was_built_for_another_platform_is_refused_with_the_package(
    nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    venv = project.folder.parent / "mine"
    info = venv / f"lib/python{HERE}/site-packages/native-1.0.dist-info"
    info.mkdir(parents=True)
    (venv / "pyvenv.cfg").write_text(f"home = /usr/bin\nversion = {HERE}.1\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nTag: cp39-cp39-win_amd64\n")
    project.declare([node], venv=str(venv))
    done = project.run("up")
    assert (done.returncode, "native 1.0 in" in done.stderr, "cp39-cp39-win_amd64" in done.stderr) == (5, True, True)


@pytest.mark.skipif(find_program("conda-pack") is None, reason="needs `pip install conda-pack`")
def test_a_conda_environment_of_the_head_is_copied_with_its_python(
    nodes: NodeFactory, project: Project, tmp_path: Path
) -> None:
    (node,) = nodes(1, python=OTHER_PYTHON, only_python=True)
    project.declare([node], venv=str(make_conda_environment(tmp_path)), job={"command": "greet; python -V"})
    done = project.run("up", timeout=120)

    assert re.search(rf"│ hello from /root/{STORE}/py\w+\n.*│ Python {HERE}", done.stdout), done.stderr
    assert len(listed(node, "packages")) == 1


def test_a_home_that_nodes_share_gets_one_environment(nodes: NodeFactory, project: Project) -> None:
    made = nodes(3, shared_home=True)
    project.declare(made)
    done = project.run("up", "--all-ranks")
    assert done.returncode == 0, done.stderr
    assert "made on 1 node" in done.stderr
    assert len(made_in(made[0])) == 1


def test_other_commands_use_the_environment_of_the_last_start_and_clean_removes_it(
    nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    project.declare([node], job={"setup": "true"})
    early = project.run("health", "-v")
    assert "the environment of this cluster file is not made on this node" in early.stdout + early.stderr
    assert project.run("up").returncode == 0
    shown = project.run("exec", "--env", "--", "python", "show.py")
    assert re.search(rf"hello {HERE} /root/{STORE}", shown.stdout), shown.stderr
    assert f"Python {HERE}" in project.run(*typed("clusterctl exec --env -- python -V")).stdout
    assert re.search(rf"(?m)^  python /root/{STORE}/py\w+/bin/python$", project.run("status").stdout)
    assert project.run("health").returncode == 0
    kept = project.run("clean", "--older-than", "0s", "--yes")
    assert kept.returncode == 0, kept.stderr
    assert made_in(node)
    assert project.run("up").returncode == 0
    project.run(*typed("clusterctl clean --environments --yes"), "--older-than", "0s")
    assert (made_in(node), listed(node, "packages")) == ([], [])


def test_compiled_code_is_kept_for_the_environment_on_a_local_disk(nodes: NodeFactory, project: Project) -> None:
    (node,) = nodes(1, env={"TRITON_CACHE_DIR": "/scratch/triton"})
    job = {"command": "echo $TRITON_CACHE_DIR $TORCHINDUCTOR_CACHE_DIR"}
    project.declare([node], job=job)
    done = project.run("up")
    assert re.search(
        r"│ /scratch/triton /root/\.local/state/clusterctl/caches/py\w+-cpu/torchinductor_cache", done.stdout
    )
    project.declare([node], job={**job, "cache": "none"})
    assert "caches" not in project.run("up").stdout


def test_two_runs_that_need_the_same_environment_make_it_once(nodes: NodeFactory, project: Project) -> None:
    (node,) = nodes(1)
    project.declare([node])
    started = [project.start("up", "--name", f"run{number}") for number in range(2)]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert len(made_in(node)) == 1


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        pytest.param(
            lambda project: write_wheel(project.wheels, "greeting", "1.0", "TEXT = 'evil'\n"),
            "greeting-1.0-py3-none-any.whl does not have the hash in the lock",
            id="wrong hash",
        ),
        pytest.param(
            lambda project: (project.wheels / "greeting-1.0-py3-none-any.whl").unlink(),
            "cannot download greeting-1.0-py3-none-any.whl",
            id="the file is gone",
        ),
        pytest.param(
            lambda project: (project.folder / "pyproject.toml").write_text(
                (project.folder / "pyproject.toml").read_text().replace('"greeting==1.0"', '"greeting==2.0"')
            ),
            "does not fit `pyproject.toml` (`uv lock` updates it)",
            id="the lock is older than the project",
        ),
        pytest.param(
            lambda project: (project.folder / "uv.lock").write_text("version = 1\nhello"), "uv says:", id="a torn lock"
        ),
    ],
)
def test_what_is_wrong_with_the_packages_is_said_and_nothing_is_started(
    harm: Any, words: str, nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    project.declare([node])
    harm(project)
    done = project.run("up")
    assert (done.returncode, words in done.stderr) == (5, True), done.stderr
    assert made_in(node) == []


def test_a_lock_without_a_file_for_the_nodes_names_the_package_and_their_platform(
    nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    write_wheel(project.wheels, "native", "1.0", "", tags="cp39-cp39-manylinux_2_17_x86_64")
    project.lock(greeting="1.0", native="1.0")
    project.declare([node])
    done = project.run("up")
    assert done.returncode == 5, done.stderr
    assert f"native 1.0 has no file for Python {HERE} on x86_64 with glibc" in done.stderr


def test_a_full_disk_is_said_before_anything_is_sent(nodes: NodeFactory, project: Project) -> None:
    (node,) = nodes(1, disk="60m")
    project.declare([node])
    done = project.run("up")
    assert done.returncode == 5, done.stderr
    assert re.search(r"error: n1: /root/\.local/\S+ has \S+ MiB free, and the environment needs about", done.stderr)
    assert made_in(node) == []


def test_a_failure_on_a_node_names_it_and_keeps_the_output(nodes: NodeFactory, project: Project) -> None:
    first, second = nodes(2)
    project.declare([first, second])
    second.run(
        [
            "sh",
            "-c",
            f"mkdir -p ~/{STORE}/cache && chmod 755 ~ && touch ~/{STORE}/cache/.lock/x; rm -r ~/{STORE}/cache; touch ~/{STORE}/cache",
        ]
    )
    done = project.run("up")
    assert done.returncode == 5, done.stderr
    assert "error: n2: the environment failed" in done.stderr
    (log,) = re.findall(r"the whole output is in (\S+)", done.stderr)
    with open(log) as file:
        assert "cache" in file.read()


@pytest.mark.skipif("CLUSTERCTL_LONG" not in os.environ, reason="`make killer`")
def test_a_node_that_dies_while_its_environment_is_made_ends_the_start_and_the_next_one_is_whole(
    nodes: NodeFactory, project: Project
) -> None:
    first, second = nodes(2)
    project.declare([first, second], job={"setup": "touch ~/began; sleep 600"})
    up = project.start("up")
    wait_for(lambda: second.path("/root/began").exists(), what="the setup to run")
    second.kill()
    _, err = up.communicate(timeout=120)
    assert up.returncode == 4, err
    second.boot()
    project.declare([first, second])
    assert project.run("up", timeout=120).returncode == 0


def test_a_setup_runs_once_on_each_node_before_all_ranks_with_the_environment_first_on_path(
    nodes: NodeFactory, project: Project
) -> None:
    made = nodes(2)
    setup = "echo ran >> count; python -c 'import greeting; print(greeting.TEXT)' > said"
    project.declare(made, job={"setup": setup, "command": "cat count said"})
    for _ in range(2):
        done = project.run("up", "--all-ranks")
        assert done.returncode == 0, done.stderr
        assert set(re.findall(r"│ (\w+)", done.stdout)) == {"ran", "hello"}, done.stdout
    assert [node.path(f"/root/{project.workdir()}/count").read_text() for node in made] == ["ran\n"] * 2


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        pytest.param(
            {"setup": "echo no compiler >&2; false"}, "the setup failed: exit code 1: no compiler", id="fails"
        ),
        pytest.param(
            {"setup": "sleep 600", "setup_limit": "1s"}, "the setup failed: it took longer than 1 s", id="hangs"
        ),
    ],
)
def test_a_setup_that_fails_ends_the_start(
    setup: dict[str, str], words: str, nodes: NodeFactory, project: Project
) -> None:
    (node,) = nodes(1)
    project.declare([node], job=setup)
    done = project.run("up")
    assert (done.returncode, f"error: n1: {words}" in done.stderr) == (5, True), done.stderr
    wait_for(lambda: not node.leftovers(), what="the setup to be gone")
