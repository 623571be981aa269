"""Which event causes which message, and what each service gets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterctl.run.rules import controller_events as head
from clusterctl.run.rules.notification import Message, MessageEvent, MessageFold, build_request, build_variables

RUN = "llm-7k2p"
NODES = [{"node": f"gpu0{n}", "node_rank": n, "address": "", "ranks": [n]} for n in (1, 2)]


def attempt(number: int) -> head.AttemptStarted:
    return head.AttemptStarted(attempt=number, world_size=16, master_addr=None, master_port=None, nodes=NODES)


def stall(phase: str) -> head.StallChanged:
    return head.StallChanged(attempt=0, phase=phase, since_s=600.0, reason="no rank makes progress")


def trouble(status: str) -> head.HealthChanged:
    return head.HealthChanged(
        node="gpu02", gpu=3, check="xid", key="xid", status=status, message="gpu02: GPU 3 fell off"
    )


def restart(cause: dict[str, Any] | None) -> head.RestartPlanned:
    return head.RestartPlanned(attempt=1, why="crash", at=0.0, number=1, budget=3, cause=cause)


STATUS, WHY = f"clusterctl status {RUN}", f"clusterctl why {RUN}"
CREATED = head.RunCreated(run=RUN, name="llm", path="/x/cluster.yaml")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([CREATED], [], id="created"),
        pytest.param(
            [attempt(0)],
            [("start", f"{RUN} started", "16 ranks on gpu[01-02]", f"clusterctl logs -f {RUN}")],
            id="start",
        ),
        pytest.param([attempt(1)], [], id="second attempt"),
        pytest.param(
            [restart({"rank": 3, "node": "gpu01", "message": "boom"})],
            [("restart", f"{RUN} restarts (1 of 3)", "crash\nrank 3 on gpu01: boom", STATUS)],
            id="restart",
        ),
        pytest.param(
            [restart(None)], [("restart", f"{RUN} restarts (1 of 3)", "crash", STATUS)], id="restart without a cause"
        ),
        pytest.param([stall("suspected"), stall("none")], [], id="suspicion alone"),
        pytest.param(
            [stall("suspected"), stall("confirmed"), stall("none")],
            [
                ("stall", f"{RUN} stalls", "no progress for 10 min: no rank makes progress", WHY),
                ("stall", f"{RUN} makes progress again", "the stall is over", STATUS),
            ],
            id="stall and its end",
        ),
        pytest.param([head.LinkChanged(node="gpu02", link="unreachable", why="silent")], [], id="unreachable"),
        pytest.param(
            [head.LinkChanged(node="gpu02", link="lost", why="silent for 2 min")],
            [("node", f"{RUN} lost gpu02", "silent for 2 min", STATUS)],
            id="lost",
        ),
        pytest.param(
            [trouble("FAIL"), trouble("PASS")],
            [("node", f"{RUN} has trouble on gpu02", "gpu02: GPU 3 fell off", STATUS)],
            id="health",
        ),
        pytest.param(
            [CREATED, head.RunEnded(state="succeeded", exit_code=0)],
            [("end", f"{RUN} succeeded", "after 0 s, exit code 0", STATUS)],
            id="success",
        ),
        pytest.param(
            [CREATED, head.RunEnded(state="cancelled", exit_code=103)],
            [("end", f"{RUN} was cancelled", "after 0 s, exit code 103", STATUS)],
            id="cancelled",
        ),
        pytest.param(
            [CREATED, head.RunEnded(state="lost", exit_code=105)],
            [("failure", f"{RUN} is lost", "after 0 s, exit code 105", WHY)],
            id="lost run",
        ),
    ],
)
def test_an_event_causes_a_message(events: list[head.ControllerEvent], expected: list[tuple[str, ...]]) -> None:
    fold = MessageFold(RUN)
    made = [message.finish() for event in events if (message := fold.add(1000.0, event)) is not None]

    assert [(m.event.value, m.title, m.text, m.command) for m in made] == expected
    assert [m.needs_verdict for m in made] == [command == WHY for *_, command in expected]


def message(text: str = "rank 3: boom", *, repeat: bool = False) -> Message:
    return Message(
        id="failure@1.5", run=RUN, event=MessageEvent.FAILURE, title=f"{RUN} failed", text=text, command=WHY, time=1.5,
        repeat=repeat,
    )  # fmt: skip


URL = "https://example.org/hook"


@pytest.mark.parametrize(
    ("target", "url", "to", "body"),
    [
        pytest.param(
            "webhook",
            URL,
            URL,
            {
                "id": "failure@1.5",
                "run": RUN,
                "event": "failure",
                "title": f"{RUN} failed",
                "text": "rank 3: boom",
                "command": WHY,
                "time": 1.5,
                "repeat": True,
            },
            id="webhook",
        ),
        pytest.param("slack", URL, URL, {"text": f"*{RUN} failed (repeat)*\nrank 3: boom\n`{WHY}`"}, id="slack"),
        pytest.param(
            "discord",
            URL,
            URL,
            {"content": f"**{RUN} failed (repeat)**\nrank 3: boom\n`{WHY}`", "allowed_mentions": {"parse": []}},
            id="discord",
        ),
        pytest.param(
            "teams",
            URL,
            URL,
            {
                "type": "message",
                "attachments": [
                    {
                        "contentType": "application/vnd.microsoft.card.adaptive",
                        "content": {
                            "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
                            "type": "AdaptiveCard",
                            "version": "1.4",
                            "body": [
                                {"type": "TextBlock", "text": f"{RUN} failed (repeat)", "wrap": True, "weight": "Bolder", "size": "Medium"},
                                {"type": "TextBlock", "text": "rank 3: boom", "wrap": True},
                                {"type": "TextBlock", "text": WHY, "wrap": True, "fontType": "Monospace"},
                            ],
                        },
                    }
                ],
            },
            id="teams",
        ),
        pytest.param(
            "ntfy",
            "https://ntfy.example.org/sub/topic?auth=x",
            "https://ntfy.example.org/sub/?auth=x",
            {
                "topic": "topic",
                "title": f"{RUN} failed (repeat)",
                "message": f"rank 3: boom\n{WHY}",
                "priority": 4,
                "tags": ["failure"],
            },
            id="ntfy",
        ),
    ],
)  # fmt: skip
def test_a_service_gets_its_own_form(target: str, url: str, to: str, body: dict[str, Any]) -> None:
    assert build_request(target, url, message(repeat=True)) == (to, body)


def test_a_worker_calls_nobody_by_its_text() -> None:
    text = "<!channel> <@U1> @everyone & more"
    slack, discord = (build_request(target, URL, message(text))[1] for target in ("slack", "discord"))

    assert "&lt;!channel&gt; &lt;@U1&gt; @everyone &amp; more" in slack["text"]
    assert discord["allowed_mentions"] == {"parse": []}


def test_a_secret_is_in_no_message() -> None:
    said = message("boom: s3same hf_abcdefghijklmnopqrst API_KEY=abc").finish(("s3same", ""))
    assert said.text == "boom: *** *** API_KEY=***"


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        pytest.param(["s3same-and-more"], f"{'x' * 1490} s3same-and-more", id="at the limit of the text"),
        pytest.param(["s3same", "s3same-and-more"], "boom: s3same-and-more", id="the beginning of another secret"),
        pytest.param(["s3same-and-more"], "boom: s3same\x1b[1m-and-more", id="colours inside"),
        pytest.param(["-----KEY-----\ns3same-and-more\n"], "boom:\n  s3same-and-more", id="one line of several"),
    ],
)
def test_no_part_of_a_secret_is_in_a_message(secrets: list[str], text: str) -> None:
    said = message("boom").add_line(text).finish(secrets).text

    assert "s3s" not in said
    assert "and-more" not in said


@given(st.text(max_size=5000))
def test_text_of_a_worker_becomes_short_and_harmless(text: str) -> None:
    said = message().add_line(text).finish()
    values = build_variables(said)

    assert len(said.text) <= 1500
    assert not any(c in said.text for c in "\0\x07\x1b\r\u202e")
    assert all("\0" not in value for value in values.values())
    assert len(build_request("discord", URL, said)[1]["content"]) <= 2000
