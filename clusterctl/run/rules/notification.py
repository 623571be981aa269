"""The messages about a run: which event causes which message, and the form that each service expects. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from clusterctl.config.host_ranges import fold_hosts
from clusterctl.config.secret_redaction import REDACTED, redact_text
from clusterctl.formatting import describe_duration, plural
from clusterctl.logs.safe_text import clean_text, strip_colours
from clusterctl.run.rules import controller_events as head


class MessageEvent(str, Enum):
    """What a message is about: the words of `notify.on`."""

    START = "start"
    FAILURE = "failure"
    STALL = "stall"
    RESTART = "restart"
    NODE = "node"
    END = "end"


NEVER_LEFT_OUT = (MessageEvent.START, MessageEvent.FAILURE, MessageEvent.END)
"""The events whose messages the limit of messages a minute does not leave out."""
_MAX_TEXT = 1500
"""The largest number of characters of a text. Discord accepts 2,000 for the whole message."""
_MAX_READ = 65536
"""Characters of a text after which the rest does not count."""
_MIN_SECRET_LINE = 8
"""A line of a secret with fewer characters, such as `{`, may stand in any text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message about a run.

    Attributes:
        id: Identifies the event of the run; every controller of the run computes the same id.
        text: Details: one sentence a line. `finish` makes the text of workers and nodes harmless.
        command: The command to type.
        time: The time of the event (head's wall clock, seconds).
        repeat: Whether the target may have received the message already.
    """

    id: str
    run: str
    event: MessageEvent
    title: str
    text: str
    command: str
    time: float
    repeat: bool = False

    @property
    def needs_verdict(self) -> bool:
        """Whether the message is about a failure or the begin of a stall, for which the controller saves a verdict."""
        return self.command == f"clusterctl why {self.run}"

    def add_line(self, text: str) -> Message:
        """Return the message with more lines below its text."""
        return replace(self, text=f"{self.text}\n{text}")

    def finish(self, secrets: Collection[str] = (), *, repeat: bool = False) -> Message:
        """Return the message as it is sent: clean lines of limited length, without `secrets` and what looks like one.

        The text is shortened last, because half of a secret would not be recognised.
        """
        lines = [strip_colours(clean_text(line)).strip() for line in self.text[:_MAX_READ].splitlines()]
        text = "\n".join(line for line in lines if line)
        parts = {line.strip() for secret in secrets for line in secret.splitlines() if len(line) >= _MIN_SECRET_LINE}
        # A secret may be a part of another one.
        for secret in sorted(filter(None, {*secrets, *parts}), key=len, reverse=True):
            text = text.replace(secret, REDACTED)
        text = redact_text(text)
        text = text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"
        return replace(self, text=text, repeat=repeat)


class MessageFold:
    """Makes messages from the events of a controller, in the order of its journal.

    Args:
        run: The id of the run.
    """

    def __init__(self, run: str) -> None:
        self._run = run
        self._created = 0.0
        self._stall_phase = "none"

    def add(self, time: float, event: head.ControllerEvent) -> Message | None:
        """Return the message that an event causes. The text of a failure has no verdict yet."""
        run = self._run
        match event:
            case head.RunCreated():
                self._created = time
            case head.AttemptStarted(attempt=0):
                nodes = fold_hosts(str(node["node"]) for node in event.nodes)
                text = f"{plural(event.world_size, 'rank')} on {nodes}"
                return self._make(time, MessageEvent.START, "started", text, f"clusterctl logs -f {run}")
            case head.RestartPlanned():
                number = f" ({event.number} of {event.budget})" if event.number else ""
                cause = event.cause or {}
                rank = f"rank {cause['rank']} on {cause.get('node')}: " if cause.get("rank") is not None else ""
                text = f"{event.why}\n{rank}{cause.get('message') or ''}"
                return self._make(time, MessageEvent.RESTART, f"restarts{number}", text)
            case head.StallChanged():
                before, self._stall_phase = self._stall_phase, event.phase
                if event.phase == "confirmed" != before:
                    text = f"no progress for {describe_duration(event.since_s)}: {event.reason}"
                    return self._make(time, MessageEvent.STALL, "stalls", text, f"clusterctl why {run}")
                if event.phase == "none" and before == "confirmed":
                    return self._make(time, MessageEvent.STALL, "makes progress again", "the stall is over")
            case head.IdleChanged() if event.idle_s > 0:
                text = f"no GPU has done anything for {describe_duration(event.idle_s)}"
                return self._make(time, MessageEvent.STALL, "is idle", text, f"clusterctl logs {run}")
            case head.LinkChanged(link="lost"):
                return self._make(time, MessageEvent.NODE, f"lost {event.node}", event.why)
            case head.HealthChanged(status="FAIL" | "WARN"):
                return self._make(time, MessageEvent.NODE, f"has trouble on {event.node}", event.message)
            case head.RunEnded():
                lasted = f"after {describe_duration(time - self._created)}, exit code {event.exit_code}"
                if event.state in ("failed", "lost"):
                    command = f"clusterctl why {run}"
                    return self._make(
                        time, MessageEvent.FAILURE, event.state.replace("lost", "is lost"), lasted, command
                    )
                return self._make(time, MessageEvent.END, event.state.replace("cancelled", "was cancelled"), lasted)
            case _:
                pass
        return None

    def _make(self, time: float, event: MessageEvent, what: str, text: str, command: str = "") -> Message:
        return Message(
            id=f"{event.value}@{time!r}",
            run=self._run,
            event=event,
            title=f"{self._run} {what}",
            text=text,
            command=command or f"clusterctl status {self._run}",
            time=time,
        )


def build_request(target: str, url: str, message: Message) -> tuple[str, dict[str, Any]]:
    """Return the URL and the JSON object that send a message to a target of `notify`.

    The forms are those of the services: Slack's `mrkdwn` (which reads `<`, `>` and `&`), Discord's `content`, an
    Adaptive Card for a workflow of Teams, and ntfy's JSON, which goes to the root of its server. A worker's text calls
    nobody by `@here` or `<!channel>`.
    """
    title = f"{message.title} (repeat)" if message.repeat else message.title
    match target:
        case "slack":
            title, text, command = (_escape_mrkdwn(part) for part in (title, message.text, message.command))
            return url, {"text": f"*{title}*\n{text}\n`{command}`"}
        case "discord":
            content = f"**{title}**\n{message.text}\n`{message.command}`"
            return url, {"content": content, "allowed_mentions": {"parse": []}}
        case "teams":
            return url, _build_adaptive_card(title, message)
        case "ntfy":
            root, topic = _split_topic(url)
            urgent = message.event in (MessageEvent.FAILURE, MessageEvent.STALL)
            body = {"topic": topic, "title": title, "message": f"{message.text}\n{message.command}"}
            return root, {**body, "priority": 4 if urgent else 3, "tags": [message.event.value]}
        case _:
            return url, asdict(message)


def _escape_mrkdwn(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _build_adaptive_card(title: str, message: Message) -> dict[str, Any]:
    def block(text: str, **style: Any) -> dict[str, Any]:
        return {"type": "TextBlock", "text": text, "wrap": True, **style}

    body = [
        block(title, weight="Bolder", size="Medium"),
        *(block(line) for line in message.text.splitlines()),
        block(message.command, fontType="Monospace"),
    ]
    content = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    attachment = {"contentType": "application/vnd.microsoft.card.adaptive", "content": content}
    return {"type": "message", "attachments": [attachment]}


def _split_topic(url: str) -> tuple[str, str]:
    """Return the root of an ntfy server, with the query of the URL, and the topic."""
    address, question, query = url.partition("?")
    root, _, topic = address.rstrip("/").rpartition("/")
    return f"{root}/{question}{query}", topic


def build_variables(message: Message) -> dict[str, str]:
    """Return the environment variables that a program of `notify.command` gets."""
    values = {"JSON": json.dumps(asdict(message)), "REPEAT": str(int(message.repeat))}
    fields = ("event", "run", "title", "text", "command")
    values |= {name.upper(): str(getattr(getattr(message, name), "value", getattr(message, name))) for name in fields}
    return {f"CLUSTERCTL_NOTIFY_{name}": value.replace("\0", "") for name, value in values.items()}
