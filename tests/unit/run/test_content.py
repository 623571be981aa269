"""What was synced is kept as long as a run needs it, and no longer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterctl.cli import trusted_commands
from clusterctl.config.spec import ClusterSpec, SyncSpec
from clusterctl.errors import RefusedError
from clusterctl.run.nodes import code_manifest
from clusterctl.run.record import health_history, rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.rules import controller_events
from tests.lab.waiting import wait_for

LONG_AGO = 7200.0


def ended_run(root: Path, manifest: code_manifest.CodeManifest, when: float) -> rundir.RunDir:
    run = rundir.create_run_dir("job", root)
    writer = RunDirWriter(run)
    writer.append(controller_events.RunCreated(run=run.run, name="job", path="/c.yaml"), when)
    writer.append(controller_events.RunEnded(state="succeeded", exit_code=0), when)
    writer.close()
    code_manifest.save_manifest(run, manifest)
    return run


def taken(content: code_manifest.ContentStore, folder: Path, text: str, age: float) -> tuple[int, int, str]:
    path = folder / "file"
    path.write_text(text)
    with path.open("rb") as file:
        size, digest = content.add_file(file)
    os.utime(content.path(digest), (time.time() - age,) * 2)
    return size, 0o644, digest


def clean(home: Path, *arguments: str) -> str:
    argv = [sys.executable, "-m", "clusterctl", "clean", *arguments]
    done = subprocess.run(
        argv, env=os.environ | {"XDG_STATE_HOME": str(home)}, capture_output=True, text=True, check=True
    )
    return done.stdout + done.stderr


def test_content_goes_with_the_last_run_that_needs_it_and_only_when_told(tmp_path: Path) -> None:
    root = tmp_path / "clusterctl" / "runs"
    content = code_manifest.ContentStore(tmp_path / "clusterctl" / "content")
    old, both, young, nobodys = (
        taken(content, tmp_path, text, age)
        for text, age in (("old", LONG_AGO), ("both", LONG_AGO), ("young", 60.0), ("nobody's", LONG_AGO))
    )
    past = ended_run(root, code_manifest.CodeManifest(files={"a": old, "b": both, "c": young}), time.time() - LONG_AGO)
    recent = ended_run(root, code_manifest.CodeManifest(files={"b": both}), time.time())

    def there() -> list[bool]:
        return [content.path(entry[2]).exists() for entry in (old, both, young, nobodys)]

    said = clean(tmp_path, "--older-than", "1h")
    assert there() == [True] * 4
    assert past.path.exists()
    assert "code that no run needs  2 files" in said
    assert "`--yes` removes these" in said

    clean(tmp_path, "--older-than", "1h", "--yes")
    assert there() == [False, True, True, False]
    assert not past.path.exists()
    assert recent.path.exists()


def test_what_a_killed_start_was_storing_is_cleaned_once_it_is_old(tmp_path: Path) -> None:
    content = code_manifest.ContentStore(tmp_path / "clusterctl" / "content")
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(reader, 0)
        os.close(writer)
        content.add_file(open(0, "rb"))
        os._exit(1)
    parts = wait_for(lambda: list(content.root.glob(".*")), what="a file that is stored")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)

    assert content.list_unused((), time.time() - 60) == []
    os.utime(parts[0], (time.time() - LONG_AGO,) * 2)
    assert "code that no run needs  1 file" in clean(tmp_path, "--yes")
    assert list(content.root.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "left", "said"),
    [
        pytest.param(["--keep", "2"], 2, "removed", id="all but the newest, however young"),
        pytest.param(["--keep", "2", "--older-than", "1d"], 4, "4 runs ended within 1d", id="of old ones alone"),
        pytest.param(["--keep", "9"], 4, "nothing to clean: `--keep 9` keeps all 4", id="more than there are"),
        pytest.param([], 4, "nothing to clean: 4 runs ended within 14d; `--older-than 0s`", id="all are young"),
    ],
)
def test_a_number_of_runs_to_keep_is_all_that_decides(tmp_path: Path, options: list[str], left: int, said: str) -> None:
    root = tmp_path / "clusterctl" / "runs"
    runs = [ended_run(root, code_manifest.CodeManifest(), time.time() - 100 + number).path for number in range(4)]

    assert said in clean(tmp_path, *options, "--yes")
    assert [run.exists() for run in runs] == [False] * (4 - left) + [True] * left


def test_what_health_noted_of_machines_goes_once_it_is_old(tmp_path: Path) -> None:
    state = tmp_path / "clusterctl"
    spec = ClusterSpec(name="x", path=str(tmp_path / "cluster.yaml"), hosts=(), job=None)
    health_history.FindingHistory(state, spec).save([], [])
    (note,) = (state / "health").iterdir()

    clean(tmp_path, "--yes")
    assert note.exists()
    os.utime(note, (time.time() - 15 * 86400,) * 2)
    clean(tmp_path)
    assert note.exists()
    clean(tmp_path, "--yes")
    assert not note.exists()


def test_commands_that_are_accepted_at_once_are_all_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    argvs = [("ssh", str(number)) for number in range(60)]

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda argv: trusted_commands.accept_commands([argv]), argvs))

    assert all(map(trusted_commands.is_accepted_command, argvs))


def test_content_that_a_start_uses_again_is_young(tmp_path: Path) -> None:
    content = code_manifest.ContentStore(tmp_path)
    _, _, digest = taken(content, tmp_path, "text", LONG_AGO)

    assert content.list_unused((), time.time() - 60) != []
    assert content.renew(digest)
    assert content.list_unused((), time.time() - 60) == []
    assert not content.renew("0" * 64)


def test_a_folder_of_too_many_files_is_refused_with_the_folders_that_hold_most(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, count in (("data", 7), ("pkg", 2)):
        (source / name / "inner").mkdir(parents=True)
        for number in range(count):
            (source / name / "inner" / str(number)).touch()
    (source / "train.py").touch()
    content = code_manifest.ContentStore(tmp_path / "content")
    sync = SyncSpec(source=str(source))
    assert len(code_manifest.build_manifest(sync, content, max_files=10).files) == 10
    with pytest.raises(RefusedError, match="holds more than 9 files to sync") as refused:
        code_manifest.build_manifest(sync, content, max_files=9)
    assert refused.value.hint == "add to `sync.exclude` what is no code; most of them lie in data/ (7), pkg/ (2)"
