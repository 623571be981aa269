"""Commands that only read and write files of this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from clusterctl.cli.main import cli
from clusterctl.errors import ConfigError, NotFoundError, RefusedError

if TYPE_CHECKING:
    from pathlib import Path

CLUSTER = """\
version: 1
name: demo
hosts:
  gpu[01-02]: 2
secrets:
  TOKEN: {env: A_SECRET}
job:
  script: train.py
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_SECRET", "very-secret")
    (tmp_path / "train.py").write_text("")
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return tmp_path


def call(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, arguments, input=stdin, standalone_mode=False)


def data(*arguments: str) -> str:
    result = call(*arguments)
    assert result.exception is None, result.exception
    return result.stdout


def test_config_prints_a_file_that_says_the_same_again(folder: Path) -> None:
    first = data("config")
    (folder / "again.yaml").write_text(first.replace("TOKEN: '***'", "TOKEN: {env: A_SECRET}"))
    assert data("config", "again.yaml") == first


def test_config_json_is_the_same_document(folder: Path) -> None:
    assert json.loads(data("config", "--json"))["name"] == "demo"


def test_config_shows_no_secret(folder: Path) -> None:
    assert "very-secret" not in data("config", "--env", "0")


def test_config_quiet_prints_nothing(folder: Path) -> None:
    assert data("config", "-q") == ""


def test_config_refuses_a_file_with_a_mistake(folder: Path) -> None:
    assert isinstance(call("config", "--set", "job.grace=soon").exception, ConfigError)


def test_config_ranks_are_contiguous_in_the_order_of_hosts(folder: Path) -> None:
    assert [node["ranks"] for node in json.loads(data("config", "--ranks", "--json"))] == [[0, 1], [2, 3]]


def test_config_ranks_tells_what_is_known_where_only_nodes_know_their_gpus(folder: Path) -> None:
    hosts = "hosts={known: 2, gpu01: auto, last: {gpus: auto, workers: 3}}"
    nodes = json.loads(data("config", "--ranks", "--set", hosts, "--json"))
    assert [(node["ranks"], node["gpus"]) for node in nodes] == [([0, 1], [0, 1]), (None, None), (None, None)]

    result = call("config", "--ranks", "--set", hosts)
    assert result.exit_code == 0
    assert "gpu01  1          counted at start  auto" in result.stdout
    assert "each GPU of gpu01 gets a rank" in result.stderr


def test_a_name_of_its_own_changes_the_folder_on_nodes_and_that_is_said(folder: Path) -> None:
    result = call("up", "--dry-run", "--name", "other", "--set", "hosts={gpu01: 1}")

    assert "has a separate work folder on nodes: ~/.local/share/clusterctl/work/other-" in result.stderr


def test_a_dry_run_refuses_a_secret_that_is_not_set_as_up_does(folder: Path) -> None:
    missing = "secrets={TOKEN: {env: SURELY_NOT_SET}}"
    assert isinstance(call("up", "--dry-run", "--set", missing).exception, ConfigError)


def test_config_env_is_that_of_the_rank(folder: Path) -> None:
    assert json.loads(data("config", "--env", "3", "--json"))["LOCAL_RANK"] == {"value": "1", "source": "clusterctl"}


def test_config_env_names_who_sets_each_variable(folder: Path) -> None:
    (folder / "own.env").write_text("OF_FILE=1\n")
    (folder / "sources.yaml").write_text(
        "version: 1\n"
        "hosts: [{host: a, gpus: [1], env: {OF_HOST: 1, BOTH: 2}}]\n"
        "env_file: own.env\n"
        "env: {OF_ALL: 1, BOTH: 1}\n"
        "secrets: {HIDDEN: {env: HOME}}\n"
        "network: {interface: fab0}\n"
        "job: {command: 'true', framework: keras}\n"
    )
    found = json.loads(data("config", "sources.yaml", "--env", "0", "--json", "--set", "env.GIVEN=1"))
    assert {name: found[name]["source"] for name in found if name in SOURCES} == SOURCES
    assert found["BOTH"]["value"] == "2"


SOURCES = {
    "RANK": "clusterctl",
    "PYTHONUNBUFFERED": "default",
    "NCCL_SOCKET_IFNAME": "network.interface, sources.yaml:6:22",
    "CUDA_VISIBLE_DEVICES": "gpus, sources.yaml:2:25",
    "KERAS_BACKEND": "job.framework, sources.yaml:7:35",
    "OF_FILE": "own.env:1:1",
    "OF_ALL": "sources.yaml:4:15",
    "OF_HOST": "sources.yaml:2:45",
    "BOTH": "sources.yaml:2:54",
    "HIDDEN": "sources.yaml:5:19",
    "GIVEN": "--set",
}


def test_config_env_of_a_rank_that_is_not_there_names_those_that_are(folder: Path) -> None:
    error = call("config", "--env", "4").exception
    assert isinstance(error, NotFoundError)
    assert error.hint == "there are: 0, 1, 2, 3"


def test_config_origin_names_the_line(folder: Path) -> None:
    assert json.loads(data("config", "--origin", "--json"))["name"].startswith("cluster.yaml:2:")


def test_schema_is_written_to_a_file(folder: Path) -> None:
    data("config", "--schema", "-o", "s.json")
    assert json.loads((folder / "s.json").read_text()) == json.loads(data("config", "--schema"))


def test_init_does_not_overwrite(folder: Path) -> None:
    assert isinstance(call("init").exception, RefusedError)
    assert (folder / "cluster.yaml").read_text() == CLUSTER


def test_init_overwrites_by_force(folder: Path) -> None:
    data("init", "--force")
    assert (folder / "cluster.yaml").read_text() != CLUSTER


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("n1 slots=2\nn2 slots=2\n", id="hostfile"),
        pytest.param("Host n1 n2\n  User me\n", id="ssh_config"),
        pytest.param("n[1-2]\n", id="node list"),
        pytest.param("n1,n2\n", id="node list with commas"),
        pytest.param("n1\nn2\n", id="names"),
        pytest.param("[gpu]\nn1\nn2 ansible_user=me\n", id="Ansible inventory"),
    ],
)
def test_init_recognises_the_kind_of_a_host_list(folder: Path, text: str) -> None:
    result = call("init", "new.yaml", "--from", "-", stdin=text)
    assert result.exception is None
    assert [h["host"] for h in json.loads(data("config", "new.yaml", "--json"))["hosts"]] == ["n1", "n2"]


@pytest.mark.parametrize("text", ["host slots=2\n", "host ansible_user=me\n[gpu]\nhost\n"])
def test_init_takes_a_host_named_host_for_no_ssh_config(folder: Path, text: str) -> None:
    (folder / "machines").write_text(text)
    assert call("init", "new.yaml", "--from", "machines").exception is None


def test_init_takes_the_nodes_of_a_slurm_allocation(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "n[1-2]", "GPUS_PER_NODE": "h100:4"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    data("init", "new.yaml", "--from", "slurm")
    assert "n[1-2]: 4" in (folder / "new.yaml").read_text()


def test_init_names_the_line_of_a_mistake_in_a_host_list(folder: Path) -> None:
    (folder / "machines").write_text("n1 slots=2\nn2 slots=x\n")
    error = call("init", "new.yaml", "--from", "machines").exception
    assert isinstance(error, ConfigError)
    assert [(problem.path, problem.line) for problem in error.problems] == [("machines", 2)]


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        pytest.param(["gpu[01-02]", "--gpus", "8"], [("gpu01", 8), ("gpu02", 8)], id="a range"),
        pytest.param(["a", "b", "--gpus", "0"], [("a", 0), ("b", 0)], id="several words"),
        pytest.param(["me@a"], [("a", "auto")], id="with a user"),
        pytest.param(["--gpus", "4", "--from", "hosts"], [("n1", 2), ("n2", 4)], id="GPUs of those that say none"),
    ],
)
def test_init_takes_all_on_one_line(folder: Path, words: list[str], hosts: list[tuple[str, object]]) -> None:
    (folder / "hosts").write_text("n1 slots=2\nn2\n")
    data("init", *words, "new.yaml")

    said = json.loads(data("config", "new.yaml", "--json"))["hosts"]
    assert [(host["host"], host["gpus"]) for host in said] == hosts


def test_init_names_the_one_script_of_the_folder(folder: Path) -> None:
    (folder / "train.py").rename(folder / "main.py")
    (folder / "setup.py").touch()

    result = call("init", "gpu01", "new.yaml")

    assert json.loads(data("config", "new.yaml", "--json"))["job"]["script"] == "main.py"
    assert "`clusterctl up new.yaml` runs it" in result.stderr


def test_init_says_where_what_it_wrote_does_not_check(folder: Path) -> None:
    result = call("init", "gpu01", "new.yaml", "--script", "gone.py", "-q")

    assert result.exception is None
    assert "warning: the new file has an error: job.script: no such file" in result.stderr


def test_init_takes_a_template_for_hosts_however_they_are_named(folder: Path) -> None:
    (folder / "hosts").write_text("n1 slots=2\nn2 slots=2\n")
    data("init", "gpu[01-02]", "a", "--template", "keras_ddp", "--gpus", "8")
    data("init", "./b", "--from", "hosts", "--template", "keras_ddp")

    for place, host, gpus in (("a", "gpu01", 8), ("b", "n1", 2)):
        said = json.loads(data("config", f"{place}/cluster.yaml", "--json"))
        assert (said["hosts"][0]["host"], said["hosts"][0]["gpus"], said["job"]["args"]) == (host, gpus, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["a", "--from", "-"], "not both", id="hosts twice"),
        pytest.param(["a.yaml", "b.yaml"], "give only one path", id="two places"),
        pytest.param(["--gpus", "4", "new.yaml"], "`--gpus` needs hosts", id="GPUs of nobody"),
        pytest.param(["a", "--gpus", "x"], "not a number of GPUs", id="no number"),
        pytest.param(["a", "--template", "torch_ddp", "--script", "x"], "cannot be used together", id="two jobs"),
    ],
)
def test_init_says_what_cannot_be_meant(folder: Path, words: list[str], said: str) -> None:
    (folder / "cluster.yaml").unlink()

    assert said in str(call("init", *words).exception)


def test_every_listed_template_can_be_copied_and_checked(folder: Path) -> None:
    listed = json.loads(data("init", "--list", "--json"))
    assert listed
    for template in listed:
        data("init", "--template", template["name"], template["name"])
        data("config", "-q", f"{template['name']}/cluster.yaml")
        assert template["summary"]


def test_init_with_a_template_overwrites_nothing(folder: Path) -> None:
    name = data("init", "--list", "-q").split()[0]
    assert isinstance(call("init", "--template", name).exception, RefusedError)
    assert not (folder / "README.md").exists()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_asks_this_program(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # click runs bash to learn its version, and says so on stderr where it is too old.
    assert "_CLUSTERCTL_COMPLETE" in data("completion", shell)


@pytest.mark.parametrize(
    ("section", "place", "words", "hint"),
    [
        pytest.param("ignore: [gpu.count, host.governer@gpu01]", (10, 23), "not a check", "host.governor", id="ignore"),
        pytest.param("severity: {gpu.persistance: warn}", (10, 14), "not a check", "gpu.persistence", id="severity"),
        pytest.param("required: [gpu.cuont]", (10, 14), "not a check", "gpu.count", id="required"),
        pytest.param("thresholds: {host.disk.wrn: 1}", (10, 16), "not a threshold", "host.disk.warn", id="threshold"),
        pytest.param("expect: {toch: 2.6}", (10, 12), "not a known property", "torch", id="expect"),
    ],
)
@pytest.mark.parametrize("command", ["config", "up", "health"])
def test_a_misspelt_name_below_health_is_answered_where_it_stands(
    folder: Path, command: str, section: str, place: tuple[int, int], words: str, hint: str
) -> None:
    (folder / "cluster.yaml").write_text(CLUSTER + f"health:\n  {section}\n")
    error = call(command).exception
    assert isinstance(error, ConfigError)
    (problem,) = error.problems
    assert (problem.line, problem.column) == place
    assert words in problem.text
    assert problem.hint == f"did you mean `{hint}`?"


def test_a_rule_for_a_host_that_is_not_in_the_file_is_doubted(folder: Path) -> None:
    (folder / "cluster.yaml").write_text(f"{CLUSTER}health: {{ignore: [gpu.count@gpu3]}}\n")
    result = call("config", "-q")
    assert result.exception is None
    assert "cluster.yaml:9:19: warning: health.ignore: `gpu3` is not a host" in result.stderr


def test_a_file_without_a_health_section_costs_no_import_of_the_checks(folder: Path) -> None:
    code = "import sys; from clusterctl.cli.main import run; run(['config', '-q']); print('clusterctl.health.registry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stdout == "False\n"


def test_init_with_the_schema_writes_what_its_first_line_names(folder: Path) -> None:
    data("init", "--schema", "c.yaml")
    first = (folder / "c.yaml").read_text().splitlines()[0]
    assert json.loads((folder / first.partition("$schema=")[2]).read_text()) == json.loads(data("config", "--schema"))
    data("config", "-q", "c.yaml")


def test_what_the_starter_file_has_in_comments_loads_once_uncommented(folder: Path) -> None:
    data("init", "new.yaml")
    text = (folder / "new.yaml").read_text()
    uncommented, count = re.subn(r"^( *)# ( *\w+:(?: .*)?)$", r"\1\2", text, flags=re.MULTILINE)
    (folder / "new.yaml").write_text(uncommented)
    loaded = json.loads(data("config", "new.yaml", "--json"))
    assert count > 15
    assert (loaded["restart"]["max_restarts"], loaded["stall"]["action"]) == (3, "restart")
    assert [h["host"] for h in loaded["hosts"]] == ["gpu01", "gpu02", "gpu03"]
