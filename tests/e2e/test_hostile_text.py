"""Whatever nodes, workers and strangers say: of what a command prints, nothing steers a terminal or looks like ours."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import pytest

from clusterctl.agent.protocol import events as node_events
from clusterctl.cli.main import run as run_command
from clusterctl.run.rules import controller_events
from tests.e2e import hostile
from tests.e2e.terminal import Terminal
from tests.lab.waiting import wait_for

if TYPE_CHECKING:
    from tests.e2e.conftest import LocalHead, MakeHead

JOB = f"""\
import json, os, time

rank = os.environ["RANK"]
text = {hostile.TEXT!r}
print(text, flush=True)
folder = os.environ["CLUSTERCTL_STATUS_DIR"]
if rank == "1":
    with open(os.path.join(folder, f"rank-{{rank}}.status.json"), "w") as file:
        json.dump({{"step": text, "phase": {{"name": text, "limit_s": 5}}, "pid": os.getpid(), "beats": text}}, file)
while not os.path.exists("go"):
    time.sleep(0.05)
if rank == "1":
    raise ValueError(text)
time.sleep(600)
"""
ENDS = {
    controller_events.RunCreated,
    controller_events.AttemptStarted,
    controller_events.StartFailed,
    controller_events.RunEnded,
    node_events.Finished,
}
ANY = {*get_args(controller_events.ControllerEvent), *get_args(node_events.Event)} - ENDS
VARIANTS: dict[str, tuple[hostile.Rewrite, bool, set[type]]] = {
    "ended": (hostile.texts, True, ANY),
    "going on": (hostile.texts, False, ANY),
    "not started": (hostile.texts, True, {controller_events.StartFailed}),
    "all of it": (hostile.everything, True, ANY),
}
READERS = [
    ("ps", "-a"),
    ("ps", "-a", "--json"),
    ("ps", "-a", "-q"),
    ("status",),
    ("status", "-v"),
    ("status", "--json"),
    ("logs", "--all-ranks", "-t"),
    ("logs", "--format", "json"),
    ("logs", "-f", "--rank", "0-2"),
    ("attach",),
    ("attach", "--all-ranks", "-v"),
    ("wait", "--timeout", "0.1s"),
    ("wait", "--timeout", "0.1s", "--json"),
    ("stats",),
    ("stats", "--json"),
    ("top",),
    ("stacks",),
    ("why",),
    ("why", "--json"),
    ("report", "-o", "-"),
    ("report", "--trace", "-o", "-"),
    ("clean", "--older-than", "0s"),
]
WITHOUT_RUN = ("ps", "clean")


@pytest.fixture(scope="module")
def head(make_head: MakeHead) -> LocalHead:
    head = make_head()
    (head.folder / "job.py").write_text(JOB)
    head.write_local({"script": "job.py", "grace": "1s"}, workers=(1, 2))
    return head


@pytest.fixture(scope="module")
def live(head: LocalHead) -> str:
    """What `up` shows on a terminal of a run with hostile workers."""
    without_bell = head.__class__(head.folder, {**head.env, "CLUSTERCTL_NO_BELL": "1"})
    with without_bell.terminal("up", "--no-health", "--verbose") as screen:
        screen.expect(hostile.MARK)
        wait_for(lambda: len(samples(head)) == 2, what="a sample of each node")
        (head.folder / "go").touch()
        screen.wait()
        return screen.written


def samples(head: LocalHead) -> list[Path]:
    found = Path(head.env["XDG_STATE_HOME"]).glob("clusterctl/runs/*/nodes/*/samples.jsonl")
    return [path for path in found if path.read_bytes().endswith(b"\n")]


@pytest.fixture(scope="module")
def run(head: LocalHead, live: str) -> str:
    (found,) = head.json("ps", "-a")
    return str(found["run"])


@pytest.fixture(scope="module")
def states(head: LocalHead, run: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """States of heads that have this one run, by what is hostile in it."""
    made = {name: tmp_path_factory.mktemp("state") for name in VARIANTS}
    for name, (rewrite, ended, more) in VARIANTS.items():
        order = sorted(more, key=lambda kind: kind.__name__)
        hostile.make(Path(head.env["XDG_STATE_HOME"]), made[name], run, rewrite, ended=ended, more=order)
    return made


def test_an_up_with_hostile_workers_shows_them_harmlessly(live: str) -> None:
    assert hostile.found_in(live, terminal=True) == []
    assert live.count(hostile.MARK) > 1


class Captured(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined,no-any-return]


@contextlib.contextmanager
def streams(state: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    """A command in this process, with both streams in one pipe."""
    shown = Captured()
    monkeypatch.setenv("XDG_STATE_HOME", str(state))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        yield shown


def with_run(arguments: tuple[str, ...], run: str) -> list[str]:
    return [*arguments] if arguments[0] in WITHOUT_RUN else [arguments[0], run, *arguments[1:]]


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_of_a_hostile_run_acts_behind_a_pipe(
    variant: str,
    arguments: tuple[str, ...],
    states: dict[str, Path],
    run: str,
    head: LocalHead,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with streams(states[variant], head.folder, monkeypatch) as shown:
        run_command(with_run(arguments, run))

    assert shown.text
    assert hostile.found_in(shown.text) == []


@pytest.mark.parametrize(
    ("variant", "arguments"),
    [
        ("ended", ("status",)),
        ("ended", ("attach",)),
        ("ended", ("logs", "--all-ranks")),
        ("going on", ("status", "--json")),
        ("going on", ("status",)),
        ("going on", ("attach", "-v")),
        ("not started", ("attach",)),
    ],
    ids=str,
)
def test_hostile_text_is_shown_and_not_hidden(
    variant: str,
    arguments: tuple[str, ...],
    states: dict[str, Path],
    run: str,
    head: LocalHead,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with streams(states[variant], head.folder, monkeypatch) as shown:
        run_command(with_run(arguments, run))

    assert hostile.MARK in shown.text


def test_nothing_acts_where_a_number_is_text_whichever_it_is(
    states: dict[str, Path], run: str, head: LocalHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: set[str] = set()

    def note(key: str, value: object) -> object:
        if hostile.may_be_number(value):
            names.add(key)
        return value

    source, order = states["going on"], sorted(ANY, key=lambda kind: kind.__name__)
    hostile.make(source, tmp_path / "noted", run, note, ended=False)
    assert {"pid", "exit_code", "cpu_s"} <= names
    for name in sorted(names):
        hostile.make(source, tmp_path / name, run, hostile.number(name), ended=False, more=order)
        for arguments in (("ps", "-a"), ("status", run), ("attach", run)):
            with streams(tmp_path / name, head.folder, monkeypatch) as shown:
                run_command(arguments)

            assert shown.text, name
            assert hostile.found_in(shown.text) == [], name


@pytest.mark.parametrize("arguments", READERS, ids=" ".join)
def test_nor_does_it_on_a_terminal(
    arguments: tuple[str, ...], states: dict[str, Path], run: str, head: LocalHead
) -> None:
    env = {**head.env, "XDG_STATE_HOME": str(states["going on"])}
    with Terminal(*with_run(arguments, run), folder=head.folder, env=env) as screen:
        if arguments[0] == "top":
            screen.expect("q leave")
            screen.press("q")
        screen.wait()

        assert screen.shown
        assert hostile.found_in(screen.written, terminal=True) == []


def test_a_hostile_recording_of_nodes_is_judged_and_shown_harmlessly(
    head: LocalHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = head.folder / "recording.json"
    assert head.run("health", "--record", str(path)).returncode == 0
    for rewrite in (hostile.texts, hostile.everything):
        told = json.loads(path.read_text())
        told["nodes"] = [{**node, "facts": hostile.rewritten(node["facts"], rewrite)} for node in told["nodes"]]
        formats = [("--format", name) for name in ("json", "ndjson", "prometheus", "junit", "nagios")]
        for form in ((), ("-v",), *formats):
            (head.folder / "hostile.json").write_text(json.dumps(told))
            with streams(head.folder, head.folder, monkeypatch) as shown:
                run_command(["health", "--replay", "hostile.json", *form])

            assert shown.text
            assert hostile.found_in(shown.text) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("exec", "--stream", "--", "cat", "said"),
        ("exec", "--json", "--", "cat", "said"),
        ("exec", "--", "sh", "-c", "cat said >&2; exit 3"),
        ("sync", "--pull", "*forged*"),
        ("config",),
        ("config", "--json"),
        ("config", "--env", "0"),
        ("up", "--dry-run"),
        ("up", "--dry-run", "--json"),
        ("nothing" + hostile.TEXT,),
        ("status", "nobody" + hostile.TEXT),
    ],
    ids=lambda arguments: " ".join(arguments)[:30],
)
@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
def test_nothing_that_nodes_send_or_files_hold_acts_on_a_terminal(
    make_head: MakeHead, arguments: tuple[str, ...], terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_head()
    (head.folder / "job.py").touch()
    (head.folder / hostile.TEXT.replace("/", "|")).write_text("x")
    said = head.folder / "said"
    said.write_text(hostile.TEXT)
    words = [word.replace("said", str(said)) for word in arguments]
    head.write_local({"script": "job.py"}, env={"SAID": hostile.TEXT})
    if terminal:
        with head.terminal(*words) as screen:
            screen.wait()
            shown = screen.written
    else:
        with streams(head.folder, head.folder, monkeypatch) as captured:
            run_command(words)
        shown = captured.text

    assert hostile.MARK in shown
    assert hostile.found_in(shown, terminal=terminal) == []


@pytest.mark.parametrize("form", [(), ("--diff",)], ids=["folded", "diff"])
def test_output_of_several_lines_stands_below_the_name_of_its_node(head: LocalHead, form: tuple[str, ...]) -> None:
    said = head.folder / "said"
    said.write_text(hostile.TEXT)
    done = head.run("exec", *form, "--", "cat", str(said))

    assert done.stdout.splitlines()[1].startswith("localhost.")
    assert hostile.found_in(done.stdout, speaking=True) == []
