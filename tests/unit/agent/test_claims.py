"""Claims on GPUs: who gets one, who is named as its holder, and what lies in the folder that all users share."""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from clusterctl.agent.linux import proc
from clusterctl.agent.linux.proc import find_user_name
from clusterctl.agent.supervisor.gpu_claims import PREFIX, GpuClaimError, GpuClaims
from tests.unit.agent.full import full_at


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    return str(tmp_path / "shared")


def file_of(claims: GpuClaims, index: int) -> Path:
    """A GPU that no driver knows has the name of its index and the boot."""
    (path,) = (Path(path) for path in claims.paths if path.endswith(f"/gpu-{index}-{proc.read_boot_id()}"))
    return path


def indices(claims: GpuClaims) -> list[int]:
    return [int(Path(path).name.split("-")[1]) for path in claims.paths]


def test_a_claim_is_a_file_that_all_users_can_read_and_its_owner_alone_can_write(folder: str) -> None:
    claims = GpuClaims("run-1", "n1", folder)

    assert len(claims.claim([100, 102])) == 2
    assert sorted(claims.paths) == sorted(str(path) for path in Path(folder).glob(f"{PREFIX}*/*"))
    assert indices(claims) == [100, 102]
    assert stat.S_IMODE(file_of(claims, 100).stat().st_mode) == 0o644
    assert json.loads(file_of(claims, 100).read_text()) == {"run": "run-1", "node": "n1", "pid": os.getpid()}
    assert len(claims.descriptors) == len(["the folder", "GPU 100", "GPU 102"])
    claims.release()


def test_what_is_claimed_already_stays_so_and_is_not_new(folder: str) -> None:
    claims = GpuClaims("run-1", "n1", folder)
    first = claims.claim([100])

    assert claims.claim([100]) == set()
    assert len(claims.claim([100, 101])) == 1
    assert indices(claims) == [100, 101]
    claims.release(first)
    assert indices(claims) == [101]
    claims.release()


def test_a_gpu_of_another_run_is_refused_by_name_and_nothing_new_is_held(folder: str) -> None:
    holder, other = GpuClaims("run-1", "n1", folder), GpuClaims("run-2", "n1", folder)
    holder.claim([101])
    other.claim([105])

    with pytest.raises(GpuClaimError) as caught:
        other.claim([100, 101])

    assert str(caught.value) == "GPU 101 is held by run run-1 (node n1)"
    assert indices(other) == [105]
    holder.release()
    assert len(other.claim([100, 101])) == 2
    other.release()


NOBODY = r"locked by {user}, whose claim names no run: as root, `fuser -k {file}` frees the GPU"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", NOBODY, id="nothing yet"),
        pytest.param('{"run": "r', NOBODY, id="torn"),
        pytest.param("[1]", NOBODY, id="something else"),
        pytest.param(json.dumps({"run": "r", "node": ""}), "held by run r", id="of ours"),
        pytest.param(json.dumps({"run": "r", "node": "n7"}), "held by run r (node n7)", id="of another node"),
    ],
)
def test_a_holder_is_named_by_the_file_that_is_locked(folder: str, text: str, words: str) -> None:
    holder = GpuClaims("run-1", "n1", folder)
    holder.claim([103])
    file_of(holder, 103).write_text(text)

    with pytest.raises(GpuClaimError) as caught:
        GpuClaims("run-2", "n1", folder).claim([103])

    assert str(caught.value) == "GPU 103 is " + words.format(
        user=find_user_name(os.getuid()), file=file_of(holder, 103)
    )
    holder.release()


def test_after_a_restart_of_its_supervisor_a_run_has_its_gpus_still(folder: str) -> None:
    waiters = GpuClaims("run-1", "n1", folder)
    waiters.claim([100])
    again = GpuClaims("run-1", "n1", folder, waiters=lambda: [os.getpid()])

    assert len(again.claim([100])) == 1
    again.release()
    with pytest.raises(GpuClaimError, match="held by run run-1"):
        GpuClaims("run-2", "n1", folder).claim([100])
    waiters.release()


def test_what_a_file_says_of_a_run_makes_nobody_its_holder(folder: str) -> None:
    waiters = GpuClaims("run-1", "n1", folder)
    waiters.claim([100])
    with pytest.raises(GpuClaimError, match="held by run run-1"):
        GpuClaims("run-1", "n1", folder).claim([100])
    waiters.release()


def test_a_waiter_keeps_a_gpu_that_its_supervisor_has_given_back(folder: str) -> None:
    claims = GpuClaims("run-1", "n1", folder)
    claims.claim([100])
    waiter = [os.dup(fd) for fd in claims.descriptors]
    claims.release()

    with pytest.raises(GpuClaimError, match="held by run run-1"):
        GpuClaims("run-2", "n1", folder).claim([100])

    for fd in waiter:
        os.close(fd)
    after = GpuClaims("run-2", "n1", folder)
    after.claim([100])
    assert [str(path) for path in Path(folder).glob("*/*")] == after.paths
    after.release()
    assert os.listdir(folder) == []


def test_on_a_full_disk_a_gpu_is_claimed_although_nobody_can_write_whose_it_is(folder: str) -> None:
    claims = GpuClaims("r", "n", folder)
    with full_at(0):
        claims.claim([100])

    with pytest.raises(GpuClaimError, match="^GPU 100 is locked by [^,]+, whose claim names no run"):
        GpuClaims("other", "n", folder).claim([100])
    claims.release()


def test_nothing_stays_open_of_claims_that_were_given_back_or_refused(folder: str) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    claims, other = GpuClaims("r", "n", folder), GpuClaims("other", "n", folder)
    claims.claim([100])
    claims.claim([101])
    with pytest.raises(GpuClaimError):
        other.claim([102, 101])
    claims.release()

    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_folder_in_which_nothing_can_be_claimed_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(GpuClaimError, match=f"^{file} is not a directory"):
        GpuClaims("r", "n", str(file)).claim([100])
    missing = tmp_path / "missing"
    with pytest.raises(GpuClaimError, match=f"^cannot claim GPUs in {missing}: No such file or directory$"):
        GpuClaims("r", "n", str(missing)).claim([100])


def test_of_many_that_want_a_gpu_at_once_one_gets_it(folder: str) -> None:
    start = threading.Barrier(6)

    def take(number: int) -> GpuClaims | None:
        claims = GpuClaims(f"run-{number}", "n1", folder)
        start.wait()
        try:
            claims.claim([100])
        except GpuClaimError:
            return None
        return claims

    with ThreadPoolExecutor(6) as pool:
        holders = [claims for claims in pool.map(take, range(6)) if claims]

    assert len(holders) == 1
    holders[0].release()


def test_a_user_that_this_machine_does_not_name_is_told_by_number() -> None:
    assert find_user_name(0) == "root"
    assert find_user_name(4_000_000_000) == "uid 4000000000"
