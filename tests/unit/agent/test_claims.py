"""Claims on GPUs: who gets one, who is named as its holder, and what lies in the folder that all users share."""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.facts import claim_files
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


def read_claims(folder: str, root: str = "/") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = claim_files.collect_claims(root, folder)["claims"]
    return found


def test_who_announces_itself_is_read_by_all_with_its_gpus_until_it_ends(folder: str, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for gpu in (0, 1):
        (tmp_path / f"dev/nvidia{gpu}").touch()
    run = GpuClaims("run-1", "n1", folder, root=str(tmp_path))
    other = GpuClaims("run-2", "n1", folder, root=str(tmp_path))
    run.claim([1])
    run.announce({"name": "llama", "since": 12, "head": "desk", "workers": 4})
    other.announce({"kind": "reservation", "until": 99, "note": "paper"})
    run.announce({"step": 7})

    mine = {"user": os.getuid(), "user_name": find_user_name(os.getuid()), "node": "n1"}
    assert sorted(read_claims(folder, str(tmp_path)), key=lambda claim: str(claim["run"])) == [
        {**mine, "run": "run-1", "gpus": [1], "name": "llama", "since": 12, "head": "desk", "workers": 4, "step": 7},
        {**mine, "run": "run-2", "gpus": [], "kind": "reservation", "until": 99, "note": "paper"},
    ]
    run.release()
    other.release()
    assert read_claims(folder) == []
    assert os.listdir(folder) == []


@pytest.mark.parametrize(
    ("details", "shown"),
    [
        pytest.param({"note": "a\x1b]52;c;eA==\x07b"}, {"note": "a?]52;c;eA==?b"}, id="a text that steers a terminal"),
        pytest.param({"note": "x" * 3000}, {"note": "x" * 200}, id="a long text"),
        pytest.param({"since": "now", "until": True, "workers": float("nan")}, {}, id="no numbers"),
        pytest.param({"since": 1e300, "until": -1, "gpus": [7], "user": 0}, {}, id="no time, and fields not its own"),
        pytest.param({"note": "x" * 9000}, None, id="more than a record may have"),
    ],
)
def test_what_a_run_says_of_itself_is_cut_and_cleaned(
    folder: str, details: dict[str, object], shown: dict[str, object] | None
) -> None:
    claims = GpuClaims("run-1", "n1", folder)
    claims.announce(details)

    mine = {"user": os.getuid(), "user_name": find_user_name(os.getuid()), "gpus": []}
    assert read_claims(folder) == [{**mine, **({} if shown is None else {"run": "run-1", "node": "n1", **shown})}]
    claims.release()


def test_where_nothing_can_be_claimed_a_run_without_gpus_announces_nothing_and_goes_on(tmp_path: Path) -> None:
    claims = GpuClaims("run-1", "n1", str(tmp_path / "missing"))
    claims.announce({"name": "llama"})
    assert claims.paths == []


def test_nobody_hides_the_claims_of_others_behind_many_of_his_own(folder: str) -> None:
    many = [GpuClaims(f"run-{number}", "n1", folder) for number in range(70)]
    for claims in many:
        claims.announce({})
    assert len(read_claims(folder)) == 64
    assert claim_files.collect_claims("/", folder)["left_out"] == 6
    for claims in many:
        claims.release()
