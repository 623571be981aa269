"""A worker that empties its own output (`> /dev/stderr`): what was sent stays, what follows is sent, nothing is twice."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clusterctl.agent.protocol.command_messages import Command
from clusterctl.agent.protocol.run_files import INDEX_RECORD
from tests.agent.conftest import Node

if TYPE_CHECKING:
    from tests.agent.talk import Talk

LOG = "attempt-0/rank-0.log"
INDEX = "attempt-0/rank-0.idx"


class Scripted:
    """A worker that does one step of a script whenever it is told to."""

    def __init__(self, node: Node, *steps: str, **more: object) -> None:
        self._gates = node.home / "gates"
        self._gates.mkdir()
        script = "".join(f"while [ ! -e {self._gates}/{n} ]; do sleep 0.01; done\n{s}\n" for n, s in enumerate(steps))
        self._next = 0
        self.talk = node.talk()
        self.talk.gapless = False
        node.launch(["/bin/bash", "-c", script], talk=self.talk, **more)

    def step(self) -> None:
        (self._gates / str(self._next)).touch()
        self._next += 1


def text(talk: Talk) -> str:
    return bytes(talk.files.get(LOG, b"")).decode()


def shown(talk: Talk) -> str:
    """What a reader sees, without what is missing."""
    return text(talk).replace("\0", "")


def alarms(talk: Talk) -> list[str]:
    return [event["message"] for event in talk.of("alarm") if event["code"] == "output_emptied"]


def test_what_was_sent_stays_and_what_follows_is_sent(node: Node) -> None:
    worker = Scripted(node, "seq 10", "echo warn > /dev/stderr; echo 11; echo Traceback; exit 3")
    talk, before = worker.talk, "".join(f"{n}\n" for n in range(1, 11))
    worker.step()
    talk.until(lambda: text(talk) == before)
    worker.step()
    talk.wait_for("swept")
    talk.until(lambda: text(talk) == before + "warn\n11\nTraceback\n")

    (dropped,) = talk.of("dropped")
    assert (dropped["first_valid"], dropped["lost"]) == (len(before), 0)
    (alarm,) = alarms(talk)
    assert "rank 0 has emptied its own output" in alarm
    assert "`>&2`" in alarm
    answer = talk.ask(Command.READ, **node.where, file=LOG, offset=0, length=7)
    assert (answer["offset"], answer["first_valid"], answer["size"]) == (len(before), len(before), len(text(talk)))
    assert base64.b64decode(answer["data"]) == b"warn\n11"


def test_of_a_file_that_is_emptied_again_and_again_nothing_is_shown_twice_and_the_end_arrives(node: Node) -> None:
    script = "for n in $(seq 8); do seq 100; sleep 0.5; echo a warning $n > /dev/stderr; sleep 0.5; done; echo the end"
    talk = node.talk()
    talk.gapless = False
    node.launch(["/bin/bash", "-c", script], talk=talk)
    talk.wait_for("swept")
    talk.until(lambda: text(talk).endswith("a warning 8\nthe end\n"))
    lines = shown(talk).splitlines()
    assert [line for line in lines if line.startswith("a warning")] == [f"a warning {n}" for n in range(1, 9)]
    assert lines.count("100") == 8
    assert len(alarms(talk)) == 1


def test_what_nobody_had_been_sent_is_counted_and_its_place_is_left_open(node: Node) -> None:
    worker = Scripted(node, "seq 1000", "seq 2000", "echo warn > /dev/stderr; echo end")
    talk = worker.talk
    worker.step()
    talk.until(lambda: text(talk).endswith("\n1000\n"))
    sent = len(text(talk))
    talk.kill()
    worker.step()
    end = sent + len("".join(f"{n}\n" for n in range(1, 2001)))
    again = node.talk()
    again.gapless = False
    index = node.folder / INDEX
    again.eventually(lambda: index.read_bytes().endswith(end.to_bytes(8, "little") + index.read_bytes()[-8:]))
    worker.step()
    again.eventually(lambda: not node.supervised() or _ended(again, node))
    node.follow(again, cursors={LOG: sent})
    again.until(lambda: text(again).endswith("warn\nend\n"))

    start = again.starts[LOG]
    assert text(again) == "warn\nend\n"
    assert start >= end
    assert start - 8192 <= end
    # The journal is told of it a little later: not each time, or it alone would fill the disk.
    again.until(lambda: sum(event["lost"] for event in again.of("dropped")) == end - sent)


def _ended(talk: Talk, node: Node) -> bool:
    return not any(worker["alive"] for worker in talk.ask(Command.STATUS, **node.where)["workers"])


@pytest.mark.parametrize("seen", [True, False], ids=["before it", "while there was none"])
def test_the_next_supervisor_goes_on_with_what_was_emptied(node: Node, seen: bool) -> None:
    worker = Scripted(node, "seq 100", "echo a longer line than any other > /dev/stderr", "echo end")
    talk, before = worker.talk, "".join(f"{n}\n" for n in range(1, 101))
    worker.step()
    talk.until(lambda: text(talk) == before)
    if seen:
        worker.step()
        talk.until(lambda: len(alarms(talk)) == 1)
    first = node.supervisor()
    os.kill(first, signal.SIGSTOP)
    if not seen:
        worker.step()
        talk.eventually(lambda: (node.folder / LOG).read_text() == "a longer line than any other\n")
    os.kill(first, signal.SIGKILL)
    talk.wait_for("adopted")
    worker.step()
    talk.wait_for("swept")
    talk.until(lambda: text(talk) == before + "a longer line than any other\nend\n")


def test_a_session_that_comes_between_an_emptying_and_its_being_noticed_sends_nothing_wrong(node: Node) -> None:
    worker = Scripted(node, "seq 100", "echo a longer line than any other > /dev/stderr; seq 20")
    talk, before = worker.talk, "".join(f"{n}\n" for n in range(1, 101))
    worker.step()
    talk.until(lambda: text(talk) == before)
    os.kill(node.supervisor(), signal.SIGSTOP)
    worker.step()
    log = node.folder / LOG
    talk.eventually(lambda: log.read_text().endswith("\n20\n"))
    again = node.talk(epoch=None)
    node.follow(again, cursors={LOG: len(before)})
    again.wait_for("started")
    answer = again.ask(Command.READ, **node.where, file=LOG, offset=0, length=1000)
    assert (answer["first_valid"], answer["data"]) == (len(before), "")
    for number in (1, 2):
        again.beat(number)
        again.until(lambda number=number: len(again.beats) == number)
    assert LOG not in again.files
    os.kill(node.supervisor(), signal.SIGCONT)
    again.until(lambda: text(again) == log.read_text())
    assert again.starts[LOG] == len(before)


def test_the_index_goes_on_with_the_output(node: Node) -> None:
    worker = Scripted(node, "seq 2000", "echo warn > /dev/stderr", "seq 2000")
    talk = worker.talk
    for end in ("\n2000\n", "warn\n", "\n2000\n"):
        worker.step()
        talk.until(lambda end=end: text(talk).endswith(end) and len(text(talk)) > 8000)
    talk.wait_for("swept")
    talk.until(lambda: INDEX_RECORD.unpack(bytes(talk.files[INDEX])[-INDEX_RECORD.size :])[0] == len(text(talk)))
    sizes = [size for size, _ in INDEX_RECORD.iter_unpack(bytes(talk.files[INDEX]))]
    assert sizes == sorted(sizes)


def test_a_python_that_opens_its_stdout_for_writing_is_no_other_case(node: Node) -> None:
    code = (
        "print('the first line', flush=True)\nimport time\ntime.sleep(1)\nopen('/dev/stdout', 'w').write('second\\n')"
    )
    talk = node.talk()
    node.launch(["/usr/bin/env", "python3", "-c", code], talk=talk)
    talk.wait_for("swept")
    talk.until(lambda: text(talk) == "the first line\nsecond\n")
    assert Path(node.folder / LOG).read_text() == "second\n"
