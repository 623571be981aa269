"""The URLs of `notify` are secrets: the file names their source, and no report contains them."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.config.loader import load_cluster_file
from clusterctl.config.resolved_file import build_resolved_document, render_yaml
from clusterctl.config.spec import dump_spec, load_spec
from clusterctl.errors import ConfigError

URL = "https://hooks.example.org/s3same"


def write(folder: Path, notify: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(f"version: 1\nhosts: box\njob: {{command: 'true'}}\nnotify: {notify}\n")
    (folder / "hook").write_text(f"{URL}\n")
    return path


@pytest.mark.parametrize(
    ("notify", "value", "said"),
    [
        pytest.param(f"{{slack: '{URL}'}}", "", "notify.slack: must be a mapping, not the value itself", id="literal"),
        pytest.param("{slack: {env: A, file: b}}", "", "notify.slack: needs exactly one of `env`, `file`", id="both"),
        pytest.param("{slack: {}}", "", "notify.slack: needs exactly one of `env`, `file`", id="none"),
        pytest.param("{slack: {env: NONE}}", "", "notify.slack: the variable `NONE` is not set", id="unset"),
        pytest.param("{slack: {file: none}}", "", "notify.slack.file: no such file", id="no file"),
        pytest.param("{slack: {env: HOOK}}", "", "notify.slack: the secret is empty", id="empty"),
        pytest.param("{slack: {env: HOOK}}", f"{URL} x", "notify.slack: the secret is empty, or contains", id="blank"),
        pytest.param(
            "{slack: {env: HOOK}}", "s3same", "notify.slack: the secret must begin with `https://`", id="word"
        ),
        pytest.param("{slack: {env: HOOK}}", "https://[s3same", "notify.slack: the secret is not a URL", id="no URL"),
        pytest.param("{slack: {env: HOOK}}", "mailto://s3same", "`notify.apprise` accepts other services", id="mail"),
        pytest.param("{ntfy: {env: HOOK}}", "https://s3same/", "the secret must end with a topic", id="no topic"),
        pytest.param("{on: [fail]}", "", "notify.on[0]: must be", id="event"),
        pytest.param("{max_per_minute: 0}", "", "notify.max_per_minute: must be", id="limit"),
        pytest.param("{command: ./tell.sh}", "", "notify.command: must be a list", id="text as a command"),
    ],
)
def test_a_mistake_is_named_without_the_url(tmp_path: Path, notify: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_cluster_file([write(tmp_path, notify)], environ={"HOOK": value}, with_secrets=True)

    texts = [f"{problem.text} {problem.hint}" for problem in raised.value.problems]
    assert said in texts[0]
    assert "s3same" not in str(texts)


def test_a_url_is_neither_in_the_spec_nor_in_the_resolved_file(tmp_path: Path) -> None:
    path = write(tmp_path, "{slack: {env: HOOK}, ntfy: {file: hook}}")
    spec = load_cluster_file([path], environ={"HOOK": URL}, with_secrets=True).spec
    shown = render_yaml(build_resolved_document(spec))

    assert "s3same" not in repr(spec) + dump_spec(spec) + shown
    assert spec.notify.addresses["ntfy"].file == str(tmp_path / "hook")
    assert load_spec(dump_spec(spec)).notify == spec.notify
    (tmp_path / "again.yaml").write_text(shown)
    assert load_cluster_file([tmp_path / "again.yaml"], environ={"HOOK": URL}).spec.notify == spec.notify
