"""People are told of a run: once each, in time, whatever dies and whatever the servers answer."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from clusterctl.run.record.state_reader import LineTail
from clusterctl.run.rules import controller_events
from clusterctl.run.rules.notification import Message, MessageFold
from tests.documented import typed
from tests.e2e.conftest import LocalHead
from tests.hook_server import HookServer, serve_hooks
from tests.lab.faulty import controller_pid, run_dir
from tests.lab.head_cli import Head
from tests.lab.locks import lock_holder
from tests.lab.waiting import wait_for

KILLS = 50 if "CLUSTERCTL_LONG" in os.environ else 2
LIMIT_S = 10.0
CRASHES = "while [ ! -e go ]; do sleep 0.05; [ -e crash ] && code=$(cat crash) && rm crash && exit $code; done; true"


@pytest.fixture
def hooks(head: LocalHead) -> Iterator[HookServer]:
    with serve_hooks() as server:
        head.env["HOOK"] = server.url  # type: ignore[index]
        yield server


def fail_at_random(choose: random.Random) -> Any:
    """Return an answer that fails for a message twice at most: refused, ended, or answered too late."""
    failed: Counter[str] = Counter()

    def answer(body: dict[str, Any]) -> int:
        failed[body["id"]] += 1
        if failed[body["id"]] > 2 or choose.random() < 0.5:
            return 200
        if choose.random() < 0.3 and failed[body["id"]] == 1:
            time.sleep(5.0)
            return 0
        return choose.choice([500, 503, 429, 0])

    return answer


def expected_messages(folder: Path) -> list[Message]:
    fold, messages = MessageFold(folder.name), []
    for line in LineTail(folder / "events.jsonl").read_new_lines():
        decoded = controller_events.decode(line)
        message = fold.add(*decoded[1:]) if decoded is not None else None
        messages += [] if message is None else [message]
    return messages


def is_in(text: str, file: Path) -> bool:
    return text in file.read_text()


@pytest.mark.timeout(1800 if KILLS > 2 else 240)
def test_each_message_arrives_once_or_marked_though_controllers_die(head: LocalHead, hooks: HookServer) -> None:
    choose = random.Random(38)
    hooks.answer = fail_at_random(choose)
    restart = {"max_restarts": 1000, "backoff": 0}
    notify = {"webhook": {"env": "HOOK"}, "max_per_minute": 1000}
    head.write_local({"command": CRASHES, "grace": "1s"}, restart=restart, notify=notify, sync="none")
    run = head.start()
    folder = run_dir(head, run)
    gaps = []

    def accepted() -> set[str]:
        return {body["id"] for body in hooks.accepted}

    for number in range(KILLS):
        (head.folder / "crash.new").write_text(str(3 + number))
        (head.folder / "crash.new").rename(head.folder / "crash")
        time.sleep(choose.uniform(0.0, 1.5))
        os.kill(controller_pid(head, run), signal.SIGKILL)
        died = time.time()
        wait_for(lambda: lock_holder(folder / "lock") is None, what="the controller to be gone")
        watcher = Head.start(head, "attach", "--adopt", run)
        wait_for(lambda: lock_holder(folder / "lock"), what="the next controller")
        gaps.append((died, time.time()))
        watcher.send_signal(signal.SIGKILL)
        watcher.communicate()
        begun = f'"attempt","attempt":{number + 1}'
        wait_for(partial(is_in, begun, folder / "events.jsonl"), what="a restart")
        wait_for(lambda: {m.id for m in expected_messages(folder)} <= accepted(), what="the messages")
    (head.folder / "go").touch()
    assert head.run("wait", run).returncode == 0
    expected = expected_messages(folder)
    wait_for(lambda: {m.id for m in expected} <= accepted(), what="the last message")

    assert [m.event.value for m in expected] == ["start", *["restart"] * KILLS, "end"]
    delays = []
    for message in expected:
        receipts = sorted((r for r in hooks.receipts if r.body["id"] == message.id), key=lambda r: r.time)
        # A controller that died just before it sent a message makes the first one that arrives a repeat, too.
        assert all(r.body["repeat"] for r in receipts[1:])
        arrived = next(r.time for r in receipts if r.status == 200)
        began = max([message.time, *(adopted for died, adopted in gaps if message.time - 1 <= died <= arrived)])
        delays.append(arrived - began)
    repeated = sum(count > 1 for count in Counter(r.body["id"] for r in hooks.receipts).values())
    print(f"{KILLS} kills, {len(expected)} messages, {len(hooks.receipts)} receipts, {repeated} messages repeated")
    print(f"longest delay {max(delays):.1f} s, median {sorted(delays)[len(delays) // 2]:.1f} s")
    assert KILLS == 2 or max(delays) <= LIMIT_S


def test_a_server_that_never_answers_costs_the_run_nothing(head: LocalHead, hooks: HookServer) -> None:
    gate = Event()
    hooks.answer = lambda _: 200 if gate.wait() else 0
    head.write_local({"command": "true"}, notify={"webhook": {"env": "HOOK"}}, sync="none")

    done = head.run("up", "--no-health")
    assert (done.returncode, hooks.receipts) == (0, [])
    gate.set()
    wait_for(lambda: {body["event"] for body in hooks.accepted} == {"start", "end"}, what="both messages")
    assert "s3same" not in done.stdout + done.stderr
    (run,) = (Path(head.env["XDG_STATE_HOME"]) / "clusterctl" / "runs").iterdir()
    assert not any(b"s3same" in path.read_bytes() for path in run.rglob("*") if path.is_file())


def test_a_test_message_shows_what_each_target_answers(head: LocalHead, hooks: HookServer) -> None:
    hooks.answer = lambda body: 200 if "id" in body else 503
    hook = {"env": "HOOK"}
    notify = {"webhook": hook, "slack": hook, "discord": {"env": "NOBODY"}, "command": ["sh", "-c", "cat > said"]}
    head.env["NOBODY"] = "http://127.0.0.1:1/s3same"  # type: ignore[index]
    head.write_local({"command": "true"}, notify=notify)

    done = head.run(*typed("clusterctl notify --test"), "--json")

    assert done.returncode == 100, done.stderr
    assert [(entry["target"], entry["ok"], entry["answer"]) for entry in json.loads(done.stdout)] == [
        ("slack", False, "it answered 503"),
        ("discord", False, "Connection refused"),
        ("webhook", True, "200"),
        ("command", True, "exit code 0"),
    ]
    assert "s3same" not in done.stdout + done.stderr
    assert (head.folder / "said").read_text().startswith("local: a test message of clusterctl\n")


@pytest.mark.parametrize(
    ("env", "is_called"),
    [
        pytest.param({}, True, id="terminal"),
        pytest.param({"CLUSTERCTL_NO_BELL": "1"}, False, id="variable"),
    ],
)
def test_the_end_of_up_calls_the_person_at_the_terminal(head: LocalHead, env: dict[str, str], is_called: bool) -> None:
    head.write_local({"command": "true"}, sync="none")
    head.env.update(env)  # type: ignore[attr-defined]
    with head.terminal("up", "--no-health") as screen:
        assert screen.wait() == 0
        run = head.newest()
        assert (f"\x07\x1b]0;{run} succeeded\x07\x1b]9;{run} succeeded\x07" in screen.shown) == is_called
