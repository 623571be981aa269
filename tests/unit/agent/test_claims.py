"""Claims on GPUs: who gets one, who is named as its holder, and what lies in the folder that all users share."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.supervisor.claims import ClaimError, Claims
from tests.unit.agent.full import full_at


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "locks")


def name_of(folder: str, index: int) -> Path:
    """A GPU that no driver knows has the name of its index and the boot."""
    return Path(folder) / f"gpu-{index}-{proc.boot_id()}"


def test_a_claim_is_a_file_that_all_users_can_open_and_that_says_whose_it_is(folder: str) -> None:
    claims = Claims("run-1", "n1", folder)

    assert len(claims.take([100, 102])) == 2
    assert claims.paths == [str(name_of(folder, 100)), str(name_of(folder, 102))]
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o1777
    assert stat.S_IMODE(name_of(folder, 100).stat().st_mode) == 0o666
    whose = {"run": "run-1", "node": "n1", "user": os.getuid(), "pid": os.getpid()}
    assert json.loads(name_of(folder, 100).read_text()) == whose
    assert len(claims.descriptors) == 2
    claims.release()


def test_what_is_claimed_already_stays_so_and_is_not_new(folder: str) -> None:
    claims = Claims("run-1", "n1", folder)
    first = claims.take([100])

    assert claims.take([100]) == set()
    assert len(claims.take([100, 101])) == 1
    assert [Path(path) for path in claims.paths] == [name_of(folder, 100), name_of(folder, 101)]
    claims.release(first)
    assert [Path(path) for path in claims.paths] == [name_of(folder, 101)]
    claims.release()


def test_a_gpu_of_another_run_is_refused_by_name_and_nothing_new_is_held(folder: str) -> None:
    holder, other = Claims("run-1", "n1", folder), Claims("run-2", "n1", folder)
    holder.take([101])
    other.take([105])

    with pytest.raises(ClaimError) as caught:
        other.take([100, 101])

    assert str(caught.value) == "GPU 101 is held by run run-1 (node n1)"
    assert [Path(path) for path in other.paths] == [name_of(folder, 105)]
    holder.release()
    assert len(other.take([100, 101])) == 2
    other.release()


US = os.getuid()
LOCKED = f"locked by pid {os.getpid()} of uid {US}, and no run says that it holds it: ending that process frees it"


@pytest.mark.parametrize(
    ("left", "words"),
    [
        pytest.param("", LOCKED, id="nothing yet"),
        pytest.param('{"run": "r', LOCKED, id="torn"),
        pytest.param("[1]", LOCKED, id="something else"),
        pytest.param('{"run": "r"}', LOCKED, id="of nobody"),
        pytest.param('{"run": "r", "user": 4242}', LOCKED, id="of a user who does not hold the lock"),
        pytest.param(json.dumps({"run": "r", "user": US, "node": ""}), "held by run r", id="of ours"),
        pytest.param(
            json.dumps({"run": "r", "user": US, "node": "n7"}), "held by run r (node n7)", id="of another node"
        ),
    ],
)
def test_a_holder_is_named_by_its_file_where_the_lock_is_of_that_user_else_by_the_kernel(
    folder: str, left: str, words: str
) -> None:
    holder = Claims("run-1", "n1", folder)
    holder.take([103])
    name_of(folder, 103).write_text(left)

    with pytest.raises(ClaimError) as caught:
        Claims("run-2", "n1", folder).take([103])

    assert str(caught.value) == f"GPU 103 is {words}"
    holder.release()


def test_after_a_restart_of_its_supervisor_a_run_has_its_gpus_still(folder: str) -> None:
    waiters = Claims("run-1", "n1", folder)
    waiters.take([100])
    again = Claims("run-1", "n1", folder, guards=lambda: [os.getpid()])

    assert len(again.take([100])) == 1
    assert json.loads(name_of(folder, 100).read_text())["run"] == "run-1"
    again.release()
    waiters.release()


def test_what_a_file_says_of_a_run_makes_nobody_its_holder(folder: str) -> None:
    waiters = Claims("run-1", "n1", folder)
    waiters.take([100])
    with pytest.raises(ClaimError, match="held by run run-1"):
        Claims("run-1", "n1", folder).take([100])
    waiters.release()


def test_a_file_that_an_earlier_run_left_is_taken_over_whole(folder: str) -> None:
    earlier = Claims("a-run-with-a-very-long-name", "n1", folder)
    earlier.take([100])
    earlier.release()

    claims = Claims("r", "n", folder)
    claims.take([100])

    assert json.loads(name_of(folder, 100).read_text())["run"] == "r"
    claims.release()


def test_on_a_full_disk_a_gpu_is_claimed_although_nobody_can_write_whose_it_is(folder: str) -> None:
    claims = Claims("r", "n", folder)
    with full_at(0):
        claims.take([100])

    with pytest.raises(ClaimError, match=f"^GPU 100 is {LOCKED}$"):
        Claims("other", "n", folder).take([100])
    claims.release()


def test_the_folder_is_kept_from_who_tidies_up_while_something_is_claimed(folder: str) -> None:
    claims = Claims("r", "n", folder)
    assert claims.take([]) == set()
    assert claims.folder == []
    taken = claims.take([100, 101])
    assert len(claims.folder) == 1
    claims.release(list(taken)[:1])
    assert len(claims.folder) == 1
    claims.release()
    assert (claims.folder, claims.paths) == ([], [])


def test_nothing_stays_open_of_claims_that_were_given_back_or_refused(folder: str) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    claims, other = Claims("r", "n", folder), Claims("other", "n", folder)
    claims.take([100])
    claims.take([101])
    with pytest.raises(ClaimError):
        other.take([102, 101])
    claims.release()

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_folder_in_which_nothing_can_be_claimed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ClaimError, match=f"^{file} is not a directory: as root, `rm -r {file}; install -d -m 1777 {file}` mends it$"
    ):
        Claims("r", "n", str(file)).take([100])
    missing = tmp_path / "missing" / "locks"
    with pytest.raises(ClaimError, match=f"^cannot claim GPUs in {missing}: No such file or directory$"):
        Claims("r", "n", str(missing)).take([100])


def test_a_link_in_the_place_of_a_lock_is_not_followed(folder: str, tmp_path: Path) -> None:
    os.mkdir(folder)
    target = tmp_path / "precious"
    target.write_text("kept")
    name_of(folder, 100).symlink_to(target)

    with pytest.raises(ClaimError, match="Too many levels of symbolic links"):
        Claims("r", "n", folder).take([100])

    assert target.read_text() == "kept"
