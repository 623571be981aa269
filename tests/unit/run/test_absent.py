"""What a rank did not find is looked for in the code folder of the head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.config.spec import SyncSpec
from clusterctl.run.nodes import code_exclusions, code_manifest
from clusterctl.run.nodes.code_selection import EMPTY_SUBMODULE, ExcludedPath

THERE = ["train.py", "tools/helper.py", "src/mypkg/__init__.py", "gen/tables.py", "libs/inner/__init__.py", "a.env"]
THERE += ["dist/my_lib-0.1-py3-none-any.whl", "dist/my_lib-0.1.tar.gz", "wheels/Fast.Attn-2.0-cp311.whl"]
NO_MODULE = "rank 1 failed first: ModuleNotFoundError: No module named "
NO_FILE = "rank 1 failed first: FileNotFoundError: [Errno 2] No such file or directory: "


@pytest.fixture
def folder(tmp_path: Path) -> code_exclusions.CodeFolder:
    source = tmp_path / "source"
    for path in THERE:
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).write_text("")
    (source / ".gitignore").write_text("gen/\nlibs/\n*.env\nwheels/\n")
    (source / "dist/.gitignore").write_text("*\n")
    sync = SyncSpec(source=str(source))
    manifest = code_manifest.build_manifest(sync, code_manifest.ContentStore(tmp_path / "content"))
    (source / "late.py").write_text("")
    (source / "data").mkdir()
    (source / "data/x.csv").write_text("")
    found = code_exclusions.scan_code_folder(sync, manifest.files)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(
            f"{NO_MODULE}'gen'", "`gen` is in the code folder, and left out by `gen/` of .gitignore", id="package"
        ),
        pytest.param(
            f"{NO_MODULE}'gen.tables'", "`gen/tables.py` is in the code folder, and left out by `gen/`", id="part"
        ),
        pytest.param(f"{NO_MODULE}'inner'", "`libs/inner/__init__.py` is in the code folder, and left out", id="below"),
        pytest.param(f"{NO_MODULE}'mypkg.models'", None, id="a part that is nowhere"),
        pytest.param(f"{NO_MODULE}'mypkg'", "`env: {PYTHONPATH: src}` has it look there", id="another folder"),
        pytest.param(f"{NO_MODULE}'helper'", "`env: {PYTHONPATH: tools}` has it look there", id="another script"),
        pytest.param(f"{NO_MODULE}'train'", "`env: {PYTHONPATH: .}` has it look there", id="the top"),
        pytest.param(f"{NO_MODULE}'late'", "`late.py` is in the code folder now, but was not when", id="later"),
        pytest.param(f"{NO_MODULE}'torch'", None, id="a package of others"),
        pytest.param(
            f"{NO_MODULE}'my_lib.sub'",
            "`dist/my_lib-0.1-py3-none-any.whl` is in the code folder, and left out by `*` of dist/.gitignore: "
            "`sync: {exclude: ['!dist/my_lib-0.1-py3-none-any.whl']}` sends it",
            id="a wheel",
        ),
        pytest.param(
            f"{NO_MODULE}'fast_attn'",
            "`wheels/Fast.Attn-2.0-cp311.whl` is in the code folder, and left out by `wheels/` of .gitignore: "
            "`sync: {exclude: ['!wheels/']}` sends it",
            id="a wheel in a folder",
        ),
        pytest.param(f"{NO_MODULE}'my'", None, id="the beginning of the name of another package"),
        pytest.param(
            f"{NO_FILE}'a.env'", "`a.env` is in the code folder, and left out by `*.env` of .gitignore", id="file"
        ),
        pytest.param(f"{NO_FILE}'/home/me/work/llm/gen/x'", None, id="a file that is nowhere"),
        pytest.param(
            f"{NO_FILE}'/home/me/work/llm/gen/tables.py'", "`gen/tables.py` is in the code", id="by its whole path"
        ),
        pytest.param(f"{NO_FILE}'/etc/a.env'", None, id="of the machine"),
        pytest.param(
            f"{NO_FILE}'helper.py'",
            "`tools/helper.py` is in the code folder: the ranks start in the top folder",
            id="deeper",
        ),
        pytest.param(f"{NO_FILE}'data/x.csv'", "`data/x.csv` is in the code folder now", id="a later file"),
        pytest.param("python: can't open file 'gen/tables.py': [Errno 2]", "`gen/tables.py` is in the", id="of Python"),
    ],
)
def test_what_is_in_the_folder_is_told_with_what_keeps_it_from_the_nodes(
    folder: code_exclusions.CodeFolder, message: str, reason: str | None
) -> None:
    told = code_exclusions.explain_missing_file(message, folder, ["~/work/llm"])
    assert told is None if reason is None else reason in str(told)


def test_no_setting_is_advised_that_is_there_already(folder: code_exclusions.CodeFolder) -> None:
    told = code_exclusions.explain_missing_file(f"{NO_MODULE}'mypkg'", replace(folder, pythonpath="src:."), [])
    assert "env:" not in str(told)
    assert "`export PYTHONPATH=$PWD/src`" in str(told)


def test_a_module_on_the_pythonpath_of_this_shell_is_told(tmp_path: Path) -> None:
    (tmp_path / "otherpkg").mkdir()
    (tmp_path / "otherpkg/__init__.py").touch()
    (tmp_path / "one.py").touch()
    for name, place in (("otherpkg.sub", "otherpkg/__init__.py"), ("one", "one.py")):
        told = code_exclusions.explain_module_on_pythonpath(f"{NO_MODULE}'{name}'", f"/nowhere:{tmp_path}")
        assert f"`{tmp_path}/{place}` is on the PYTHONPATH of this shell" in str(told)
    assert code_exclusions.explain_module_on_pythonpath(f"{NO_MODULE}'torch'", f"{tmp_path}") is None
    assert code_exclusions.explain_module_on_pythonpath("rank 1 failed", f"{tmp_path}") is None


def test_a_module_of_an_empty_submodule_is_told(tmp_path: Path) -> None:
    excluded = [ExcludedPath("third_party/apex/", EMPTY_SUBMODULE, remedy="`git submodule update --init` fills it")]
    folder = code_exclusions.CodeFolder(source=str(tmp_path), sent=(), excluded=excluded)
    told = code_exclusions.explain_missing_file(f"{NO_MODULE}'apex.amp'", folder, [])
    assert told == "`third_party/apex/` is an empty submodule: `git submodule update --init` fills it"
