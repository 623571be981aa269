"""The messages of a run leave once, within their limits, whatever the targets answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.config.spec import ClusterSpec, HostSpec, NotifySpec, SecretSpec
from clusterctl.run.controller.notifier import Notifier
from clusterctl.run.record import rundir
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.rundir import VERDICT_TEXT, RunDir
from clusterctl.run.rules import controller_events as head
from tests.hook_server import HookServer, serve_hooks
from tests.lab.waiting import wait_for


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[HookServer]:
    with serve_hooks() as server:
        monkeypatch.setenv("HOOK", server.url)
        yield server


def make_spec(folder: Path, limit: int = 10, command: tuple[str, ...] = (), hook: str | None = "HOOK") -> ClusterSpec:
    source = None if hook is None else SecretSpec(env=hook)
    notify = NotifySpec(webhook=source, command=command, max_per_minute=limit)
    hosts = (HostSpec(name="box", host="box"),)
    return ClusterSpec(
        name="llm", path=str(folder / "cluster.yaml"), hosts=hosts, job=None, notify=notify, secrets={"KEY": "hidden"}
    )


def trouble(text: str) -> head.HealthChanged:
    return head.HealthChanged(node="box", gpu=None, check="x", key=text, status="WARN", message=text)


def make_run(folder: Path, *events: head.ControllerEvent) -> RunDir:
    run = rundir.create_run_dir("llm", folder / "runs")
    writer = RunDirWriter(run)
    for number, event in enumerate(events):
        writer.append(event, 1000.0 + number)
    writer.close()
    return run


def send(run: RunDir, spec: ClusterSpec) -> list[str]:
    """Send the messages of a run that has ended; return the notes."""
    notes: list[str] = []
    notifier = Notifier(run, spec, notes.append)
    notifier.start()
    notifier.finish()
    return notes


FAILED = head.RunEnded(state="failed", exit_code=100)


def test_each_message_is_sent_once_also_by_a_second_controller(tmp_path: Path, hooks: HookServer) -> None:
    run, spec = make_run(tmp_path, trouble("one"), trouble("two"), FAILED), make_spec(tmp_path)
    (run.path / VERDICT_TEXT).write_text("crash EXCEPTION, certain: rank 3 said hidden\n")

    assert send(run, spec) + send(run, spec) == []
    texts = [body["text"] for body in hooks.accepted]
    verdict = "crash EXCEPTION, certain: rank 3 said ***"
    assert texts == ["one", "two", f"after 17 min, exit code 100\n{verdict}"]
    assert not any(body["repeat"] for body in hooks.accepted)
    assert "s3same" not in "".join(path.read_text() for path in run.path.glob("notify-*"))


def test_a_message_that_a_dead_controller_may_have_sent_is_marked(tmp_path: Path, hooks: HookServer) -> None:
    run, spec = make_run(tmp_path, trouble("one"), trouble("two")), make_spec(tmp_path)
    send(run, spec)
    journal = run.path / "notify-webhook.jsonl"
    lines = journal.read_text().splitlines()
    journal.write_text("\n".join(lines[:-1]) + '\n{"id": "torn')

    send(run, spec)

    assert [(body["text"], body["repeat"]) for body in hooks.accepted] == [
        ("one", False),
        ("two", False),
        ("two", True),
    ]


def test_the_limit_leaves_out_messages_but_never_the_last(tmp_path: Path, hooks: HookServer) -> None:
    run = make_run(tmp_path, *(trouble(str(number)) for number in range(30)), FAILED)

    send(run, make_spec(tmp_path, limit=4))

    texts = [body["text"] for body in hooks.accepted]
    assert texts[:-1] == ["0", "1", "2", "3"]
    assert texts[-1].endswith("26 messages before were left out (notify.max_per_minute)")


def test_a_server_that_fails_gets_the_message_again_and_one_that_refuses_does_not(
    tmp_path: Path, hooks: HookServer
) -> None:
    answers = iter([500, 0, 429, 200, 404])
    hooks.answer = lambda _: next(answers)
    run = make_run(tmp_path, head.RunEnded(state="succeeded", exit_code=0))

    assert send(run, make_spec(tmp_path)) == []
    notes = send(make_run(tmp_path, FAILED), make_spec(tmp_path))

    assert [(receipt.status, receipt.body["repeat"]) for receipt in hooks.receipts] == [
        (500, False), (0, True), (429, True), (200, True), (404, False),
    ]  # fmt: skip
    assert notes == ["notify.webhook: a message was not sent: it answered 404"]


def test_a_target_that_fails_does_not_delay_another(tmp_path: Path, hooks: HookServer) -> None:
    said = tmp_path / "said"
    hooks.answer = lambda body: 500 if body["event"] == "node" else 200
    program = ("sh", "-c", f'cat; echo "$CLUSTERCTL_NOTIFY_TEXT" >> {said}')
    run = make_run(tmp_path, trouble("one"), trouble("two"))
    notifier = Notifier(run, make_spec(tmp_path, command=program), lambda _: None)
    notifier.start()

    wait_for(lambda: said.exists() and said.read_text() == "one\ntwo\n", what="the program")
    assert {receipt.body["text"] for receipt in hooks.receipts} <= {"one"}
    notifier.finish()
    results = [json.loads(line)["result"] for line in (run.path / "notify-webhook.jsonl").read_text().splitlines()]
    assert results == ["sending", "failed", "sending", "failed"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        pytest.param(("./none",), "it cannot be started: No such file or directory", id="missing"),
        pytest.param(("a\0b",), "one of its arguments contains a null byte", id="null"),
    ],
)
def test_a_program_that_cannot_start_is_named_once(tmp_path: Path, command: tuple[str, ...], said: str) -> None:
    notes = send(make_run(tmp_path, trouble("one"), FAILED), make_spec(tmp_path, command=command, hook=None))
    assert notes == [f"notify.command: a message was not sent: {said}"]


def test_a_controller_without_the_variable_says_so(tmp_path: Path) -> None:
    notes = send(make_run(tmp_path, FAILED), make_spec(tmp_path, hook="NOWHERE_SET"))
    assert notes == ["notify.webhook: the variable NOWHERE_SET is not set, so no message is sent"]


@pytest.mark.timeout(60)
def test_a_url_in_a_file_that_hangs_delays_neither_the_run_nor_another_target(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hook")
    spec = make_spec(tmp_path, command=("sh", "-c", f"cat >{tmp_path}/got"))
    spec = replace(spec, notify=replace(spec.notify, webhook=SecretSpec(file=str(tmp_path / "hook"))))
    notifier = Notifier(make_run(tmp_path, trouble("one")), spec, lambda _: None)
    notifier.start()

    wait_for((tmp_path / "got").exists, what="the program")
    (tmp_path / "hook").write_text("")
