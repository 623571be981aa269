"""The rule of one owner: no thread changes what is another's."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from clusterctl.run.record import rundir, thread_ownership
from clusterctl.run.record.run_dir_writer import RunDirWriter
from clusterctl.run.record.thread_ownership import NotOwnerError, ThreadOwnedAttributes
from clusterctl.run.rules.controller_events import Note

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def on_a_thread(call: Callable[[], object]) -> BaseException | None:
    """What a call raised on a thread of its own."""
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return raised[0] if raised else None


def test_the_suite_looks_at_who_changes_what() -> None:
    assert thread_ownership.DEBUG


def test_an_attribute_is_changed_by_its_owner_alone() -> None:
    thing = ThreadOwnedAttributes()
    thing.take_ownership()

    setattr(thing, "size", 1)  # noqa: B010 - a plain assignment would need a class of its own
    assert isinstance(on_a_thread(lambda: setattr(thing, "size", 2)), NotOwnerError)
    assert vars(thing)["size"] == 1


def test_before_anybody_owns_it_any_thread_may_make_it() -> None:
    thing = ThreadOwnedAttributes()

    assert on_a_thread(lambda: setattr(thing, "size", 2)) is None


def test_a_journal_is_written_by_the_thread_of_its_loop_alone(tmp_path: Path) -> None:
    run = rundir.create_run_dir("demo", tmp_path)
    writer = RunDirWriter(run)
    writer.take_ownership()

    error = on_a_thread(lambda: writer.append(Note(text="x"), 1.0))
    writer.close()

    assert isinstance(error, NotOwnerError)
    assert "RunDirWriter is changed by" in str(error)
    assert not run.events.exists()


@pytest.mark.parametrize(
    "change", [lambda w: w.close_earlier_attempts("n0", 1), lambda w: w.raise_epoch(3)], ids=["files", "epoch"]
)
def test_nothing_of_a_run_directory_is_changed_by_another_thread(
    tmp_path: Path, change: Callable[[RunDirWriter], object]
) -> None:
    writer = RunDirWriter(rundir.create_run_dir("demo", tmp_path))
    writer.take_ownership()

    error = on_a_thread(lambda: change(writer))
    writer.close()

    assert isinstance(error, NotOwnerError)
