"""What health found the last time is no news."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.config.loader import load_cluster_file
from clusterctl.health.findings import Finding, Status
from clusterctl.run.record.health_history import FindingHistory, describe_new_findings


def warning(node: str | None, check: str = "host.swap", **more: object) -> Finding:
    return Finding(**{"check": check, "status": Status.WARN, "message": f"{check} is odd", "node": node, **more})  # type: ignore[arg-type]


@pytest.fixture
def known(tmp_path: Path) -> FindingHistory:
    return again(tmp_path)


def again(folder: Path, name: str = "cluster.yaml") -> FindingHistory:
    file = folder / name
    file.write_text("version: 1\nhosts: {gpu01: 0}\n")
    return FindingHistory(folder / "state", load_cluster_file([file], environ={}).spec)


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "state" / "health").iterdir())


def test_at_a_first_look_nothing_is_called_new(known: FindingHistory) -> None:
    assert known.list_new_findings([warning("gpu01")]) is None


def test_what_was_there_at_the_last_look_is_not_new(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning("gpu01"), warning(None)], ["gpu01"])
    fresh = warning("gpu01", "net.mtu"), warning("gpu01", gpu=3)
    assert again(tmp_path).list_new_findings([warning("gpu01"), *fresh, warning(None)]) == [*fresh]


def test_nothing_is_new_of_nodes_at_which_nobody_has_looked_before(known: FindingHistory, tmp_path: Path) -> None:
    known.save([], ["gpu01"])
    assert again(tmp_path).list_new_findings([warning("gpu01"), warning("gpu02")]) == [warning("gpu01")]
    assert again(tmp_path).list_new_findings([warning("gpu02"), warning("gpu03"), warning(None)]) is None


def test_what_went_away_and_came_back_is_new(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning("gpu01")], ["gpu01"])
    known.save([], ["gpu01"])
    assert again(tmp_path).list_new_findings([warning("gpu01")]) == [warning("gpu01")]


def test_nodes_that_were_not_looked_at_stay_known(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning("gpu01"), warning("gpu02")], ["gpu01", "gpu02"])
    known.save([], ["gpu01"])
    assert again(tmp_path).list_new_findings([warning("gpu02")]) == []


def test_passes_and_failures_are_no_news(known: FindingHistory) -> None:
    known.save([], ["gpu01"])
    assert known.list_new_findings([warning("gpu01", status=s) for s in (Status.PASS, Status.FAIL, Status.SKIP)]) == []


def test_each_cluster_file_has_its_own(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning("gpu01")], ["gpu01"])
    assert again(tmp_path, "other.yaml").list_new_findings([warning("gpu01")]) is None


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"findings": [], "nodes": 3}', b'{"findings": null, "nodes": []}', b"\x00" * 100, b"[" * 100_000, b'{"findings": ["' + b"x" * 2_000_000],
    ids=["empty", "torn", "list", "number", "null", "zeros", "deep", "long"],
)  # fmt: skip
def test_a_file_that_says_something_else_counts_as_none(known: FindingHistory, tmp_path: Path, content: bytes) -> None:
    known.save([warning("gpu01")], ["gpu01"])
    (file,) = kept(tmp_path)
    file.write_bytes(content)
    assert again(tmp_path).list_new_findings([warning("gpu01")]) is None


def test_what_in_it_is_no_finding_is_passed_over(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning("gpu01")], ["gpu01"])
    (file,) = kept(tmp_path)
    file.write_bytes(b'{"findings": [1, null, {"a": []}, "gpu01 WARN host.swap"], "nodes": ["gpu01", 2]}')
    assert again(tmp_path).list_new_findings([warning("gpu01")]) == []


def test_a_folder_that_cannot_be_written_ends_nothing(known: FindingHistory, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    known.save([warning("gpu01")], ["gpu01"])
    assert known.list_new_findings([warning("gpu01")]) == []


def test_so_many_cluster_files_are_remembered(tmp_path: Path) -> None:
    for number in range(70):
        again(tmp_path, f"{number}.yaml").save([warning("gpu01")], ["gpu01"])
    assert len(kept(tmp_path)) == 64
    assert again(tmp_path, "69.yaml").list_new_findings([warning("gpu01")]) == []


def test_a_flood_of_findings_keeps_the_file_small(known: FindingHistory, tmp_path: Path) -> None:
    known.save([warning(f"gpu{n}", "host." + "x" * 1000) for n in range(12_000)], ["gpu01"])
    (file,) = kept(tmp_path)
    assert file.stat().st_size < 5_000_000


def test_new_findings_that_are_alike_share_a_line() -> None:
    found = [warning("gpu01"), warning("gpu02"), warning(None, "net.mtu")]
    assert describe_new_findings(found) == [
        "new: WARN host.swap on gpu[01-02]: host.swap is odd",
        "new: WARN net.mtu on cluster: net.mtu is odd",
    ]


def test_of_many_new_findings_few_are_told() -> None:
    lines = describe_new_findings([warning("gpu01", f"host.{n}") for n in range(9)])
    assert len(lines) == 6
    assert lines[-1] == "new: 4 findings more; `clusterctl health` lists all"
