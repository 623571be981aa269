"""Which files of a folder are synced, also while it changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clusterctl.agent.protocol.file_list import FOLDER_MODE, LINK_MODE
from clusterctl.config.file_trust import find_upload_obstacle
from clusterctl.config.spec import ClusterSpec, HostSpec, JobSpec, SyncSpec
from clusterctl.errors import RefusedError
from clusterctl.run.nodes import code_exclusions, code_manifest, code_selection

if TYPE_CHECKING:
    from collections.abc import Iterator

EVERYTHING = ["a.py", "pkg/b.py", "prod.env", "secrets.py"]


def write(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path)


def collected(root: Path, content: Path, *exclude: str) -> list[str]:
    sync = SyncSpec(source=str(root), exclude=exclude)
    return sorted(code_manifest.build_manifest(sync, code_manifest.ContentStore(content)).files)


def sent(root: Path, *exclude: str) -> list[str]:
    return [
        one.path
        for one in code_selection.select_files(root, exclude, on_excluded=lambda _one: None)
        if not one.is_folder
    ]


def sent_folders(root: Path, *exclude: str) -> list[str]:
    return [
        one.path for one in code_selection.select_files(root, exclude, on_excluded=lambda _one: None) if one.is_folder
    ]


def left_out(root: Path, *exclude: str) -> dict[str, str]:
    """What is not sent, and by which rule."""
    found: list[code_selection.ExcludedPath] = []
    list(code_selection.select_files(root, exclude, on_excluded=found.append))
    return {one.label: one.rule for one in found}


def test_a_folder_in_which_nothing_is_sent_is_sent_itself(source: Path, content: Path) -> None:
    write(source, "a.py", "runs/old.log", "ignored/a.log", "old/__pycache__/a.pyc", "chosen/data.bin")
    for name in ("logs", "ckpt/step0", "ignored/inner"):
        (source / name).mkdir(parents=True)
    (source / ".gitignore").write_text("*.log\nignored/\nlogs/\n")
    assert sent_folders(source, "*.bin") == ["ckpt/step0", "runs"]
    assert left_out(source)["logs/"] == "`logs/` of .gitignore"
    assert sent_folders(source, "*.bin", "!logs/") == ["ckpt/step0", "logs", "runs"]
    manifest = code_manifest.build_manifest(
        SyncSpec(source=str(source), exclude=()), code_manifest.ContentStore(content)
    )
    assert manifest.files["runs"][:2] == (0, FOLDER_MODE)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def content(tmp_path: Path) -> Path:
    return tmp_path / "content"


@pytest.mark.parametrize(
    ("ignores", "exclude", "missing"),
    [
        pytest.param({}, [], [], id="nothing is excluded"),
        pytest.param({".gitignore": "*.env\n"}, [], ["prod.env"], id="git ignores it"),
        pytest.param({".gitignore": "*.env\n!prod.env\n"}, ["prod.env"], ["prod.env"], id="git lets it in again"),
        pytest.param(
            {".gitignore": "*\n!*.py\n!pkg/\n"}, ["secrets.py"], ["prod.env", "secrets.py"], id="git has a list of some"
        ),
        pytest.param({"pkg/.gitignore": "!b.py\n"}, ["pkg/b.py"], ["pkg/b.py"], id="git lets it in further down"),
        pytest.param({".gitignore": "*.env\n"}, ["!prod.env"], [], id="the cluster file lets it in again"),
    ],
)
def test_what_the_cluster_file_excludes_has_the_last_word(
    source: Path, content: Path, ignores: dict[str, str], exclude: list[str], missing: list[str]
) -> None:
    write(source, *EVERYTHING)
    for path, text in ignores.items():
        (source / path).write_text(text)

    found = collected(source, content, *exclude)

    assert [path for path in EVERYTHING if path not in found] == missing


TREE = [
    "a.py",
    "a.txt",
    "build/x.o",
    "data/keep.csv",
    "data/raw/big.csv",
    "pkg/__init__.py",
    "pkg/build/y.o",
    "pkg/m.py",
    "pkg/m.txt",
]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize(
    "ignores",
    [
        pytest.param({".gitignore": "*.txt\nbuild/\n"}, id="files and folders anywhere"),
        pytest.param({".gitignore": "/build/\n/*.txt\n"}, id="at the top"),
        pytest.param({".gitignore": "*\n!*/\n!*.py\n"}, id="a list of what is let in, from every folder"),
        pytest.param({".gitignore": "*\n!pkg/\n!*.py\n"}, id="a list of what is let in, from one folder"),
        pytest.param({".gitignore": "*\n!*.py\n!.gitignore\n"}, id="a list of what is let in, at the top"),
        pytest.param({".gitignore": "data/*\n!data/keep.csv\n"}, id="one file of a folder"),
        pytest.param({".gitignore": "data/\n!data/keep.csv\n"}, id="nothing comes back from an ignored folder"),
        pytest.param({".gitignore": "data/**\n!data/**/\n!*.csv\n"}, id="two asterisks"),
        pytest.param({".gitignore": "*.py\n", "pkg/.gitignore": "!m.py\n"}, id="a folder of its own mind"),
        pytest.param({".gitignore": "build/\n!pkg/\n"}, id="a folder let in does not let in what it holds"),
        pytest.param({".gitignore": "pkg\n", "pkg/.gitignore": "!m.py\n"}, id="an ignored folder is not asked"),
        pytest.param({".gitignore": "# note\n\n\\#x\n*.[ot]*\n"}, id="notes and ranges"),
    ],
)
def test_what_git_would_take_is_taken(source: Path, ignores: dict[str, str]) -> None:
    write(source, *TREE)
    for path, text in ignores.items():
        (source / path).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=source, check=True)
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(argv, cwd=source, capture_output=True, text=True, check=True)

    assert sent(source) == sorted(listed.stdout.split(), key=lambda p: p.split("/"))


def test_what_vanishes_while_a_folder_is_walked_is_left_out(source: Path) -> None:
    write(source, "a.py", "b.py", "c/d.py", "e.py")
    walk = code_selection.select_files(source, (), on_excluded=lambda _one: None)
    found = [next(walk).path]
    (source / "b.py").unlink()
    shutil.rmtree(source / "c")

    assert [*found, *(one.path for one in walk)] == ["a.py", "e.py"]


def test_a_busy_editor_beside_it_ends_no_sync(source: Path, content: Path) -> None:
    write(source, "a.py")
    over = threading.Event()

    def edit() -> None:
        while not over.is_set():
            for number in range(20):
                write(source, f".{number}.swp", f"{number}/x")
            for number in range(20):
                (source / f".{number}.swp").unlink()
                shutil.rmtree(source / str(number))

    editor = threading.Thread(target=edit)
    editor.start()
    try:
        found = [collected(source, content) for _ in range(60)]
    finally:
        over.set()
        editor.join()

    assert all("a.py" in paths for paths in found)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder in which this process may not do everything, even where it is root's."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o777)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(before)
        shutil.rmtree(folder)


@pytest.mark.parametrize("path", ["model.pt", "data", "data/.gitignore"])
def test_what_cannot_be_read_is_named(unprivileged: Path, path: str) -> None:
    source = unprivileged / "source"
    write(source, "model.pt", "data/.gitignore", "data/b.py")
    (source / path).chmod(0)

    with pytest.raises(RefusedError) as caught:
        collected(source, unprivileged / "content")

    (source / path).chmod(0o700)
    assert str(caught.value) == f"cannot read {source / path}: Permission denied"
    assert "`sync.exclude`" in str(caught.value.hint)


def test_links_that_lead_nowhere_are_left_out(source: Path, content: Path) -> None:
    write(source, "a.py")
    (source / "circle").symlink_to("circle")
    (source / "broken").symlink_to("nothing")
    (source / "inside").symlink_to("a.py")

    assert collected(source, content) == ["a.py", "inside"]


def test_hashes_of_what_is_gone_or_has_changed_are_forgotten(source: Path, content: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(source, "a.py", "b.py")
    write(other, "c.py")

    def known() -> int:
        return sum(len(hashes) for hashes in json.loads((content / "known.json").read_text()).values())

    collected(source, content)
    collected(other, content)
    assert known() == 3
    (source / "b.py").unlink()
    for number in range(5):
        (source / "a.py").write_text(f"edit {number}")
        collected(source, content)
    assert known() == 2
    shutil.rmtree(other)
    collected(source, content)
    assert known() == 1


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "protocol.file.allow=always"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_what_git_tracks_is_sent_though_a_rule_names_it_but_not_what_the_cluster_file_excludes(source: Path) -> None:
    write(source, "a.py", "conf/base.env", "conf/own.env", "build/gen/x.py", "build/y.o", "venv/pyvenv.cfg", "big.pt")
    (source / ".gitignore").write_text("*.env\nbuild/\n")
    git(source, "init", "--quiet")
    git(source, "add", "--force", "a.py", "conf/base.env", "build/gen/x.py", "venv", "big.pt")
    (source / "sub").mkdir()

    assert sent(source, "*.pt") == [".gitignore", "a.py", "build/gen/x.py", "conf/base.env", "venv/pyvenv.cfg"]
    assert left_out(source, "*.pt") == {
        ".git": "`.git` is never sent",
        "big.pt": "`*.pt` of `sync.exclude`",
        "build/y.o": "`build/` of .gitignore",
        "conf/own.env": "`*.env` of .gitignore",
    }
    assert sent(source / "build") == ["gen/x.py", "y.o"]


@needs_git
def test_of_a_submodule_the_content_is_sent_and_an_empty_one_is_named(source: Path, tmp_path: Path) -> None:
    library = tmp_path / "library"
    write(library, "lib.py", "data.bin")
    (library / ".gitignore").write_text("*.bin\n")
    git(library, "init", "--quiet")
    git(library, "add", "--force", ".")
    git(library, "commit", "--quiet", "-m", "x")
    write(source, "a.py")
    (source / ".gitignore").write_text("third_party/\n")
    git(source, "init", "--quiet")
    for name in ("full", "empty"):
        git(source, "submodule", "add", "--quiet", "--force", str(library), f"third_party/{name}")
    git(source, "submodule", "deinit", "--force", "third_party/empty")

    assert [path for path in sent(source) if path.startswith("third")] == [
        "third_party/full/.gitignore",
        "third_party/full/data.bin",
        "third_party/full/lib.py",
    ]
    told = left_out(source)
    assert told["third_party/full/.git"] == "`.git` is never sent"
    assert told["third_party/empty/"] == "an empty submodule"


@needs_git
def test_where_git_cannot_say_what_it_tracks_that_is_told(source: Path) -> None:
    write(source, "a.py", "b.env")
    (source / ".git").write_text("gitdir: /nowhere\n")
    (source / ".gitignore").write_text("*.env\n")

    assert any("git cannot say whether it tracks this" in rule for rule in left_out(source).values())


@pytest.mark.parametrize(
    ("link", "target", "written"),
    [
        pytest.param("to_file", "pkg/m.py", "pkg/m.py", id="to a file"),
        pytest.param("to_folder", "pkg", "pkg", id="to a folder"),
        pytest.param("pkg/up", "../a.py", "../a.py", id="to above"),
        pytest.param("pkg/absolute", "{source}/a.py", "../a.py", id="by an absolute path"),
        pytest.param("pkg/around", "../../source/a.py", "../a.py", id="around the folder"),
    ],
)
def test_links_inside_the_folder_stay_links(source: Path, content: Path, link: str, target: str, written: str) -> None:
    write(source, "a.py", "pkg/m.py")
    (source / link).symlink_to(target.format(source=source))
    store = code_manifest.ContentStore(content)

    manifest = code_manifest.build_manifest(SyncSpec(source=str(source)), store)

    _, mode, digest = manifest.files[link]
    assert (mode, store.path(digest).read_text()) == (LINK_MODE, written)
    assert manifest.excluded == ()


def test_links_to_elsewhere_are_named_with_where_they_lead(source: Path, tmp_path: Path) -> None:
    write(source, "a.py", "data/x.csv")
    write(tmp_path, "outside/b.py")
    (source / ".gitignore").write_text("data/\nignored\n")
    for name, target in {"out.py": "../outside/b.py", "folder": "/tmp", "ignored": "/tmp", "csv": "data/x.csv"}.items():
        (source / name).symlink_to(target)

    assert sent(source) == [".gitignore", "a.py", "csv"]
    assert left_out(source) == {
        "data/": "`data/` of .gitignore",
        "folder -> /tmp": "a link out of the folder",
        "ignored": "`ignored` of .gitignore",
        "out.py -> ../outside/b.py": "a link out of the folder",
        "csv -> data/x.csv": "a link whose target is not sent",
    }


def test_keys_of_ssh_are_never_sent(source: Path) -> None:
    write(source, "a.py", ".ssh/id_rsa", "deploy/.ssh/config")

    assert sent(source, "!.ssh/", "!id_rsa") == ["a.py"]
    assert left_out(source)["deploy/.ssh"] == "`.ssh` is never sent"


def test_a_script_that_is_not_sent_is_refused_with_the_rule(source: Path, content: Path) -> None:
    write(source, "jobs/train.py")
    (source / ".gitignore").write_text("jobs/\n")
    manifest = code_manifest.build_manifest(SyncSpec(source=str(source)), code_manifest.ContentStore(content))
    job = JobSpec(script="jobs/train.py")
    spec = ClusterSpec(name="x", path="/x", hosts=(), job=job, sync=SyncSpec(source=str(source)))

    with pytest.raises(RefusedError, match="`jobs/train.py` is not sent to nodes, left out by `jobs/` of .gitignore"):
        code_exclusions.refuse_missing_script(spec, manifest.files, manifest.excluded)


@pytest.mark.parametrize(
    ("ignores", "exclude", "said"),
    [
        pytest.param({".gitignore": "data\n"}, [], "data/ (.gitignore); {data/}", id="folder"),
        pytest.param(
            {"pkg/.gitignore": "*.csv\n"},
            [],
            "pkg/a.csv and 1 more (pkg/.gitignore); {pkg/a.csv}",
            id="further down",
        ),
        pytest.param(
            {}, ["data/", "*.csv"], "data/ (sync.exclude), pkg/a.csv and 1 more (sync.exclude); ", id="exclude"
        ),
        pytest.param(
            {".gitignore": "/*\n!/a.py\n"}, [], "data/ and 5 more (.gitignore); {data/}", id="a list of what is let in"
        ),
        pytest.param(
            {".gitignore": "*.log\n.env\npkg\n/data\nx.bin\n"},
            [],
            "data/ (.gitignore), pkg/ (.gitignore), x.bin (.gitignore), … 2 more; {data/}",
            id="folders first, then data, and not too many",
        ),
        pytest.param(
            {"dist/.gitignore": "*\n"},
            [],
            "dist/m-1.whl and 3 more (dist/.gitignore); {dist/m-1.whl}",
            id="a wheel, and not the file that says so",
        ),
        pytest.param(
            {".gitignore": "/dist/*\n!m-1.whl\n"},
            [],
            "dist/large.tar.gz and 2 more (.gitignore); {dist/large.tar.gz}",
            id="the largest archive",
        ),
        pytest.param({".gitignore": ".env\n"}, [], ".env (.gitignore); ", id="a secret, which nobody is told to send"),
        pytest.param({".gitignore": "__pycache__/\n.pytest_cache/\n*.pyc\n.venv\n"}, [], None, id="what tools make"),
    ],
)
def test_what_rules_of_a_person_leave_out_is_said_in_a_line(
    source: Path, content: Path, ignores: dict[str, str], exclude: list[str], said: str | None
) -> None:
    write(source, "a.py", "a.log", ".env", "x.bin", "data/x.csv", "pkg/a.csv", "pkg/b.csv")
    write(source, "__pycache__/a.pyc", ".pytest_cache/x", "old.pyc", ".venv/pyvenv.cfg")
    write(source, "dist/a-notes", "dist/b.zip", "dist/large.tar.gz", "dist/m-1.whl")
    (source / "dist/large.tar.gz").write_bytes(bytes(5000))
    for path, text in ignores.items():
        (source / path).write_text(text)

    manifest = code_manifest.build_manifest(
        SyncSpec(source=str(source), exclude=tuple(exclude)), code_manifest.ContentStore(content)
    )

    told = code_exclusions.describe_user_exclusions(manifest.excluded)
    if said is None:
        assert told is None
        return
    rest, _, way = said.rstrip("}").partition("{")
    remedy = f"`sync: {{exclude: ['!{way}']}}` sends {way}, " if way else ""
    assert told == f"not sent: {rest}{remedy}`clusterctl sync --dry-run -v` lists all"
    assert not way or any(path.startswith(way) for path in collected(source, content, *exclude, f"!{way}"))


def test_pointers_of_git_lfs_are_named_as_what_they_are(source: Path, content: Path) -> None:
    write(source, "a.py")
    oid = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
    (source / "m.bin").write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 12345\n")
    store = code_manifest.ContentStore(content)

    manifest = code_manifest.build_manifest(SyncSpec(source=str(source)), store)
    told = list(code_exclusions.list_sync_warnings(manifest, store))

    assert told == ["`m.bin`: pointers of Git LFS, without the content: `git lfs pull` fetches the content"]


@pytest.mark.parametrize(
    "folder",
    [
        pytest.param("/", id="all"),
        pytest.param("/root", id="that of root"),
        pytest.param("/home", id="the folder of homes"),
        pytest.param("/home/somebody", id="another's"),
        pytest.param("~", id="the user's own"),
        pytest.param("~/..", id="what holds it"),
        pytest.param("{link}", id="a link to it"),
        pytest.param("~/.ssh", id="the keys in it"),
    ],
)
def test_a_home_is_no_code_and_is_refused(
    folder: str, source: Path, content: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "people/me/.ssh/id_rsa")
    monkeypatch.setenv("HOME", str(tmp_path / "people/me"))
    (tmp_path / "link").symlink_to("people/me")
    path = os.path.expanduser(folder.format(link=tmp_path / "link"))
    if not os.path.isdir(path):
        assert find_upload_obstacle(path) == "is a home directory"
        return

    with pytest.raises(RefusedError) as refused:
        code_manifest.build_manifest(SyncSpec(source=path), code_manifest.ContentStore(content))

    assert "not sent to nodes" in str(refused.value)
    assert "`sync.source`" in str(refused.value.hint)
    write(source, "a.py")
    assert find_upload_obstacle(str(source)) is None


PT = "names `ckpt/last.pt`, which is not sent to nodes, left out by `*.pt` of .gitignore"
PT += ": `sync: {exclude: ['!ckpt/last.pt']}` sends ckpt/last.pt"
DATA = (
    "names `data/a.csv`, which is not sent to nodes, left out by `data/` of `sync.exclude`: remove this rule to send it"
)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        pytest.param({"script": "a.py", "args": ("--load", "ckpt/last.pt")}, [f"job.args[1] {PT}"], id="argument"),
        pytest.param({"script": "a.py", "args": ("--load=./ckpt/last.pt",)}, [f"job.args[0] {PT}"], id="equals"),
        pytest.param({"command": "python a.py --load='ckpt/last.pt'; x"}, [f"job.command {PT}"], id="text"),
        pytest.param({"command": ("python", "a.py", "data/a.csv")}, [f"job.command {DATA}"], id="list_in_a_folder"),
        pytest.param({"script": "a.py", "args": ("--load", "ckpt/none.pt", "a.csv", ".")}, [], id="not_there_or_sent"),
        pytest.param(
            {"script": "a.py", "args": ("--output_dir", "data", "--log-dir=data")}, [], id="written_by_the_job"
        ),
        pytest.param({"command": "python a.py > data/a.csv; rm -f ckpt/last.pt"}, [], id="written_by_the_shell"),
    ],
)
def test_an_argument_that_names_what_is_not_sent_is_warned_of(
    source: Path, job: dict[str, Any], said: list[str]
) -> None:
    write(source, "a.py", "a.csv", "ckpt/last.pt", "data/a.csv")
    (source / ".gitignore").write_text("*.pt\n")
    spec = ClusterSpec(
        name="demo",
        path="cluster.yaml",
        hosts=(HostSpec(name="a", host="a"),),
        job=JobSpec(**job),
        sync=SyncSpec(source=str(source), exclude=("data/",)),
    )

    assert code_exclusions.list_arguments_with_unsent_files(spec) == said
