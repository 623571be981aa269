"""What was synced is kept as long as a run needs it, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusterctl.config.spec import SyncSpec
from clusterctl.errors import RefusedError
from clusterctl.run.nodes import code
from clusterctl.run.record import rundir
from clusterctl.run.record.writer import Writer
from clusterctl.run.rules import events

LONG_AGO = 7200.0


def ended_run(root: Path, manifest: code.Manifest, when: float) -> rundir.RunDir:
    run = rundir.create("job", root)
    writer = Writer(run)
    writer.append(events.Created(run=run.run, name="job", path="/c.yaml"), when)
    writer.append(events.Ended(state="succeeded", exit_code=0), when)
    writer.close()
    code.save(run, manifest)
    return run


def taken(content: code.ContentStore, folder: Path, text: str, age: float) -> tuple[int, int, str]:
    path = folder / "file"
    path.write_text(text)
    with path.open("rb") as file:
        size, digest = content.take(file)
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
    content = code.ContentStore(tmp_path / "clusterctl" / "content")
    old, both, young, nobodys = (
        taken(content, tmp_path, text, age)
        for text, age in (("old", LONG_AGO), ("both", LONG_AGO), ("young", 60.0), ("nobody's", LONG_AGO))
    )
    past = ended_run(root, code.Manifest(files={"a": old, "b": both, "c": young}), time.time() - LONG_AGO)
    recent = ended_run(root, code.Manifest(files={"b": both}), time.time())

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


def test_content_that_a_start_uses_again_is_young(tmp_path: Path) -> None:
    content = code.ContentStore(tmp_path)
    _, _, digest = taken(content, tmp_path, "text", LONG_AGO)

    assert content.unused((), time.time() - 60) != []
    assert content.keep(digest)
    assert content.unused((), time.time() - 60) == []
    assert not content.keep("0" * 64)


def test_a_folder_of_too_many_files_is_refused_with_the_folders_that_hold_most(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name, count in (("data", 7), ("pkg", 2)):
        (source / name / "inner").mkdir(parents=True)
        for number in range(count):
            (source / name / "inner" / str(number)).touch()
    (source / "train.py").touch()
    content = code.ContentStore(tmp_path / "content")
    sync = SyncSpec(source=str(source))
    assert len(code.collect(sync, content, most_files=10).files) == 10
    with pytest.raises(RefusedError, match="holds more than 9 files to sync") as refused:
        code.collect(sync, content, most_files=9)
    assert refused.value.hint == "add to `sync.exclude` what is no code; most of them lie in data/ (7), pkg/ (2)"
