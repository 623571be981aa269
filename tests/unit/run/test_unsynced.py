"""Changes of code that nobody synced."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.agent.serve import workdirs
from clusterctl.run.nodes import sync_warnings


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        pytest.param({"n1": {"a": "1"}}, {"n1": {"a": "1"}}, {}, id="as it was"),
        pytest.param({"n1": {"a": "1"}}, {"n1": {"a": "2"}}, {"n1": ["a"]}, id="another content"),
        pytest.param({"n1": {"a": "1"}}, {"n1": {"b": "1"}}, {"n1": ["a", "b"]}, id="one gone, one new"),
        pytest.param({}, {"n1": {"a": "1"}}, {}, id="a node that was not there"),
    ],
)
def test_what_has_changed(
    before: dict[str, dict[str, str]], now: dict[str, dict[str, str]], changed: dict[str, list[str]]
) -> None:
    assert sync_warnings.find_changes(before, now) == changed


def test_a_few_files_are_named_and_the_others_counted() -> None:
    said = sync_warnings.describe_changes(list("abcde"), "n[1-2]")

    assert said == (
        "the code on n[1-2] is not synced and has changed since the run was started: `a`, `b`, `c` and 2 more"
    )


def test_sources_are_looked_at_and_what_a_job_writes_is_not(tmp_path: Path) -> None:
    wanted = ("train.py", "lib/model.py", "run.sh")
    others = ("out.json", ".git/x.py", "lib/__pycache__/y.py", "env/lib/z.py", ".hidden.py")
    for name in (*wanted, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "env/pyvenv.cfg").touch()

    assert sorted(workdirs.hash_source_files(str(tmp_path))) == sorted(wanted)
