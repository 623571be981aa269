"""Several files, `--set` and options of `up` lie over each other, and each value knows where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from clusterctl.config.loader import load_cluster_file
from clusterctl.config.text.overrides import Overrides
from clusterctl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from clusterctl.config.loader import LoadedClusterFile

BASE = "version: 1\nhosts: {a: 8, b: 8}\nenv: {A: 1, B: 1}\njob: {script: train.py, args: [-v]}\n"


def test_a_file_with_settings_of_a_job_and_nothing_to_run_has_none(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    assert parse_text("version: 1\nhosts: a\njob: {args: [--fast]}\n").spec.job is None


def test_later_files_merge_mappings_and_replace_lists(parse_text: Callable[..., LoadedClusterFile]) -> None:
    spec = parse_text(BASE, "env: {B: 2}\nhosts: {b: 4, c: 1}\njob: {args: [-q]}\n").spec
    assert spec.env == {"A": "1", "B": "2"}
    assert [(h.name, h.gpus) for h in spec.hosts] == [("a", 8), ("b", 4), ("c", 1)]
    assert spec.job is not None
    assert spec.job.args == ("-q",)


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        pytest.param("job.grace=30s", "job.grace", 30.0, id="duration"),
        pytest.param('job.args=["--lr", 1e-3]', "job.args", ("--lr", "1e-3"), id="list"),
        pytest.param("env.NEW=a: b #c", "env.NEW", "a: b #c", id="text_is_never_a_mapping"),
        pytest.param("env.EMPTY=", "env.EMPTY", "", id="empty_text"),
        pytest.param("network.master_port=29500", "network.master_port", 29500, id="new_section"),
        pytest.param("health.severity.xid.31=warn", "health.severity.xid.31", "warn", id="name_of_a_check"),
        pytest.param("hosts.b=2", "hosts[1].gpus", 2, id="host"),
    ],
)
def test_set_changes_one_value_and_is_its_origin(
    setting: str, path: str, value: object, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    loaded = parse_text(BASE, sets=[setting])
    spec = loaded.spec
    assert spec.job is not None
    found = {
        "job.grace": spec.job.grace,
        "job.args": spec.job.args,
        "env.NEW": spec.env.get("NEW"),
        "env.EMPTY": spec.env.get("EMPTY"),
        "network.master_port": spec.network.master_port,
        "health.severity.xid.31": spec.health.severity.get("xid.31"),
        "hosts[1].gpus": spec.hosts[1].gpus,
    }
    assert found[path] == value
    assert loaded.origins[path] == "--set"


def test_set_reaches_items_of_a_list(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\nhosts: [{host: a}, {host: b}]\n"
    assert [h.gpus for h in parse_text(text, sets=["hosts[1].gpus=4", "hosts.0.gpus=2"]).spec.hosts] == [2, 4]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        pytest.param("job.arg=1", "job.arg: unknown key", id="unknown_key"),
        pytest.param("job.grace", "is not `key=value`", id="no_equals_sign"),
        pytest.param("job.script.x=1", "not a mapping", id="below_a_scalar"),
        pytest.param("job.args[7]=x", "no item `7`", id="no_such_item"),
        pytest.param("job.args=[a", "not closed", id="bad_yaml"),
        pytest.param("stall.timeout=soon", "not a duration", id="bad_value"),
    ],
)
def test_a_wrong_set_is_named_as_such(setting: str, words: str, parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(BASE, sets=[setting])
    (problem,) = caught.value.problems
    assert (problem.path, problem.line) == ("--set", 0)
    assert words in problem.text


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        pytest.param(Overrides(module="m"), (None, "m", None, ("-v",)), id="module_replaces_script"),
        pytest.param(Overrides(command="ls $HOME"), (None, None, "ls $HOME", ("-v",)), id="command"),
        pytest.param(
            Overrides(args=("1", "$${A}")), ("train.py", None, None, ("-v", "1", "${A}")), id="arguments_appended"
        ),
    ],
)
def test_options_of_up_lie_over_the_job(
    overrides: Overrides, expected: tuple[object, ...], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    job = parse_text(BASE, overrides=overrides).spec.job
    assert job is not None
    assert (job.script, job.module, job.command, job.args) == expected


def test_a_file_without_job_runs_what_the_options_say(parse_text: Callable[..., LoadedClusterFile]) -> None:
    loaded = parse_text("version: 1\nhosts: a\n", overrides=Overrides(script="train.py", name="x"), require_job=True)
    assert loaded.spec.job is not None
    assert (loaded.spec.name, loaded.origins["job.script"]) == ("x", "--script")


def test_a_missing_script_named_by_an_option_is_blamed_on_it(parse_text: Callable[..., LoadedClusterFile]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(BASE, overrides=Overrides(script="no.py"))
    assert caught.value.problems[0].path == "--script"


def test_secrets_are_not_read_unless_wanted(parse_text: Callable[..., LoadedClusterFile]) -> None:
    assert parse_text("version: 1\nhosts: a\nsecrets: {T: {env: NOPE}}\n").spec.secrets == {"T": ""}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("env: {A: '${env:NOPE}'}\n", "env.A: `NOPE` is not set", id="unset_variable"),
        pytest.param("stall: {action: restart}\n", "`restart` only stops the run", id="restart_without_budget"),
        pytest.param("restart: {max_restarts: 1, on: [node_lost]}\n", "no effect", id="node_lost_without_fence"),
    ],
)
def test_what_is_probably_not_meant_gives_a_warning(
    text: str, words: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    (warning,) = parse_text("version: 1\nhosts: a\n" + text).warnings
    assert words in warning.text


SPARE = "version: 1\nhosts: {a: 8, s: {role: spare}}\nrestart: {max_restarts: 1}\n"
FENCED = "on_controller_loss: {stop_after: 10m}\n"
NEVER_USED = "hosts.s.role: has no effect: without `restart.max_restarts` there are no restarts"
NEVER_REPLACES = "hosts: a spare cannot replace a lost node, because that node may still run its workers"
LOSES = "job.checkpoint: a spare cannot resume from checkpoints that only the lost node has"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(SPARE, [NEVER_REPLACES], id="a lost node is never known to have stopped"),
        pytest.param(SPARE + FENCED, [], id="a lost node stops by itself"),
        pytest.param(
            SPARE + "job: {command: x, checkpoint: {pattern: c}}\n" + FENCED, [LOSES], id="disks of their own"
        ),
        pytest.param(SPARE + "job: {command: x, checkpoint: {pattern: c, shared: true}}\n" + FENCED, [], id="shared"),
        pytest.param(SPARE + "job: {command: x, checkpoint: {pattern: c, resume: never}}\n" + FENCED, [], id="never"),
        pytest.param(SPARE.replace("_restarts: 1", "_restarts: 0"), [NEVER_USED], id="no restarts"),
        pytest.param(SPARE.replace("s: 1}", "s: 1, on: [crash]}"), [], id="lost nodes end the run"),
    ],
)
def test_spares_that_would_not_help_are_warned_of(
    text: str, expected: list[str], parse_text: Callable[..., LoadedClusterFile]
) -> None:
    assert [warning.text for warning in parse_text(text).warnings] == expected


def test_a_private_key_that_is_not_there_is_named_once_where_it_is_said(
    parse_text: Callable[..., LoadedClusterFile],
) -> None:
    text = "version: 1\nhosts:\n  gpu[1-9]: 8\n  b: {identity_file: /nope/b}\ndefaults: {identity_file: /nope/id}\n"

    said = [(warning.line, warning.text) for warning in parse_text(text).warnings]

    assert said == [
        (5, "defaults.identity_file: no such file: `/nope/id`"),
        (4, "hosts.b.identity_file: no such file: `/nope/b`"),
    ]


@pytest.mark.parametrize(
    "host",
    [
        pytest.param("{transport: local, identity_file: /nope/id}", id="nobody-logs-in"),
        pytest.param("{identity_file: none}", id="none"),
        pytest.param("{identity_file: '%d/.ssh/id'}", id="tokens-of-ssh"),
        pytest.param("{identity_file: /keys/there}", id="it-is-there"),
        pytest.param("{identity_file: /keys/public}", id="its-public-half-for-an-agent"),
    ],
)
def test_a_private_key_is_doubted_only_where_a_login_would_miss_it(
    host: str, parse_text: Callable[..., LoadedClusterFile]
) -> None:
    warnings = parse_text(f"version: 1\nhosts: {{a: {host}}}\n").warnings
    assert not [warning for warning in warnings if "there is no file" in warning.text]


def test_a_host_hidden_by_its_name_gives_a_warning(parse_text: Callable[..., LoadedClusterFile]) -> None:
    loaded = parse_text("version: 1\nhosts: {a: 8, x-1: 8}\n")
    assert [w.column for w in loaded.warnings] == [15]


def test_origins_tell_own_values_from_defaults(parse_text: Callable[..., LoadedClusterFile]) -> None:
    text = "version: 1\ndefaults: {user: u}\nhosts:\n  a: {port: 22}\nenv_file: .env\n"
    origins = parse_text(text).origins
    assert origins["hosts[0].port"] == "cluster.yaml:4:13"
    assert origins["hosts[0].user"] == "cluster.yaml:2:18"
    assert origins["hosts[0].gpus"] == "default"
    assert origins["env.A"] == ".env:2:1"


def test_files_are_read_from_disk_relative_to_the_first(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / ".env").write_text("A=1\n")
    (tmp_path / "cluster.yaml").write_text("version: 1\nhosts: a\nenv_file: .env\njob: {script: train.py}\n")
    spec = load_cluster_file([tmp_path / "cluster.yaml"], environ={}, require_job=True).spec
    assert spec.env == {"A": "1"}
    assert spec.sync is not None
    assert spec.sync.source == str(tmp_path)


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as caught:
        load_cluster_file([tmp_path / "cluster.yaml"], environ={})
    assert "clusterctl init" in (caught.value.hint or "")


def test_a_folder_is_answered_with_the_file_in_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        load_cluster_file([tmp_path], environ={})


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        pytest.param("my model (2)!", "my-model-2", id="signs become one hyphen"),
        pytest.param("_.llm-", "llm", id="none at its ends"),
        pytest.param("(((", "cluster", id="nothing but signs"),
    ],
)
def test_a_cluster_without_a_name_is_named_after_its_folder(tmp_path: Path, folder: str, name: str) -> None:
    (tmp_path / folder).mkdir()
    file = tmp_path / folder / "cluster.yaml"
    file.write_text("version: 1\nhosts: gpu01\n")

    assert load_cluster_file([file], environ={}).spec.name == name
